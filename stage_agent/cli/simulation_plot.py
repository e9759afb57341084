"""The plot of a simulated run: who worked when, and what more users would get. SVG, PNG or self-contained HTML."""

import html
import io
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from coordinator.planner.plan import PlanRefused
from coordinator.planner.problem import PlanningProblem
from coordinator.simulator.engine import Span
from coordinator.simulator.execution import simulate
from coordinator.simulator.outcome import Outcome
from coordinator.simulator.scenario import Scenario
from coordinator.simulator.scenario_workload import Traffic
from protocol.errors import StagemeshError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DRAWN_TOKENS = 6
"""Passes of the busiest lane shown in the timeline: enough to see the rhythm."""
ROUNDS_PER_USER = 4
MAX_USERS = 64

COMPUTE_COLOURS = ("#3b6ea8", "#d98032", "#4d9a5b", "#a8508d", "#8a7a3d", "#5aa5a8")
SEND_COLOUR = "#c9ccd1"


def write_plot(path: Path, scenario: Scenario, outcome: Outcome) -> None:
    """Write the plot in the format of the file's suffix. The same run gives the same bytes.

    Raises:
        StagemeshError: the file cannot be written.
    """
    content = render(path.suffix.lower().removeprefix("."), scenario, outcome)
    try:
        path.write_bytes(content)
    except OSError as error:
        raise StagemeshError(f"--plot {path}: {error.strerror or error}") from error


