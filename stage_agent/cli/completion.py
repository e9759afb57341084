"""``stagemesh completion SHELL``: print the completion script; installing it is the shell's business."""

from enum import StrEnum
from typing import Annotated

import typer
from typer.completion import completion_init, get_completion_script  # type: ignore[attr-defined]  # not re-exported


class Shell(StrEnum):
    """Shells that completion knows."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def register(app: typer.Typer) -> None:
    """Add ``completion``, and answer the questions that its script asks while somebody types."""
    completion_init()
    app.command("completion")(completion_command)


def completion_command(shell: Annotated[Shell, typer.Argument(help="bash, zsh or fish")]) -> None:
    """Print shell completion; for bash: stagemesh completion bash > ~/.local/share/bash-completion/completions/stagemesh."""
    typer.echo(get_completion_script(prog_name="stagemesh", complete_var="_STAGEMESH_COMPLETE", shell=shell.value))
