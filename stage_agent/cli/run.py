"""``stagemesh run``: the daemon."""

from pathlib import Path
from typing import Annotated

import typer


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
    from stage_agent.daemon import run_daemon

    run_daemon(config, state_dir)
