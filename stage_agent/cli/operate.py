"""Commands to a running daemon: each is one request; the daemon refuses with one line, and nothing changes then."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from protocol.errors import ConfigurationError
from stage_agent.cli.client import delete_json, path_segment, post_json
from stage_agent.cli.output import JsonOption, NodeOption, console, print_json

MAX_LOCK_BYTES = 262_144

SlotOption = Annotated[str, typer.Option("--slot", help="Name of the slot, when several models are served.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def register(app: typer.Typer) -> None:
    """Add the operator's commands."""
    app.command("serve")(serve_command)
    app.command("unserve")(unserve_command)
    app.command("drain")(drain_command)
    app.command("resume")(resume_command)
    app.command("leave")(leave_command)
    app.command("pin")(pin_command)
    app.command("exclude")(exclude_command)
    app.command("policy")(policy_command)
    app.command("lock")(lock_command)


def serve_command(
    model: Annotated[str, typer.Argument(help="A path, a layer package, or an alias.")],
    *,
    slot: SlotOption = "default",
    priority: Annotated[int, typer.Option("--priority", min=0, max=1_000_000, help="Higher is planned first.")] = 0,
    as_json: JsonOption = False,
    node: NodeOption = None,
) -> None:
    """Set a model that the mesh should place."""
    source = str(Path(model).resolve()) if Path(model).exists() else model
    answer = post_json(node, "/api/v1/models", {"model": source, "slot": slot, "priority": priority})
    _done(answer, f"slot {slot} should serve {source}; watch it with `stagemesh status --watch`", as_json=as_json)


def unserve_command(
    slot: Annotated[str, typer.Argument(help="The slot to empty.")] = "default",
    *,
    as_json: JsonOption = False,
    node: NodeOption = None,
) -> None:
    """Remove a model that the mesh should place."""
    answer = delete_json(node, f"/api/v1/models/{path_segment(slot)}")
    _done(answer, f"slot {slot} is given up; its stages are unloaded", as_json=as_json)


def drain_command(*, as_json: JsonOption = False, node: NodeOption = None) -> None:
    """Take this node out of planning gently: its stages go on until the mesh has replanned."""
    answer = post_json(node, "/api/v1/drain", {})
    _done(answer, "draining; `stagemesh resume` takes part again", as_json=as_json)


def resume_command(*, as_json: JsonOption = False, node: NodeOption = None) -> None:
    """Take part in planning again."""
    _done(post_json(node, "/api/v1/resume", {}), "taking part in planning again", as_json=as_json)


def leave_command(*, yes: YesOption = False, as_json: JsonOption = False, node: NodeOption = None) -> None:
    """Leave the mesh: drain, say goodbye, end the daemon. Coming back needs `stagemesh join` with a new token."""
    if not yes and not typer.confirm("leave the mesh and end the daemon?", err=True):
        raise typer.Exit(1)
    _done(post_json(node, "/api/v1/leave", {}), "leaving the mesh", as_json=as_json)


def pin_command(
    *,
    stage0: Annotated[str | None, typer.Option("--stage0", metavar="NODE", help="'' takes the pin away.")] = None,
    coordinator: Annotated[str | None, typer.Option("--coordinator", metavar="NODE", help="'' as above.")] = None,
    as_json: JsonOption = False,
    node: NodeOption = None,
) -> None:
    """Bind stage 0 or the coordinator to a node (id, start of an id, or name)."""
    if stage0 is None and coordinator is None:
        raise typer.BadParameter("say what to pin: --stage0 NODE or --coordinator NODE ('' takes a pin away)")
    body = {key: value for key, value in (("stage0", stage0), ("coordinator", coordinator)) if value is not None}
    words = ", ".join(
        f"{key} {'pinned to ' + value if value else 'not pinned any more'}" for key, value in body.items()
    )
    _done(post_json(node, "/api/v1/pin", body), words, as_json=as_json)


def exclude_command(
    nodes: Annotated[list[str], typer.Argument(help="Nodes: id, start of an id, or name.")],
    *,
    remove: Annotated[bool, typer.Option("--remove", help="Plan with them again.")] = False,
    as_json: JsonOption = False,
    node: NodeOption = None,
) -> None:
    """Plan without these nodes."""
    answer = post_json(node, "/api/v1/exclude", {"remove" if remove else "add": nodes})
    _done(answer, f"planning {'with' if remove else 'without'} {', '.join(nodes)}", as_json=as_json)


def policy_command(
    *,
    objective: Annotated[Literal["interactive", "throughput", "capacity"] | None, typer.Option("--objective")] = None,
    policy: Annotated[Literal["must_meet_target", "best_effort"] | None, typer.Option("--policy")] = None,
    target_ms: Annotated[float | None, typer.Option("--target-ms", min=0.001, help="Wanted time per token.")] = None,
    concurrency: Annotated[int | None, typer.Option("--concurrency", min=1, max=65_536)] = None,
    performance_aware: Annotated[bool | None, typer.Option("--performance-aware/--capacity-only")] = None,
    reset: Annotated[
        bool, typer.Option("--reset", help="First take back all that was ordered; configured again.")
    ] = False,
    as_json: JsonOption = False,
    node: NodeOption = None,
) -> None:
    """Change what all plans of the mesh aim for, whoever coordinates; what is not given stays."""
    given = {
        "objective": objective,
        "policy": policy,
        "target_decode_tpot_ms": target_ms,
        "concurrency": concurrency,
        "performance_aware": performance_aware,
    }
    body: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    if not body and not reset:
        raise typer.BadParameter("say what to change, for example --objective throughput, or --reset")
    words = ", ".join([*(["as configured"] if reset else []), *(f"{key} = {value}" for key, value in body.items())])
    body |= {"reset": True} if reset else {}
    _done(post_json(node, "/api/v1/policy", body), words, as_json=as_json)


def lock_command(
    file: Annotated[Path | None, typer.Argument(help="JSON: version, model, manifest_digest, stages.")] = None,
    *,
    slot: SlotOption = "default",
    release: Annotated[bool, typer.Option("--release", help="Plan freely again.")] = False,
    as_json: JsonOption = False,
    node: NodeOption = None,
) -> None:
    """Hold a slot on an exact split: nodes, order and layer ranges."""
    if release == (file is not None):
        raise typer.BadParameter("give either a FILE with the split or --release")
    body = {"slot": slot} if file is None else {**_lock_document(file), "slot": slot}
    words = f"slot {slot} is planned freely" if file is None else f"slot {slot} is locked to {file}"
    _done(post_json(node, "/api/v1/lock", body), words, as_json=as_json)


def _lock_document(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as opened:
            raw = opened.read(MAX_LOCK_BYTES + 1)
    except OSError as error:
        raise ConfigurationError(f"{file}: cannot be read ({error.strerror}); name a JSON file") from None
    if len(raw) > MAX_LOCK_BYTES:
        raise ConfigurationError(f"{file}: is larger than {MAX_LOCK_BYTES} bytes, which no split needs")
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError):
        raise ConfigurationError(f'{file}: is not JSON; write {{"version": 1, "stages": […]}}') from None
    if not isinstance(document, dict) or not document.get("stages"):
        raise ConfigurationError(f'{file}: has no "stages"; write {{"version": 1, "stages": […]}}')
    return document


def _done(answer: dict[str, Any], words: str, *, as_json: bool) -> None:
    if as_json:
        print_json(answer)
    else:
        console().print(answer.get("message") or words, markup=False, highlight=False, soft_wrap=True)
