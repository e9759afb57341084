"""``stagemesh demo``."""

import signal
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

PIPE_WIDTH = 118
"""Columns when nobody looks: enough for every table."""


class Engine(StrEnum):
    """What the demo's agents run."""

    REFERENCE = "reference"
    MAPPED = "mapped"


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("demo")(demo)


def demo(
    nodes: Annotated[
        int | None, typer.Option(help="How many agents; the profile's machines are repeated in turn.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="A GGUF to place; unset = a small one is made in the cache.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Pretended machines and links (TOML); unset = a built-in home lab.")
    ] = None,
    engine: Annotated[
        Engine,
        typer.Option(help="reference: decode real tokens with the verification engine; mapped: only hold the bytes."),
    ] = Engine.REFERENCE,
    once: Annotated[
        bool, typer.Option("--once", help="Show a plan, a replan after a node loss and the recovery, then exit 0.")
    ] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the agents' directories and logs behind.")] = False,
) -> None:
    """Start a real mesh on this machine: measure, elect, plan a real model, place it.

    Every agent is a process with its own identity, joined over QUIC with mutual
    certificates. Memory sizes, memory bandwidths and link delays are pretended
    (shaped) by the profile and marked so; everything else is real.
    """
    from stage_agent.demo.mesh import demo_mesh
    from stage_agent.demo.prepare import prepared_model
    from stage_agent.demo.profile import load_profile, machines
    from stage_agent.demo.story import Story

    terminal = Console(highlight=False)
    console = terminal if terminal.is_terminal else Console(width=max(terminal.width, PIPE_WIDTH), highlight=False)
    for number in (signal.SIGTERM, signal.SIGHUP):  # a closed terminal must not leave agents' directories behind
        signal.signal(number, _interrupt)
    shapes = load_profile(profile, nodes)
    path, package = prepared_model(model)
    with demo_mesh(shapes, keep=keep) as mesh:
        shaped = machines(shapes, package)
        mesh.prepare(shaped, engine.value)
        story = Story(console, mesh, shaped, package, path)
        story.introduce(shapes)
        try:
            story.form()
            if once:
                story.lose_and_recover()
            else:
                story.follow()
        except KeyboardInterrupt:
            console.print("stopping the mesh")


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