def render(kind: str, scenario: Scenario, outcome: Outcome) -> bytes:
    """``svg``, ``png`` or ``html``."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "stagemesh", "font.size": 9, "svg.fonttype": "none"}):
        rows = 3 if outcome.events else 2
        figure = Figure(figsize=(11, 7.2 if rows == 2 else 9.4), layout="constrained")
        grid = figure.add_gridspec(rows, 2, height_ratios=(3, 2, 2)[:rows])
        _timeline(figure.add_subplot(grid[0, :]), scenario, outcome)
        if outcome.events:
            _history(figure.add_subplot(grid[1, :]), outcome)
        _concurrency(figure.add_subplot(grid[-1, 0]), figure.add_subplot(grid[-1, 1]), scenario, outcome)
        return _encoded(figure, kind, scenario.name)


def _encoded(figure: "Figure", kind: str, title: str) -> bytes:
    buffer = io.BytesIO()
    if kind == "png":
        figure.savefig(buffer, format="png", dpi=130, metadata={"Software": None})
        return buffer.getvalue()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    drawing = buffer.getvalue().decode("utf-8")
    if kind == "svg":
        return drawing.encode("utf-8")
    body = drawing[drawing.index("<svg") :]
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title>"
        "<style>body{margin:1rem;font-family:sans-serif}svg{max-width:100%;height:auto}</style></head>"
        f"<body>{body}</body></html>\n"
    )
    return page.encode("utf-8")


def _window(spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """The passes around the first decode: the last prefill chunks and a few tokens of every lane."""
    decoded = [span for span in spans if span.kind == "decode" and span.stage_index == 0]
    if not decoded:
        return spans[:200]
    first = decoded[0]
    own = [span for span in decoded if span.request == first.request][: DRAWN_TOKENS + 1]
    pass_us = max(1, (own[-1].start_us - own[0].start_us) // max(1, len(own) - 1))
    start, end = first.start_us - 2 * pass_us, first.start_us + DRAWN_TOKENS * pass_us
    return tuple(span for span in spans if span.end_us > start and span.start_us < end)


def _timeline(axes: "Axes", scenario: Scenario, outcome: Outcome) -> None:
    window = _window(outcome.spans)
    if not window:
        axes.set_title("nothing was served")
        return
    zero = min(span.start_us for span in window)
    names = {span.stage_index: span.node_id for span in window}
    for span in window:
        colour = COMPUTE_COLOURS[span.request % len(COMPUTE_COLOURS)]
        compute = ((span.start_us - zero) / 1e3, (span.computed_us - span.start_us) / 1e3)
        send = ((span.computed_us - zero) / 1e3, (span.end_us - span.computed_us) / 1e3)
        row = span.stage_index
        axes.broken_barh([compute], (row - 0.36, 0.72), facecolors=colour, alpha=0.45 if span.kind == "prefill" else 1)
        axes.broken_barh([send], (row - 0.14, 0.28), facecolors=SEND_COLOUR)
    axes.set_yticks(sorted(names), [f"stage {index}\n{names[index]}" for index in sorted(names)])
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("ms; wide: computing (pale: prefill, one colour per request), narrow grey: frame on its way")
    axes.set_title(f"{scenario.name}: stages and hops around the first tokens", loc="left")
    axes.grid(axis="x", alpha=0.25)


def _history(axes: "Axes", outcome: Outcome) -> None:
    """Tokens per second over the whole run, with the events."""
    end_s = min(outcome.span_us // 1_000_000 + 1, max(outcome.tokens_by_second, default=0) + 1)
    width = max(1, end_s // 200)
    bars = [
        sum(outcome.tokens_by_second.get(second, 0.0) for second in range(start, start + width)) / width
        for start in range(0, end_s, width)
    ]
    axes.stairs(bars, [start * width for start in range(len(bars) + 1)], fill=True, color=COMPUTE_COLOURS[0], alpha=0.6)
    top = max(bars, default=1.0) * 1.45
    for index, event in enumerate(outcome.events):
        at_s = event.at_us / 1e6
        if at_s <= end_s:
            axes.axvline(at_s, color="#b33", linewidth=0.9)
            axes.text(at_s, top * (0.97 - 0.11 * (index % 3)), f" {event.kind}", color="#b33", fontsize=8, va="top")
    axes.set_ylim(0, top)
    axes.set_xlim(0, end_s)
    axes.set_ylabel("tokens per second")
    axes.set_xlabel("s")
    axes.set_title("the whole run and its events", loc="left")
    axes.grid(alpha=0.25)


def _user_counts(outcome: Outcome) -> list[int]:
    lanes = outcome.plan.parallel_lanes
    counts = {1, 2, 3, 4, 6, 8, lanes, 2 * lanes}
    return sorted(count for count in counts if count <= min(MAX_USERS, max(8, 2 * lanes)))


def _concurrency(left: "Axes", right: "Axes", scenario: Scenario, outcome: Outcome) -> None:
    users = _user_counts(outcome)
    runs = [_closed_loop(scenario, outcome, count) for count in users]
    tpot = [0.0 if run.tpot_us.p50 is None else run.tpot_us.p50 / 1e3 for run in runs]
    ttft = [0.0 if run.ttft_us.p90 is None else run.ttft_us.p90 / 1e3 for run in runs]
    throughput = [run.tokens_per_s for run in runs]
    left.plot(users, tpot, "o-", color=COMPUTE_COLOURS[0], label="per token (median)")
    target = outcome.plan.target.decode_tpot_us / 1e3
    if target < 3 * max(tpot):
        left.axhline(target, color="#b33", linestyle="--", linewidth=1, label="target")
    left.set_ylim(0, 1.15 * max(*tpot, 1e-9))
    left.set_ylabel("ms per token")
    left.set_xlabel("users at once")
    right.plot(users, throughput, "o-", color=COMPUTE_COLOURS[2], label="tokens/s, prefill included")
    right.set_ylim(0, 1.15 * max(*throughput, 1e-9))
    right.set_ylabel("tokens per second")
    right.set_xlabel("users at once")
    waiting = right.twinx()
    waiting.plot(
        users, [value / 1e3 for value in ttft], "s:", color=COMPUTE_COLOURS[1], label="first token (90th percentile)"
    )
    waiting.set_ylim(bottom=0)
    waiting.set_ylabel("s to the first token")
    lanes = outcome.plan.parallel_lanes
    for axes in (left, right):
        axes.axvline(lanes, color="#999", linewidth=0.8, linestyle=":")
        axes.grid(alpha=0.25)
    left.set_title(f"speed of one stream (dotted: lanes, {lanes})", loc="left")
    right.set_title("throughput and waiting", loc="left")
    left.legend(loc="lower right", fontsize=8)
    handles = [*right.get_lines()[:1], *waiting.get_lines()]
    right.legend(handles, [str(line.get_label()) for line in handles], loc="lower right", fontsize=8)


def _closed_loop(scenario: Scenario, outcome: Outcome, users: int) -> Outcome:
    """The same plan and lengths with that many users and no events."""
    assert isinstance(scenario.problem, PlanningProblem)
    traffic = Traffic(
        requests=users * ROUNDS_PER_USER,
        streams=users,
        prompt_tokens=scenario.traffic.prompt_tokens,
        output_tokens=scenario.traffic.output_tokens,
        load_bytes_per_s=scenario.traffic.load_bytes_per_s,
    )
    run = simulate(replace(scenario, traffic=traffic, events=()), planner=lambda _: outcome.plan)
    assert not isinstance(run, PlanRefused)
    return run
