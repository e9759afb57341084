"""``stagemesh run``: the daemon."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from config.load import load_settings
from config.log import set_up_logging


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("run")(run)


def run(
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="Instead of the default place.")
    ] = None,
) -> None:
    """Run this machine's agent until SIGTERM: what systemd and the container start."""
    from stage_agent.node import run_node

    settings = load_settings(config)
    set_up_logging(settings.log)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(run_node(settings))


def _loop_factory() -> "type[asyncio.AbstractEventLoop] | None":
    """Uvloop where it exists: a third of the CPU per datagram."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.Loop
