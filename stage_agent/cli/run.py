"""``stagemesh run``: the daemon."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from config.load import load_settings
from config.log import set_up_logging
from protocol.errors import StagemeshError


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("run")(run)


def run(
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="Instead of the default place.")
    ] = None,
    state_dir: Annotated[
        Path | None, typer.Option("--state-dir", metavar="DIR", help="Where `init` or `join` put this node's identity.")
    ] = None,
) -> None:
    """Run this machine's agent until SIGTERM: what systemd and the container start."""
    from stage_agent.node import run_node

    flags = {"node.state_dir": None if state_dir is None else str(state_dir.absolute())}
    settings = load_settings(config, flags)
    set_up_logging(settings.log)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        try:
            runner.run(run_node(settings, lambda: load_settings(config, flags)))
        except BaseExceptionGroup as group:
            raise _cause(group) from None


def _cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one fault of a person or peer in ``group``; the group itself when there is anything else in it."""
    faults, others = group.split(StagemeshError)
    while isinstance(faults, BaseExceptionGroup) and others is None:
        if not isinstance(faults.exceptions[0], BaseExceptionGroup):
            return faults.exceptions[0]
        faults = faults.exceptions[0]
    return group


def _loop_factory() -> "type[asyncio.AbstractEventLoop] | None":
    """Uvloop where it exists: a third of the CPU per datagram."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.Loop
