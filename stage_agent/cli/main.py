"""The console script: arguments in, exit code out; errors become one line.

``run`` with nothing but its two options, which is how a daemon is started, goes past the command line's libraries: they
would stay in the daemon's memory (1.4 MB). Everything else, a wrong ``run`` as well, is typer's.
"""

import io
import os
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from protocol.errors import StagemeshError

RUN_OPTIONS = ("--config", "--state-dir")


def main() -> None:
    """Run the command line; an error is one line, and a traceback only with ``--debug`` or in the daemon's own log."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    debug = len(arguments) < len(sys.argv) - 1
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        _call(arguments)
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


def _call(arguments: list[str]) -> None:
    paths = run_paths(arguments)
    if paths is not None:
        from config.lean import import_lean

        import_lean()
        from stage_agent.daemon import run_daemon

        run_daemon(*(paths.get(option) for option in RUN_OPTIONS))
        return
    from stage_agent.cli.application import build_app

    build_app(arguments)(args=arguments)


def run_paths(arguments: list[str]) -> dict[str, Path] | None:
    """Options of a plain ``run [--config FILE] [--state-dir DIR]``; ``None`` when it is any other call."""
    if arguments[:1] != ["run"]:
        return None
    words = [word for argument in arguments[1:] for word in argument.split("=", 1)]
    options, values = words[::2], words[1::2]
    plain = len(options) == len(values) == len(set(options)) and set(options) <= set(RUN_OPTIONS)
    if not plain or any(not value or value.startswith("-") for value in values):
        return None
    return {option: Path(value) for option, value in zip(options, values, strict=True)}


def _end(error: Exception, sentence: str, exit_code: int, *, debug: bool) -> NoReturn:
    if debug:
        traceback.print_exception(error)
    print(f"stagemesh: {sentence}", file=sys.stderr)  # noqa: T201
    sys.exit(exit_code)
