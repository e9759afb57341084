"""What every command shares: ``--json``, ``--node``, and how a document or a table reaches stdout."""

import json
import os
import sys
from typing import Annotated, Any

import typer
from rich.console import Console

PIPE_WIDTH = 200
"""Columns when stdout is no terminal: a pipe should get whole tables."""

NodeOption = Annotated[
    str | None, typer.Option("--node", metavar="HOST:PORT", help="Ask this daemon's HTTP API instead of the local one.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")]


def print_json(document: Any) -> None:
    """One document and a newline on stdout."""
    _write(document, indent=2)


def print_line(document: Any) -> None:
    """One document on one line, for programs that follow."""
    _write(document, indent=None)


def _write(document: Any, *, indent: int | None) -> None:
    """JSON in the characters that stdout's encoding has, flushed at once."""
    narrow = not (sys.stdout.encoding or "ascii").lower().startswith("utf")
    sys.stdout.write(json.dumps(document, indent=indent, ensure_ascii=narrow, allow_nan=False) + "\n")
    sys.stdout.flush()


def printable(text: str) -> str:
    """Text from a file or a peer, with ``?`` for whatever a terminal would obey instead of show."""
    return "".join(character if character.isprintable() else "?" for character in text)


def console() -> Console:
    """Stdout for people; colour only on a terminal and without ``NO_COLOR``. ``COLUMNS`` is obeyed where it is set.

    Names of nodes and models come from files and peers: what looks like markup in them is shown as it is.
    """
    screen = Console(highlight=False, markup=False, emoji=False)
    told = screen.is_terminal or os.environ.get("COLUMNS")
    return screen if told else Console(width=max(screen.width, PIPE_WIDTH), highlight=False, markup=False, emoji=False)
