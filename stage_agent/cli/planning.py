"""``stagemesh plan`` and ``stagemesh explain``: of the live mesh, or of a mesh described in a scenario file."""

import json
import time
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.live import Live

from coordinator.planner.plan import Plan, PlanRefused
from coordinator.planner.problem import PlanningProblem
from coordinator.planner.validate import MAX_EXACT
from protocol.errors import ConfigurationError
from stage_agent.cli.output import JsonOption, NodeOption, console, print_json
from stage_agent.cli.plan_view import Document, plan_view, refusal_view, with_names
from stage_agent.cli.scenario_files import load_scenario, read_text

EXIT_NO_PLACEMENT = 3
EXIT_TARGET_MISSED = 4
WATCH_SECONDS = 1.0

ScenarioOption = Annotated[Path | None, typer.Option("--scenario", metavar="FILE", help="A described mesh (TOML).")]


def register(app: typer.Typer) -> None:
    """Add ``plan`` and ``explain`` to the command line."""
    app.command("plan")(plan_command)
    app.command("explain")(explain_command)


def plan_command(
    model: Annotated[str | None, typer.Argument(help="Model to place on the live mesh (with --dry-run).")] = None,
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be placed; change nothing.")] = False,
    scenario: ScenarioOption = None,
    as_json: JsonOption = False,
    node: NodeOption = None,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh in place until interrupted.")] = False,
) -> None:
    """Show the plan: of the live mesh, of a model placed on it (--dry-run), or of a described mesh (--scenario)."""
    if scenario is not None:
        if model is not None or node is not None or watch:
            raise typer.BadParameter("--scenario describes model and mesh: no MODEL, --node or --watch with it")
        raise typer.Exit(show(planned_document(scenario), as_json=as_json))
    if model is not None and not dry_run:
        raise typer.BadParameter(f"say --dry-run to see where {model} would go; `stagemesh serve {model}` places it")
    if watch and not as_json:
        _watch(node, model)
    document = _live_document(node, model)
    raise typer.Exit(show(document if as_json else _named(node, document), as_json=as_json))


def explain_command(
    plan: Annotated[Path | None, typer.Argument(help="A plan document (plan --json); none = the best one.")] = None,
    *,
    scenario: ScenarioOption = None,
    as_json: JsonOption = False,
    node: NodeOption = None,
) -> None:
    """Say why this plan: what each hop and stage costs, the best rivals, and the term that decides."""
    if scenario is None:
        from stage_agent.cli.client import get_json

        if plan is not None:
            raise typer.BadParameter("a PLAN file needs the --scenario it was made for")
        document: Document = get_json(node, "/api/v1/plan/explain")
        document = document if as_json else _named(node, document)
    else:
        document = _explained_document(scenario, plan)
    if as_json:
        print_json(document)
    else:
        from stage_agent.cli.explain_view import explanation_view

        console().print(refusal_view(document) if "error" in document else explanation_view(document))
    raise typer.Exit(exit_code(document.get("plan", document)))


def planned_document(path: Path) -> Document:
    """Plan the scenario with the production planner: the plan's document or the refusal's."""
    from coordinator.planner.document import plan_document, refusal_document

    answer = place(load_scenario(path).problem)
    document: Document = plan_document(answer) if isinstance(answer, Plan) else refusal_document(answer)
    return document


def place(problem: PlanningProblem | PlanRefused) -> Plan | PlanRefused:
    """The production planner under its configured budget."""
    from coordinator.planner.planning import plan

    return problem if isinstance(problem, PlanRefused) else plan(problem, clock_us=monotonic_us)


def monotonic_us() -> int:
    """The clock that the search budget is read from."""
    return time.monotonic_ns() // 1_000


def _explained_document(scenario: Path, plan_file: Path | None) -> Document:
    from coordinator.planner.document import plan_from_document, refusal_document
    from coordinator.planner.explain import explain, explanation_document

    problem = load_scenario(scenario).problem
    if isinstance(problem, PlanRefused):
        return refusal_document(problem)
    answer = place(problem) if plan_file is None else plan_from_document(_read_plan(plan_file))
    if isinstance(answer, PlanRefused):
        return refusal_document(answer)
    return explanation_document(explain(problem, answer))


def _read_plan(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(read_text(path), parse_int=_exact)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path}: not a JSON document: {error}") from error
    if not isinstance(document, dict) or "stages" not in document:
        raise ConfigurationError(f"{path}: not a plan; `stagemesh plan --json` writes one")
    return document


def _exact(digits: str) -> int:
    """A whole number that every reader of JSON keeps as it is."""
    number = int(digits)
    if abs(number) > MAX_EXACT:
        raise ValueError(f"{digits[:40]} is beyond 2^53")
    return number


def _live_document(node: str | None, model: str | None) -> Document:
    from stage_agent.cli.client import ApiRefused, get_json, post_json

    try:
        if model is None:
            return cast("Document", get_json(node, "/api/v1/plan"))
        path = str(Path(model).resolve()) if Path(model).exists() else model
        return cast("Document", post_json(node, "/api/v1/plan:preview", {"model": path}))
    except ApiRefused as refused:
        if refused.exit_code not in {EXIT_NO_PLACEMENT, EXIT_TARGET_MISSED}:
            raise
        return refused.document()


def _named(node: str | None, document: Document) -> Document:
    """A live document with the nodes' names, which people know, for their ids."""
    from stage_agent.api.documents import distinct_names
    from stage_agent.cli.client import get_json

    members = get_json(node, "/api/v1/nodes")["nodes"]
    return with_names(document, distinct_names((member["node_id"], member["name"]) for member in members))


def _watch(node: str | None, model: str | None) -> None:
    with Live(console=console(), auto_refresh=False, screen=False) as live:
        try:
            while True:
                document = _named(node, _live_document(node, model))
                live.update(_view(document), refresh=True)
                time.sleep(WATCH_SECONDS)
        except KeyboardInterrupt:
            raise typer.Exit(0) from None


def _view(document: Document) -> Any:
    return refusal_view(document) if "error" in document else plan_view(document)


def show(document: Document, *, as_json: bool) -> int:
    """Print the document for programs or people; the exit code it stands for."""
    if as_json:
        print_json(document)
    else:
        console().print(_view(document))
    return exit_code(document)


def exit_code(document: Document) -> int:
    """0 for a plan, 4 for a required target that is missed, 3 for any other refusal."""
    if "error" not in document:
        return 0
    return EXIT_TARGET_MISSED if document["error"]["code"] == "target_missed" else EXIT_NO_PLACEMENT
