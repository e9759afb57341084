"""Arguments as one line for a POSIX shell."""

import shlex
from collections.abc import Mapping, Sequence


def command_line(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """``NAME=value … program arguments``, every word quoted where the shell would change it."""
    assignments = [f"{name}={shlex.quote(value)}" for name, value in (environment or {}).items()]
    return " ".join([*assignments, *map(shlex.quote, arguments)])
