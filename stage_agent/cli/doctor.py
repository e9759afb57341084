"""``stagemesh doctor``: look at everything that commonly goes wrong and say the next step for each failure."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from config.load import load
from config.secrets import api_token
from config.settings import Settings
from protocol.errors import ConfigurationError, DaemonUnreachable
from stage_agent.cli.client import get_json
from stage_agent.cli.doctor_local import Finding, local_findings
from stage_agent.cli.doctor_mesh import mesh_findings
from stage_agent.cli.output import JsonOption, NodeOption, console, print_json

_MARKS = {"ok": ("✓", "green"), "note": ("•", "yellow"), "fail": ("✗", "red")}


def register(app: typer.Typer) -> None:
    """Add ``doctor``."""
    app.command("doctor")(doctor_command)


def doctor_command(
    *,
    config: Annotated[Path | None, typer.Option("--config", metavar="FILE", help="The daemon's configuration.")] = None,
    as_json: JsonOption = False,
    node: NodeOption = None,
) -> None:
    """Check identity, ports, clock, peers, engine, model and signals; exit 1 when something has to be done."""
    findings = examine(config, node)
    failed = [finding for finding in findings if finding.verdict == "fail"]
    if as_json:
        print_json({"ok": not failed, "findings": [asdict(finding) for finding in findings]})
    else:
        _print(findings, len(failed))
    raise typer.Exit(1 if failed else 0)


def examine(config: Path | None, node: str | None) -> list[Finding]:
    """Every finding, local ones first. A broken configuration is the only finding when there is one.

    With a ``node`` and no ``config`` this machine's own state is somebody else's, and is left alone.
    """
    try:
        loaded = load(config)
        api_token(loaded.settings)
    except ConfigurationError as error:
        return [Finding("configuration", "fail", str(error), "mend it; `stagemesh config check` says more")]
    where = str(loaded.file) if loaded.file else "defaults, no file"
    documents = _ask_daemon(node, loaded.settings)
    if node is not None and config is None:  # another machine, or another daemon of this one: not what lies here
        text = f"only the daemon at {node} is asked: nothing of this machine is looked at"
        findings = [
            Finding("scope", "note", text, "run `stagemesh doctor` there, or name its configuration with --config")
        ]
    else:
        findings = [Finding("configuration", "ok", f"{where}, {len(loaded.origins)} values set")]
        findings += local_findings(loaded.settings, daemon_runs=not isinstance(documents, Finding))
    return [*findings, documents] if isinstance(documents, Finding) else findings + mesh_findings(*documents)


def _ask_daemon(
    node: str | None, settings: Settings
) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]] | Finding:
    try:
        return (
            get_json(node, "/api/v1/status", settings=settings),
            get_json(node, "/api/v1/nodes", settings=settings)["nodes"],
            get_json(node, "/api/v1/links", settings=settings)["links"],
        )
    except DaemonUnreachable as error:
        return Finding("daemon", "fail", str(error), "`stagemesh run` starts it; its log says why it ended")


def _print(findings: list[Finding], failed: int) -> None:
    screen = console()
    for finding in findings:
        mark, style = _MARKS[finding.verdict]
        screen.print(Text.assemble((mark, style), f" {finding.check}: {finding.text}"), soft_wrap=True)
        if finding.next_step:
            screen.print(
                Text.assemble("    → ", (finding.next_step, "bold" if finding.verdict == "fail" else "dim")),
                soft_wrap=True,
            )
    screen.print()
    screen.print(f"{failed} to mend" if failed else "all well", style="red" if failed else "green")
