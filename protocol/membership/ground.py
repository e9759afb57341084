"""What the parts of the membership core stand on together: table, timers, gossip queue, links, connections, effects.

Parts talk to each other through the table and through named timers; only ``core`` knows all of them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from config.settings import LinkSettings, MembershipSettings
from protocol.beat import at_beat_us, phase_us
from protocol.ids import NodeId
from protocol.links.book import LinkBook
from protocol.links.vivaldi import VivaldiNode
from protocol.membership.dissemination import EAGER_ROW_BYTES, GossipQueue
from protocol.membership.effects import Effect, Lane, MemberChanged, MemberState, Rejected, Send
from protocol.membership.signing import Verify
from protocol.membership.table import Entry, NodeTable
from protocol.membership.timers import Timers
from protocol.messages import MembershipMessage, RowVersion
from protocol.rows import Coordinate, NodeRow, SignedRow

SMALL_MESH = 64
"""Up to this many nodes rows grow with the mesh."""


@dataclass(slots=True)
class Connection:
    """A living connection as the shell reported it."""

    address: str
    since_us: int
    over_tcp: bool = False
    """UDP does not pass."""
    probed_us: int = -(2**53)


@dataclass(slots=True)
class Ground:
    """Shared state of one core."""

    node_id: NodeId
    settings: MembershipSettings
    link_settings: LinkSettings
    random: Random
    verify: Verify
    open_row: Callable[[SignedRow], NodeRow]
    is_admitted: Callable[[NodeId], bool]
    table: NodeTable
    links: LinkBook
    queue: GossipQueue
    vivaldi: VivaldiNode
    timers: Timers = field(default_factory=Timers)
    connections: dict[NodeId, Connection] = field(default_factory=dict)
    requested: frozenset[NodeId] = frozenset()
    """Peers whose RTT has to stay settled although the mesh is large."""
    effects: list[Effect] = field(default_factory=list)
    now_us: int = 0
    pushed_us: int = -(2**62)

    @property
    def nodes(self) -> int:
        """Live nodes, this one included."""
        return self.table.live_count + 1

    @property
    def everyone_connects(self) -> bool:
        """Small enough for a connection between every pair."""
        return self.nodes <= self.settings.max_connections + 1

    @property
    def row_refresh_us(self) -> int:
        """How often a row is repeated without news.

        A row is about as long as the mesh is large, up to 64 links, and everybody hears everybody's: 60 s would cost each
        node 7.9 kB/s at 64 nodes. Stretched, it is 0.5 kB/s at 16, 2 at 64 and at most 8 at any size.
        """
        nodes = self.nodes
        sixteenths = max(16, min(nodes, SMALL_MESH), -(-nodes // 4))
        return self.settings.row_refresh_us * sixteenths // 16

    def drain(self, now_us: int) -> list[Effect]:
        """The effects of the input that was just handled at ``now_us``."""
        self.now_us = now_us
        effects, self.effects = self.effects, []
        return effects

    def send(self, peer: NodeId, message: MembershipMessage, lane: Lane) -> None:
        """Queue a message for a connected peer; without a connection there is nobody to send to."""
        if peer in self.connections:
            self.effects.append(Send(peer, message, lane))

    def reject(self, peer: NodeId, reason: str) -> None:
        """Count something refused."""
        self.effects.append(Rejected(peer, reason))

    def change(self, entry: Entry, state: MemberState, reason: str, now_us: int) -> None:
        """Move a member and tell the shell."""
        old = self.table.set_state(entry, state, now_us)
        if old != state:
            self.effects.append(MemberChanged(entry.node_id, old, state, reason))

    def at_beat(self, moment_us: int) -> int:
        """That moment or up to ``BEAT_US`` later, together with others."""
        return at_beat_us(moment_us, phase_us(self.node_id))

    def jitter(self, at_most_us: int) -> int:
        """Uniform in [0, at_most]."""
        return self.random.randint(0, max(0, at_most_us))

    def connected_members(self) -> list[NodeId]:
        """Connected peers that are alive or suspect."""
        return [peer for peer in self.connections if (entry := self.table.get(peer)) is not None and entry.live]

    def spread_row(
        self, signed: SignedRow, node_id: NodeId, version: tuple[int, int], *, told_by: NodeId | None, quiet: bool
    ) -> None:
        """Queue a row, or only the news of it when it is too large for a datagram. ``quiet``: it only refreshes."""
        if len(signed.payload) + len(signed.signature) <= EAGER_ROW_BYTES:
            self.queue.add("row", node_id, signed, told_by=told_by, quiet=quiet)
        else:
            fact = RowVersion(node_id=node_id, boot_counter=version[0], seq=version[1])
            self.queue.add("row", node_id, fact, told_by=told_by, quiet=quiet)

    def wake_push(self, now_us: int) -> None:
        """Something is queued that cannot wait for a probe: push at the next turn, at most one per interval."""
        if self.queue.pressing and self.timers.deadline("push") is None:
            interval_us = self.settings.push_interval_us
            self.timers.set("push", "", max(now_us + self.jitter(interval_us // 2), self.pushed_us + interval_us))

    def coordinate_of(self, node_id: NodeId) -> Coordinate | None:
        """Where a node says that it is in the network; this node's own place included."""
        if node_id == self.node_id:
            return self.vivaldi.coordinate()
        entry = self.table.get(node_id)
        return None if entry is None else entry.row.coordinate

    def validate(self, *, left: bool) -> None:
        """Invariants, for tests. ``left``: timers were cleared with the goodbye."""
        self.table.validate()
        assert self.node_id not in self.table
        for entry in self.table:
            armed = self.timers.deadline("suspect", entry.node_id) is not None
            assert armed == (entry.state == "suspect") or left, entry
            assert (self.timers.deadline("forget", entry.node_id) is not None) == (not entry.live) or left, entry
            assert self.is_admitted(entry.node_id) or self.timers.deadline("cut") is not None or left, entry
