"""Tombstones on disk: who is dead or left stays so for a node that restarts, even when everybody else does, too.

One document, written when the set changes and at most once a second, so that a mesh that falls apart costs one write.
What is lost by a power cut within that second is what peers tell again. A goodbye is written at once: the node is gone on
purpose, and peers that know it may be stopped next.
"""

from collections.abc import Callable
from typing import Final

from protocol.errors import StateError
from protocol.ids import NodeId
from protocol.membership.table import Tombstone
from stage_agent.journal import Journal
from stage_agent.state.store import StateStore

GRAVES_SPACE: Final = "graves"
_KEY = "all"
SPACING_US = 1_000_000


def kept_tombstones(store: StateStore) -> tuple[Tombstone, ...]:
    """Those of the state directory."""
    document = store.get(GRAVES_SPACE, _KEY) or {"stones": []}
    return tuple(Tombstone(NodeId(str(node)), int(boot), int(seq)) for node, boot, seq in document["stones"])


class Graves:
    """The only writer of that document. ``tombstones`` is the membership's own."""

    def __init__(self, store: StateStore, journal: Journal, tombstones: Callable[[], tuple[Tombstone, ...]]) -> None:
        self._store = store
        self._journal = journal
        self._tombstones = tombstones
        self._kept = kept_tombstones(store)
        self._changed = self._failing = False
        self._written_us = -SPACING_US

    def changed(self, now_us: int, *, goodbye: bool = False) -> None:
        """A member came back, went or was forgotten."""
        self._changed = True
        self.keep(now_us, spacing_us=0 if goodbye else SPACING_US)

    def keep(self, now_us: int, *, spacing_us: int = SPACING_US) -> None:
        """Write what changed, unless the last write is only a moment ago; call about once a second."""
        if not self._changed or now_us - self._written_us < spacing_us:
            return
        self._written_us = now_us
        stones = self._tombstones()
        if stones != self._kept:
            document = {"stones": [[each.node_id, each.boot_counter, each.seq] for each in stones]}
            try:
                self._store.put(GRAVES_SPACE, _KEY, document)
            except StateError as error:
                if not self._failing:
                    self._journal.tell("state_unavailable", str(error), "error")
                self._failing = True
                return
            self._kept, self._failing = stones, False
        self._changed = False
