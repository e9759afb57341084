"""What this node's tunnels carried and how they failed, for people: totals since the start, and what is open now.

A connection's own thread counts its bytes; nobody else writes them. Here they are only read, so no lock is needed.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args

Fault = Literal["busy", "door", "engine", "peer", "protocol", "reset", "stopped", "timeout"]
"""Why a connection came to nothing or broke: too many at once; no such door, or not for this peer; the engine behind the
door does not accept; the peer cannot be reached or refuses; it broke the tunnel's own rules; either side broke off; this
node ended it; silence."""
FAULTS: tuple[Fault, ...] = get_args(Fault)
REFUSALS: frozenset[Fault] = frozenset({"busy", "door", "engine", "peer"})
"""Faults before the first byte."""


class Carrying(Protocol):
    """A connection as the ledger sees it."""

    @property
    def sent_bytes(self) -> int:
        """Of the engine, so far."""

    @property
    def received_bytes(self) -> int:
        """For the engine, so far."""


@dataclass(frozen=True, slots=True)
class TunnelCounters:
    """Totals of a node or of one listener; ``active`` is the present number. Bytes are the engines' own."""

    sent_bytes: int = 0
    received_bytes: int = 0
    opened: int = 0
    refused: int = 0
    broken: int = 0
    active: int = 0


@dataclass(slots=True)
class Ledger:
    """Of all tunnels of a node, or of one listener. Peers are as many as were ever admitted."""

    errors: Counter[Fault] = field(default_factory=Counter)
    opened: int = 0
    _ended: Counter[tuple[str, str]] = field(default_factory=Counter)
    _live: dict[int, tuple[str, Carrying]] = field(default_factory=dict)

    @property
    def active(self) -> int:
        """Connections that are carried now."""
        return len(self._live)

    def begin(self, peer: str, carried: Carrying) -> None:
        """A connection with ``peer`` carries bytes from now on."""
        self.opened += 1
        self._live[id(carried)] = (peer, carried)
        for direction in ("send", "receive"):
            self._ended[peer, direction] += 0

    def end(self, carried: Carrying, fault: Fault | None) -> None:
        """It is over; ``None`` = in order."""
        peer, _ = self._live.pop(id(carried))
        self._ended[peer, "send"] += carried.sent_bytes
        self._ended[peer, "receive"] += carried.received_bytes
        if fault is not None:
            self.errors[fault] += 1

    def bytes_by_peer(self) -> Mapping[tuple[str, str], int]:
        """Peer and direction → bytes, up to this moment."""
        totals = Counter(self._ended)
        for peer, carried in self._live.values():
            totals[peer, "send"] += carried.sent_bytes
            totals[peer, "receive"] += carried.received_bytes
        return totals

    def counters(self) -> TunnelCounters:
        """The sums."""
        totals = self.bytes_by_peer()
        refused = sum(count for fault, count in self.errors.items() if fault in REFUSALS)
        return TunnelCounters(
            sent_bytes=sum(size for (_, direction), size in totals.items() if direction == "send"),
            received_bytes=sum(size for (_, direction), size in totals.items() if direction == "receive"),
            opened=self.opened,
            refused=refused,
            broken=self.errors.total() - refused,
            active=self.active,
        )
