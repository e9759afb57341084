"""Which connection to a peer counts, when there is more than one candidate. Pure.

* A higher boot counter is a newer process: it replaces what is left of the older one (a killed process says no goodbye,
  its connection would linger until the idle timeout).
* A lower boot counter, or another instance with an equal one, cannot be the same machine going on: its state directory was
  wiped or comes from a backup. It is refused and has to count from higher up. (Whether the other process still lives
  is asked before, see ``predecessor``.)
* Two connections of the same two processes. One that has been silent gives way: the side that dialled again knows that
  it is dead. QUIC beats the TLS fallback; a peer that falls back while this end still hears it has its reasons (a path
  may be cut in one direction) and is followed. Else both dialled: the one dialled by the smaller id stays, and both ends
  compute the same answer; of two dialled by the same side the newer stays.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

from protocol.ids import Instance, NodeId
from protocol.quic.interface import Path

BOOTS_MAX = 4_096


@dataclass(frozen=True, slots=True)
class Candidate:
    """What the choice depends on."""

    peer: NodeId
    instance: Instance
    boot_counter: int
    dialled: bool
    path: Path = "quic"
    alive: bool = True
    """Whether anything was heard on it lately."""


Verdict = Literal["take", "replace", "duplicate", "older_boot"]


class BootRegister:
    """The newest process seen of every peer; the one not seen for longest is forgotten beyond ``BOOTS_MAX``."""

    def __init__(self, own: NodeId) -> None:
        self._own = own
        self._newest: OrderedDict[NodeId, tuple[int, Instance]] = OrderedDict()

    def newest(self, peer: NodeId) -> Instance | None:
        """The instance of the highest boot counter seen."""
        held = self._newest.get(peer)
        return held[1] if held else None

    def judge(self, current: Candidate | None, offered: Candidate) -> Verdict:
        """What to do with ``offered``. ``take``: there is no current; ``replace``: the current one is to go."""
        held = self._newest.get(offered.peer)
        if held is not None:
            lower = offered.boot_counter < held[0]
            if lower or (offered.boot_counter == held[0] and offered.instance != held[1]):
                return "older_boot"
        self._newest[offered.peer] = (offered.boot_counter, offered.instance)
        self._newest.move_to_end(offered.peer)
        while len(self._newest) > BOOTS_MAX:
            self._newest.popitem(last=False)
        if current is None:
            return "take"
        if current.instance != offered.instance or not current.alive:
            return "replace"
        if current.path != offered.path:
            return "duplicate" if offered.path == "tls" and offered.dialled else "replace"
        if current.dialled == offered.dialled:
            return "replace"
        dialled_by_smaller = offered.dialled == (self._own < offered.peer)
        return "replace" if dialled_by_smaller else "duplicate"
