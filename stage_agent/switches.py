"""What operators, signals and the mesh turn while the daemon runs."""

import asyncio
from dataclasses import dataclass, field


@dataclass(slots=True)
class Switches:
    """``stop`` ends the present run of the node; the others say what comes after it."""

    stop: asyncio.Event = field(default_factory=asyncio.Event)
    draining: bool = False
    leaving: bool = False
    forget_mesh: bool = False
    """Leave for good: the mesh's file goes with the goodbye."""
    terminated: bool = False
    """By a signal: nothing begins again."""
    again: bool = False
    """The node has a new key and begins again under it."""
    barred: str = ""
    """Why the mesh does not take this identity any more, as one line."""

    def terminate(self) -> None:
        """A signal asked for the end."""
        self.terminated = True
        self.stop.set()

    def next_run(self) -> None:
        """Begin again."""
        self.again = self.leaving = False
        self.stop.clear()
