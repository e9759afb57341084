"""All commands as one application: every command's module registers itself here.

Only the module of the command that is called is imported, so that ``stagemesh init`` does not wait for the planner.
"""

from importlib import import_module
from importlib.metadata import version as installed_version
from typing import Annotated

import typer

MODULES: dict[str, tuple[str, ...]] = {
    "demo": ("demo",),
    "identity": ("init", "invite", "join"),
    "run": ("run",),
    "read": ("status", "peers", "links", "stages", "events"),
    "planning": ("plan", "explain"),
    "operate": ("serve", "unserve", "drain", "resume", "leave", "pin", "exclude", "policy", "lock"),
    "admittance": ("revoke", "rotate-key"),
    "inspect": ("inspect",),
    "simulate": ("simulate",),
    "calibrate": ("calibrate",),
    "bench": ("bench",),
    "export": ("export",),
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
        epilog="With --debug, an error also shows its traceback.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback(invoke_without_command=True)(_common)  # and keeps command names when only one is registered
    wanted = [module for module, commands in MODULES.items() if arguments[:1] and arguments[0] in commands]
    for module in wanted or MODULES:
        import_module(f"stage_agent.cli.{module}").register(app)
    return app


def _common(
    context: typer.Context,
    *,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"stagemesh {installed_version('stagemesh')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)
