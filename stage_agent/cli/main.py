"""The console script: every command registers itself here; errors become one line and an exit code.

Only the module of the command that is called is imported, so that ``stagemesh init`` does not wait for the planner.
"""

import sys
from importlib import import_module

import typer

from protocol.errors import StagemeshError

MODULES: dict[str, tuple[str, ...]] = {
    "demo": ("demo",),
    "identity": ("init", "invite", "join"),
    "run": ("run",),
    "read": ("status", "peers", "links", "stages", "events"),
    "planning": ("plan", "explain"),
    "operate": ("serve", "unserve", "drain", "resume", "leave", "pin", "exclude", "policy", "lock"),
    "inspect": ("inspect",),
    "simulate": ("simulate",),
    "calibrate": ("calibrate",),
    "bench": ("bench",),
    "config_commands": ("config",),
    "doctor": ("doctor",),
    "completion": ("completion",),
}
"""Modules of this package with a ``register(app)``, and the commands of each, in the order of ``--help``."""


def build_app(arguments: list[str]) -> typer.Typer:
    """The application for ``arguments`` (without the program's name): one module, or all of them for help."""
    app = typer.Typer(
        name="stagemesh",
        help="Split a language model's layers over the machines you have: measured, planned with a proof, placed, watched.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(lambda: None)  # keeps command names when only one is registered
    wanted = [module for module, commands in MODULES.items() if arguments[:1] and arguments[0] in commands]
    for module in wanted or MODULES:
        import_module(f"stage_agent.cli.{module}").register(app)
    return app


def main() -> None:
    """Run the command line; never shows a traceback for what a person can mend."""
    try:
        build_app(sys.argv[1:])()
    except StagemeshError as error:
        print(f"stagemesh: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(error.exit_code)
