"""``stagemesh simulate``: run a scenario in virtual time and say what its plan would do."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from coordinator.planner.document import plan_document, refusal_document
from coordinator.planner.plan import PlanRefused
from coordinator.planner.problem import PlanningProblem
from coordinator.simulator.execution import ProgressCallback, planned_for_execution, simulate
from coordinator.simulator.outcome import Outcome, Percentiles, outcome_document
from coordinator.simulator.scenario import Scenario
from protocol.errors import ConfigurationError
from stage_agent.cli.output import JsonOption, console, print_json
from stage_agent.cli.plan_view import columns, milliseconds, refusal_view
from stage_agent.cli.planning import exit_code
from stage_agent.cli.scenario_files import load_scenario

PLOT_SUFFIXES = (".svg", ".png", ".html")
PROGRESS_FROM_REQUESTS = 2_000


def register(app: typer.Typer) -> None:
    """Add ``simulate`` to the command line."""
    app.command("simulate")(simulate_command)


def simulate_command(
    scenario: Annotated[Path, typer.Argument(metavar="FILE", help="Scenario (TOML).")],
    *,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="OUT", help="Write a plot: .svg, .png or .html.")
    ] = None,
    as_json: JsonOption = False,
    seed: Annotated[
        int, typer.Option("--seed", min=0, help="Of random arrivals; the same seed gives the same run.")
    ] = 0,
    force_capacity: Annotated[
        bool, typer.Option("--force-capacity", help="Plan by memory alone, as if nothing had been measured.")
    ] = False,
) -> None:
    """Simulate requests on the plan of a scenario: latencies, throughput, idle time, and what each event costs."""
    if plot is not None and plot.suffix.lower() not in PLOT_SUFFIXES:
        raise ConfigurationError(f"--plot {plot}: write {', '.join(PLOT_SUFFIXES)}")
    described = load_scenario(scenario)
    if force_capacity:
        described = _by_capacity(described)
    with _progress(described) as on_progress:
        outcome = simulate(described, seed=seed, on_progress=on_progress)
    if isinstance(outcome, PlanRefused):
        document = _refusal(described, outcome)
        if as_json:
            print_json(document)
        else:
            console().print(refusal_view(document))
        raise typer.Exit(exit_code(document))
    if plot is not None:
        from stage_agent.cli.simulation_plot import write_plot

        write_plot(plot, described, outcome)
    if as_json:
        print_json(outcome_document(outcome, plan_document(outcome.plan)))
        return
    console().print(outcome_view(described, outcome))
    if plot is not None:
        Console(stderr=True, markup=False, highlight=False).print(f"plot written to {plot}")


def _by_capacity(scenario: Scenario) -> Scenario:
    if isinstance(scenario.problem, PlanRefused):
        return scenario
    request = replace(scenario.problem.request, performance_aware=False)
    return replace(scenario, problem=replace(scenario.problem, request=request))


def _refusal(scenario: Scenario, refused: PlanRefused) -> dict[str, Any]:
    document = refusal_document(refused)
    if isinstance(scenario.problem, PlanningProblem):
        _, flags = planned_for_execution(scenario.problem, lambda _: refused)
        if flags:
            document["error"]["details"]["flags"] = sorted(flags)
    return document


@contextmanager
def _progress(scenario: Scenario) -> Iterator[ProgressCallback | None]:
    """A bar on stderr when it is a terminal and the run is long."""
    errors = Console(stderr=True)
    if not errors.is_terminal or scenario.traffic.requests < PROGRESS_FROM_REQUESTS:
        yield None
        return
    with Progress(
        TextColumn("simulating"), BarColumn(), TextColumn("{task.completed:,} of {task.total:,} requests"),
        TimeRemainingColumn(), console=errors, transient=True,
    ) as bar:  # fmt: skip
        task = bar.add_task("requests", total=scenario.traffic.requests)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def outcome_view(scenario: Scenario, outcome: Outcome) -> RenderableType:
    """The run as tables."""
    parts: list[RenderableType] = [Text(scenario.name, style="bold")]
    if scenario.why:
        parts.append(Text(scenario.why, style="dim"))
    parts += [Text(), _speed(outcome), Text(), _latencies(outcome), Text(), _stages(outcome)]
    if outcome.events:
        parts += [Text(), _events(outcome)]
    if "exceeds_context" in outcome.flags:
        words = f"requests longer than the context of {outcome.plan.context_length:,} tokens fail: state fewer tokens"
        parts += [Text(), Text(words, style="yellow")]
    if outcome.flags:
        parts += [Text(), Text("flags: " + ", ".join(outcome.flags), style="yellow")]
    return Group(*parts)


def _speed(outcome: Outcome) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    order = " → ".join(f"{one.node_id} [{one.layer_start}, {one.layer_end})" for one in outcome.plan.stages)
    failed = f", {outcome.failed:,} failed" if outcome.failed else ""
    table.add_row("plan", f"{order}; lanes: {outcome.plan.parallel_lanes}, {outcome.plan.placement}")
    table.add_row("requests", f"{outcome.completed:,} answered{failed} in {outcome.span_us / 1e6:,.1f} s")
    table.add_row("throughput", f"{outcome.tokens_per_s:,.2f} tokens/s")
    table.add_row("one stream", f"{outcome.decode_tok_s_per_stream:,.2f} tokens/s while decoding")
    table.add_row("in the system", f"{outcome.mean_in_system:.2f} requests on average")
    if outcome.downtime_us or outcome.interrupted:
        table.add_row(
            "outages",
            f"{outcome.downtime_us / 1e6:.1f} s without service, {outcome.interrupted} interruptions, "
            f"{outcome.prefilled_again:,} tokens prefilled again",
        )
    return table


def _latencies(outcome: Outcome) -> Table:
    table = columns("", ">p50", ">p90", ">p99")
    rows: tuple[tuple[str, Percentiles], ...] = (
        ("first token", outcome.ttft_us),
        ("per token", outcome.tpot_us),
        ("whole answer", outcome.latency_us),
    )
    for name, values in rows:
        table.add_row(Text(name, style="dim"), *(milliseconds(value) for value in (values.p50, values.p90, values.p99)))
    return table


def _stages(outcome: Outcome) -> Table:
    table = columns(">stage", "node", ">computing", ">bubbles while serving")
    for stage in outcome.stages:
        table.add_row(
            str(stage.stage_index),
            Text(stage.node_id, style="bold"),
            f"{stage.utilization:.1%}",
            f"{stage.bubble_share:.1%}",
        )
    return table


def _events(outcome: Outcome) -> Table:
    table = columns(">at", "event", "effect")
    for event in outcome.events:
        table.add_row(f"{event.at_us / 1e6:,.1f} s", event.kind, event.effect)
    return table
