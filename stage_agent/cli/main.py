"""The console script: every command registers itself here; errors become one line and an exit code.

Only the module of the command that is called is imported, so that ``stagemesh init`` does not wait for the planner.
"""

import io
import os
import sys
import traceback
from importlib import import_module
from importlib.metadata import version as installed_version
from typing import Annotated, NoReturn

import typer

from protocol.errors import StagemeshError

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


def main() -> None:
    """Run the command line; an error is one line, and a traceback only with ``--debug`` or in the daemon's own log."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    debug = len(arguments) < len(sys.argv) - 1
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        build_app(arguments)(args=arguments)
    except StagemeshError as error:
        _end(error, str(error), error.exit_code, debug=debug)
    except OSError as error:
        # what stdout still holds cannot be written either, and the interpreter would try once more and complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno() if sys.__stdout__ else 1)
        where = "input or output failed" if error.filename is None else str(error.filename)
        _end(error, f"{where}: {error.strerror or error}", 1, debug=debug)
    except Exception as error:  # our own bug: nothing goes on after it, the process ends here with one line
        if arguments[:1] == ["run"]:
            raise
        _end(error, f"internal error: {type(error).__name__}: {error}; --debug shows where", 1, debug=debug)


def _end(error: Exception, sentence: str, exit_code: int, *, debug: bool) -> NoReturn:
    if debug:
        traceback.print_exception(error)
    print(f"stagemesh: {sentence}", file=sys.stderr)  # noqa: T201
    sys.exit(exit_code)
