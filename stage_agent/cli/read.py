"""The mesh as this node sees it: ``status``, ``peers``, ``links``, ``stages``, ``events``.

Every command takes ``--json`` (one document on stdout and nothing else), ``--watch`` and ``--node``. With both
``--json`` and ``--watch`` there is one document per line.
"""

import time
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.live import Live
from rich.text import Text

from protocol.errors import DaemonUnreachable
from stage_agent.cli import mesh_view
from stage_agent.cli.client import get_json, stream_events
from stage_agent.cli.output import JsonOption, NodeOption, console, print_json, print_line

WATCH_SECONDS = 1.0
WatchOption = Annotated[bool, typer.Option("--watch", help="Refresh in place until interrupted.")]
View = Callable[[dict[str, Any]], RenderableType]


def register(app: typer.Typer) -> None:
    """Add the read commands."""
    app.command("status")(status_command)
    app.command("peers")(peers_command)
    app.command("links")(links_command)
    app.command("stages")(stages_command)
    app.command("events")(events_command)


def status_command(*, as_json: JsonOption = False, watch: WatchOption = False, node: NodeOption = None) -> None:
    """Show this node at a glance: readiness, coordinator, what is served."""
    _show("/api/v1/status", mesh_view.status_view, node=node, as_json=as_json, watch=watch)


def peers_command(*, as_json: JsonOption = False, watch: WatchOption = False, node: NodeOption = None) -> None:
    """List every node: alive or not, plannable or why not, memory and bandwidth and where they come from."""
    _show("/api/v1/nodes", mesh_view.peers_view, node=node, as_json=as_json, watch=watch)


def links_command(*, as_json: JsonOption = False, watch: WatchOption = False, node: NodeOption = None) -> None:
    """List every directed link: round trip, whether it is settled, bandwidth and what limited it."""
    _show("/api/v1/links", mesh_view.links_view, node=node, as_json=as_json, watch=watch)


def stages_command(*, as_json: JsonOption = False, watch: WatchOption = False, node: NodeOption = None) -> None:
    """List every agent's own word about its stages."""
    _show("/api/v1/stages", mesh_view.stages_view, node=node, as_json=as_json, watch=watch)


def events_command(
    *,
    as_json: JsonOption = False,
    watch: Annotated[bool, typer.Option("--watch", "--follow", "-f", help="Go on with new ones.")] = False,
    limit: Annotated[int, typer.Option("--limit", min=0, max=1_024, help="At most so many of the newest.")] = 50,
    node: NodeOption = None,
) -> None:
    """List what happened, oldest first."""
    document = get_json(node, "/api/v1/events", parameters={"limit": str(limit)})
    if not watch:
        _print(document, mesh_view.events_view, as_json=as_json)
        return
    events = document["events"]
    for event in events:
        _print_event(event, as_json=as_json)
    try:
        for event in stream_events(node, after=events[-1]["seq"] if events else 0):
            _print_event(event, as_json=as_json)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def _show(path: str, view: View, *, node: str | None, as_json: bool, watch: bool) -> None:
    document = get_json(node, path)
    if not watch:
        _print(document, view, as_json=as_json)
        return
    try:
        if as_json:
            _repeat_lines(node, path, document)
        else:
            _repeat_in_place(node, path, document, view)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def _repeat_lines(node: str | None, path: str, document: Any) -> None:
    while True:
        print_line(document)
        time.sleep(WATCH_SECONDS)
        document = get_json(node, path)


def _repeat_in_place(node: str | None, path: str, document: Any, view: View) -> None:
    """Redraw; a daemon that goes away is said and waited for, since that is what one watches for."""
    with Live(view(document), console=console(), auto_refresh=False) as live:
        while True:
            live.refresh()
            time.sleep(WATCH_SECONDS)
            try:
                live.update(view(get_json(node, path)))
            except DaemonUnreachable as error:
                live.update(Text(str(error), style="yellow"))


def _print(document: Any, view: View, *, as_json: bool) -> None:
    if as_json:
        print_json(document)
    else:
        console().print(view(document))


def _print_event(event: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_line(event)
    else:
        console().print(mesh_view.event_line(event))
