"""The settle barrier: alive is not plannable (PROTOCOL §3, DESIGN §10).

Two waits, both counted here. A *node* is plannable once it has been connected, in one process start, for
``settle_us × 2^flaps``; one flap is forgiven per ``flap_forgiven_us``. The *view* is settled once the set of counted
members (identity, process start, capacity) has at least ``minimum_nodes`` and has not changed for ``settle_us``. A node
that flaps is not counted until its own longer wait is over, so it holds nobody up. RTT, caches and timings are not part
of the set: their noise never restarts the wait; a capacity change does.

A flap is a return: gone and back, or another process start. A clean leave is none.

Where a model has no plan without them, nodes that flapped may be asked after a ``NEED_SHARE``-th of their wait, but no
sooner than a node that never did: damping protects what serves, and there nothing does.
"""

from dataclasses import dataclass
from typing import Final

from config.settings import ElectionSettings
from coordinator.view import ClusterView, MemberFacts
from protocol.ids import NodeId

NEED_SHARE = 8
"""So many times shorter are the waits of nodes without which nothing can be placed: 75 s at most with the defaults."""
MAX_FLAPS = 32
"""Counting stops here; the wait is capped long before."""

CountedMember = tuple[str, str, int, int]


@dataclass(slots=True)
class _Presence:
    instance: str
    since_us: int
    connected: bool
    left: bool
    flaps: int = 0
    flaps_since_us: int = 0


class SettleBarrier:
    """Fed with every view; asked when something would be planned."""

    def __init__(self, settings: ElectionSettings, now_us: int) -> None:
        self._settings: Final = settings
        self._presence: dict[NodeId, _Presence] = {}
        self._counted: frozenset[CountedMember] = frozenset()
        self._changed_us = now_us
        self._told_flaps: dict[NodeId, tuple[int, ...]] = {}

    def observe(self, view: ClusterView, now_us: int) -> None:
        """Take in a view; call it again on every timer so that waits that ended are noticed."""
        for node_id, member in view.members.items():
            self._observe_member(node_id, member, now_us)
        for node_id in [known for known in self._presence if known not in view.members]:
            del self._presence[node_id]
        self._told_flaps = {node_id: member.flaps for node_id, member in view.members.items() if member.flaps}
        counted = frozenset(
            self._identity(member)
            for node_id, member in view.connected.items()
            if self._counts(node_id, member, now_us)
        )
        if counted != self._counted:
            self._counted, self._changed_us = counted, now_us

    def settled(self, now_us: int) -> bool:
        """Enough members, unchanged for long enough."""
        enough = len(self._counted) >= self._settings.minimum_nodes
        return enough and now_us - self._changed_us >= self._settings.settle_us

    def flaps(self, node_id: NodeId, now_us: int) -> int:
        """Flaps not forgiven yet."""
        presence, times_us = self._presence.get(node_id), self._told_flaps.get(node_id, ())
        if presence is None or not (presence.flaps or times_us):
            return 0
        told = flaps_left(times_us, self._settings.flap_forgiven_us, now_us)
        return max(self._own_flaps(presence, now_us), told)

    def node_settled(self, node_id: NodeId, now_us: int) -> bool:
        """Connected without interruption for its own wait."""
        presence = self._presence.get(node_id)
        return (
            presence is not None and presence.connected and now_us >= self._plannable_at_us(node_id, presence, now_us)
        )

    def in_reserve(self, node_id: NodeId, now_us: int) -> bool:
        """Connected for long enough to be asked where nothing can be placed without it."""
        presence = self._presence.get(node_id)
        if presence is None or not presence.connected:
            return False
        wait_us = max(self._settings.settle_us, self._wait_us(node_id, now_us) // NEED_SHARE)
        return now_us >= presence.since_us + wait_us

    def counts(self, node_id: NodeId, now_us: int) -> bool:
        """Part of the counted set: connected, and either never flapped or settled again."""
        presence = self._presence.get(node_id)
        if presence is None or not presence.connected:
            return False
        return self.flaps(node_id, now_us) == 0 or self.node_settled(node_id, now_us)

    def next_deadline(self, now_us: int) -> int | None:
        """When the view, or the next node, will have settled."""
        waits = [self._changed_us + self._settings.settle_us]
        waits += [
            self._plannable_at_us(node_id, presence, now_us)
            for node_id, presence in self._presence.items()
            if presence.connected
        ]
        return min((due for due in waits if due > now_us), default=None)

    def _observe_member(self, node_id: NodeId, member: MemberFacts, now_us: int) -> None:
        presence = self._presence.get(node_id)
        if presence is None:
            self._presence[node_id] = _Presence(
                member.row.instance, now_us, member.connected, left=member.state == "left", flaps_since_us=now_us
            )
            return
        returned = member.connected and not presence.connected
        restarted = member.connected and member.row.instance != presence.instance
        if returned or restarted:
            if not presence.left:
                presence.flaps = min(MAX_FLAPS, self._own_flaps(presence, now_us) + 1)
                presence.flaps_since_us = now_us
            presence.since_us = now_us
            presence.instance = member.row.instance
        presence.connected = member.connected
        presence.left = member.state == "left"

    def _own_flaps(self, presence: _Presence, now_us: int) -> int:
        forgiven = (now_us - presence.flaps_since_us) // self._settings.flap_forgiven_us
        return max(0, presence.flaps - forgiven)

    def _counts(self, node_id: NodeId, member: MemberFacts, now_us: int) -> bool:
        return not member.conflict and member.row.status == "running" and self.counts(node_id, now_us)

    def _plannable_at_us(self, node_id: NodeId, presence: _Presence, now_us: int) -> int:
        return presence.since_us + self._wait_us(node_id, now_us)

    def _wait_us(self, node_id: NodeId, now_us: int) -> int:
        doubled = self._settings.settle_us << self.flaps(node_id, now_us)
        return min(doubled, max(self._settings.settle_max_us, self._settings.settle_us))

    @staticmethod
    def _identity(member: MemberFacts) -> CountedMember:
        row = member.row
        cap = row.detected_memory_bytes if row.memory_cap_bytes is None else row.memory_cap_bytes
        return (row.node_id, row.instance, row.detected_memory_bytes, min(cap, row.detected_memory_bytes))


def flaps_left(times_us: tuple[int, ...], forgiven_us: int, now_us: int) -> int:
    """How many of the flaps at ``times_us`` (ascending) are not forgiven at ``now_us``; at most ``MAX_FLAPS``."""
    count, last_us = 0, 0
    for at_us in times_us:
        count = min(MAX_FLAPS, max(0, count - (at_us - last_us) // forgiven_us) + 1)
        last_us = at_us
    return max(0, count - (now_us - last_us) // forgiven_us)
