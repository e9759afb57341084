"""``stagemesh export``: a plan as another engine's own commands and files."""

import json
from pathlib import Path
from typing import Annotated

import typer

from coordinator.exporters.engines import DEFAULT_PORTS, EXPORTERS
from coordinator.exporters.export import Export, ExportRequest, Host, export_document
from coordinator.planner.document import plan_from_document
from coordinator.planner.plan import Plan
from protocol.errors import ConfigurationError, StagemeshError
from stage_agent.cli.scenario_files import read_text

MAX_HOSTS = 4_096
LIVE = "live"


def register(app: typer.Typer) -> None:
    """Add ``export`` to the command line."""
    app.command("export")(export_command)


def export_command(
    plan: Annotated[str, typer.Argument(metavar="PLAN", help="A file from `plan --json`, or `live` for the daemon's.")],
    *,
    engine: Annotated[str, typer.Option("--to", metavar="ENGINE", help=f"One of {', '.join(EXPORTERS)}.")],
    model: Annotated[
        str, typer.Option("--model", help="What that engine loads: a GGUF path, a repository, a directory.")
    ] = "MODEL",
    host: Annotated[
        list[str] | None, typer.Option("--host", metavar="NODE=ADDRESS", help="Where a node of the plan is reached.")
    ] = None,
    port: Annotated[int | None, typer.Option("--port", min=1, max=65_535, help="The engine's own port.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="DIRECTORY", help="Write the files there, one folder per host.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")] = False,
    node: Annotated[str | None, typer.Option("--node", metavar="HOST:PORT", help="Ask this daemon's HTTP API.")] = None,
) -> None:
    """Show a plan as the commands and files of llama.cpp, vLLM, SGLang, MLX, exo or prima.cpp, host by host."""
    if engine not in EXPORTERS:
        raise typer.BadParameter(f"--to {engine}: there are {', '.join(EXPORTERS)}")
    read, names = _plan_and_names(plan, node)
    exported = EXPORTERS[engine](
        ExportRequest(
            plan=read,
            hosts=_hosts(read, names, _given_hosts(host or [])),
            model=model,
            port=port or DEFAULT_PORTS[engine],
            tied_embeddings=_tied(model),
        )
    )
    if output is not None:
        _write(exported, output)
    typer.echo(json.dumps(export_document(exported), indent=2, ensure_ascii=False) if as_json else _text(exported))


def _plan_and_names(plan: str, node: str | None) -> tuple[Plan, dict[str, Host]]:
    """The plan, and what the daemon says of its nodes when it is asked for a live one."""
    if plan != LIVE:
        try:
            document = json.loads(read_text(Path(plan)))
        except ValueError as error:
            raise ConfigurationError(f"{plan}: not a JSON document: {error}") from None
        if not isinstance(document, dict):
            raise ConfigurationError(f"{plan}: not a plan; `stagemesh plan --json` writes one")
        return plan_from_document(document), {}
    from stage_agent.cli.client import get_json

    members = get_json(node, "/api/v1/nodes")["nodes"]
    names = {each["node_id"]: Host(each["name"], each["address"].rpartition(":")[0].strip("[]")) for each in members}
    return plan_from_document(get_json(node, "/api/v1/plan")), names


def _given_hosts(pairs: list[str]) -> dict[str, str]:
    given: dict[str, str] = {}
    for pair in pairs[:MAX_HOSTS]:
        name, separator, address = pair.partition("=")
        if not (separator and name and address):
            raise typer.BadParameter(f"--host {pair}: write NODE=ADDRESS, for example alpha=192.168.1.10")
        given[name] = address
    return given


def _hosts(plan: Plan, names: dict[str, Host], given: dict[str, str]) -> dict[str, Host]:
    """Every node of the plan by id. ``--host`` names a node by id or by name and wins."""
    hosts: dict[str, Host] = {}
    for stage in plan.stages:
        known = names.get(stage.node_id, Host(stage.node_id, ""))
        address = given.pop(stage.node_id, "") or given.pop(known.name, "") or known.address
        hosts[stage.node_id] = Host(known.name, address or known.name)
    if given:
        raise ConfigurationError(f"--host {next(iter(given))}: no node of the plan has that name")
    return hosts


def _tied(model: str) -> bool | None:
    """Whether the model's output layer is its embedding, when the file can be read here."""
    if not Path(model).exists():
        return None
    from stage_agent.model_source import open_model

    return open_model(Path(model)).tied_embeddings


def _write(exported: Export, directory: Path) -> None:
    """``DIRECTORY/<host>/``: the files and ``run.sh``."""
    for part in exported.parts:
        folder = directory / f"{part.stage_index:02}-{Path(part.host.name).name}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, content in part.files.items():
                (folder / name).write_text(content, "utf-8")
            (folder / "run.sh").write_text("#!/bin/sh\nset -eu\n" + "\n".join(part.commands) + "\n", "utf-8")
        except OSError as error:
            raise StagemeshError(f"{folder}: cannot be written ({error.strerror}); name another --output") from None


def _text(exported: Export) -> str:
    lines: list[str] = []
    for part in exported.parts:
        lines.append(f"# {part.host.name} ({part.host.address}), stage {part.stage_index}")
        for name, content in part.files.items():
            lines += [f"cat > {name} <<'STAGEMESH'", content.rstrip("\n"), "STAGEMESH"]
        lines += [*part.commands, ""]
    lines += [f"# {exported.engine} cannot express:", *(f"#   - {line}" for line in exported.cannot)]
    return "\n".join(lines)
