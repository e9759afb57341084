"""The console script: every command registers itself here; errors become one line and an exit code."""

import sys

import typer

from protocol.errors import StagemeshError

app = typer.Typer(
    name="stagemesh",
    help="Plan, place and fence a language model's layer ranges over the machines you have.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the command line; never shows a traceback for what a person can mend."""
    try:
        app()
    except StagemeshError as error:
        print(f"stagemesh: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(error.exit_code)
