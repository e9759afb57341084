"""What the simulated network is made of: ports, shapes of directed pairs, hosts, connections, counters."""

from dataclasses import dataclass, field
from typing import Any, Protocol


class SimPort(Protocol):
    """What the network needs from whoever drives a core. ``now_us`` is the host's own monotonic time.

    Messages are opaque to the network; ``size_of`` tells how long one is on the wire.
    """

    def on_connected(self, peer: str, address: str, now_us: int) -> None: ...

    def on_disconnected(self, peer: str, now_us: int) -> None: ...

    def on_message(self, sender: str, message: Any, lane: str, now_us: int) -> None: ...

    def on_timer(self, now_us: int) -> None: ...

    def on_clock_gap(self, gap_us: int, now_us: int) -> None: ...

    def next_deadline(self) -> int | None: ...


@dataclass(slots=True)
class Shape:
    """One directed pair. Probabilities in thousandths."""

    delay_us: int = 500
    jitter_us: int = 200
    loss_milli: int = 0
    duplicate_milli: int = 0
    blocked: bool = False
    datagrams_blocked: bool = False


@dataclass(slots=True)
class Host:
    """One machine. ``name`` is its identity at the time it connects; ``address`` is where it listens."""

    name: str
    address: str
    port: SimPort | None = None
    up: bool = True
    asleep_us: int = 0
    frozen_until_us: int = 0
    frozen_since_us: int = 0
    suspended: bool = False
    timer_at_us: int = -1
    life: int = 0
    links: dict[str, "Connection"] = field(default_factory=dict)


@dataclass(slots=True)
class Connection:
    """Between two hosts; ``free_at_us`` keeps each direction in order, ``latest`` is the newest datagram that arrived."""

    serial: int
    ends: tuple[str, str]
    since_us: int
    known_to: set[str]
    free_at_us: dict[str, int] = field(default_factory=dict)
    arrived_us: dict[str, int] = field(default_factory=dict)
    latest: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Traffic:
    """Counters of one host."""

    datagrams: int = 0
    datagram_bytes: int = 0
    stream_messages: int = 0
    stream_bytes: int = 0
