"""The console script: every command registers itself here; errors become one line and an exit code."""

import sys
from importlib import import_module

import typer

from protocol.errors import StagemeshError

MODULES = (
    "demo", "identity", "run", "read", "planning", "operate", "inspect", "simulate", "calibrate", "bench",
    "config_commands", "doctor", "completion",
)  # fmt: skip
"""Modules of this package with a ``register(app)``, in the order of ``--help``."""

app = typer.Typer(
    name="stagemesh",
    help="Split a language model's layers over the machines you have: measured, planned with a proof, placed, watched.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the command line; never shows a traceback for what a person can mend."""
    for module in MODULES:
        import_module(f"stage_agent.cli.{module}").register(app)
    try:
        app()
    except StagemeshError as error:
        print(f"stagemesh: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(error.exit_code)
