"""Links as they are elsewhere: delay, jitter, loss, bandwidth and MTU per directed pair, from a file, while running.

The file (TOML) names directed pairs by node name or id:

    [links."alpha -> beta"]
    delay_ms = 10        # one way, before anything else
    jitter_ms = 2        # extra delay, uniform in 0…2 ms; order is kept
    loss = 0.01          # share of packets (on the TLS lane: of chunks, which then come a round trip late); 1 = a cut
    mib_per_s = 30       # MiB/s
    mtu = 1280           # larger IP packets vanish

A target may also be an IP address (``"alpha -> 192.0.2.7"``): of a node that has several, only the path to this one.

Shaping happens where bytes leave, on whole UDP datagrams below QUIC, so handshakes, acknowledgements and retransmissions
are shaped as on a real link; the TLS lane passes its chunks through the very same link object, so that both lanes share
its bandwidth. A node shapes only what it sends: both ends read the same file and each direction has its own line.

A packet leaves at the moment it is due or right after, never before. A processor that has slept comes back late (here up
to 5 ms after 75 ms of sleep), so the timer is set early by what timers have been late of late; who then wakes too early
sets a second, short one, which is punctual because the processor is awake, and the last millisecond is spun away.
"""

import asyncio
import heapq
import random
import threading
import time
import tomllib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.errors import ConfigurationError
from protocol.ids import NodeId

IP_UDP_OVERHEAD = 28
"""IPv4 and UDP headers, counted against ``mtu``."""
QUEUE_SECONDS = 0.5
"""A shaped link holds at most this much of its own bandwidth; beyond it packets are lost, as in a router."""
QUEUE_PACKETS = 10_000
SPIN_S = 0.001_3
"""No more than this is spun away before a packet: the loop's timers are rounded to 1 ms, up or down."""
SPIN_REST = 4
"""A link that spun waits so many times as long with timers only: spinning costs at most a fifth of a core."""
LATE_MIN_S, LATE_MAX_S = 0.000_3, 0.005
LATE_SHARE = 0.9
LATE_SAMPLES = 32
MIB = 1_048_576
_KEYS = {"delay_ms": 60_000.0, "jitter_ms": 60_000.0, "loss": 1.0, "mib_per_s": 1e6, "mtu": 65_535.0}


@dataclass(frozen=True, slots=True)
class LinkShape:
    """One directed link. Zero or None means "as it is"."""

    delay_us: int = 0
    jitter_us: int = 0
    loss: float = 0.0
    bytes_per_s: int | None = None
    mtu: int | None = None


def parse_shapes(text: str, where: str) -> dict[tuple[str, str], LinkShape]:
    """The file's links by (source, target). Raises ``ConfigurationError`` naming file, table and key."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{where}: not TOML: {error}") from None
    links = document.get("links", {})
    if not isinstance(links, dict) or set(document) - {"links"}:
        raise ConfigurationError(f'{where}: only [links."a -> b"] tables belong here')
    shapes = {}
    for name, table in links.items():
        source, arrow, target = (part.strip() for part in name.partition("->"))
        if not arrow or not source or not target or not isinstance(table, dict):
            raise ConfigurationError(f'{where}: link {name!r}: write [links."source -> target"]')
        shapes[source, target] = _shape(table, f"{where}: link {name!r}")
    return shapes


def _shape(table: dict[str, Any], where: str) -> LinkShape:
    for key, value in table.items():
        if key not in _KEYS:
            raise ConfigurationError(f"{where}: unknown key {key!r}; known are {', '.join(_KEYS)}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _KEYS[key]:
            raise ConfigurationError(f"{where}: {key} must be a number from 0 to {_KEYS[key]:g}")
    rate, mtu = table.get("mib_per_s"), table.get("mtu")
    return LinkShape(
        delay_us=round(table.get("delay_ms", 0) * 1_000),
        jitter_us=round(table.get("jitter_ms", 0) * 1_000),
        loss=float(table.get("loss", 0)),
        bytes_per_s=max(1, round(rate * MIB)) if rate else None,
        mtu=int(mtu) if mtu else None,
    )


class Conditioner:
    """The shapes of this node's outgoing links. Without a file nothing is shaped.

    ``seed`` makes losses and jitter repeat for the same traffic. Reading the file is the only I/O.
    """

    def __init__(self, file: str, *, own_id: str, own_name: str, seed: int = 0) -> None:
        self._file = Path(file) if file else None
        self._own = {own_id, own_name}
        self._seed = seed
        self._stamp: tuple[int, int, int] | None = None
        self._shapes: dict[tuple[str, str], LinkShape] = {}
        self._links: dict[tuple[NodeId, str], ShapedLink] = {}
        """By peer, and by address where the file names one."""
        self._names: dict[NodeId, str] = {}
        self._lateness = Lateness()
        self.reload()

    def reload(self) -> bool:
        """Read the file if it changed. True when shapes were replaced.

        Raises ``ConfigurationError`` for a file that is missing or wrong; then the shapes before stay.
        """
        if self._file is None:
            return False
        try:
            status = self._file.stat()
            stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
            if stamp == self._stamp:
                return False
            self._stamp = stamp
            text = self._file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"cannot read the link shapes in {self._file}: {error}") from None
        self._shapes = parse_shapes(text, str(self._file))
        self._follow()
        return True

    def name(self, peer: NodeId, name: str) -> None:
        """The peer's own name, from its hello: the file may use it."""
        self._names[peer] = name
        self._follow()

    def link(self, peer: NodeId, host: str = "") -> "ShapedLink | None":
        """The link to ``peer``, one object for all its connections; None when no file is set.

        Where the file names the address ``host`` (IPv4 also in its mapped form), the path to it is a link of its own;
        ask again after ``reload``.
        """
        if self._file is None:
            return None
        host = host.removeprefix("::ffff:") if "." in host else host
        key = peer, host if any((own, host) in self._shapes for own in self._own) else ""
        if key not in self._links:
            die = random.Random(f"{self._seed}:{peer}{key[1]}")  # noqa: S311
            self._links[key] = ShapedLink(self._shape_of(*key), die, self._lateness)
        return self._links[key]

    def is_shaped(self, peer: NodeId) -> bool:
        """Whether what is measured on the link to ``peer`` was pretended."""
        links = [link.shape for (held, host), link in self._links.items() if held == peer and host]
        return any(shape != LinkShape() for shape in (self._shape_of(peer), *links))

    def _follow(self) -> None:
        for key, link in self._links.items():
            link.shape = self._shape_of(*key)

    def _shape_of(self, peer: NodeId, host: str = "") -> LinkShape:
        for own in self._own:
            if host and (own, host) in self._shapes:
                return self._shapes[own, host]
        for own in self._own:
            for other in (peer, self._names.get(peer, peer)):
                if (own, other) in self._shapes:
                    return self._shapes[own, other]
        return LinkShape()


class Lateness:
    """How late this machine's timers come: nine in ten of the latest are no later than ``margin_s`` (0.3…5 ms).

    One for all links of a node: lateness belongs to the machine and its loop, not to a link.
    """

    def __init__(self) -> None:
        self._latest: deque[float] = deque([SPIN_S], LATE_SAMPLES)
        self.margin_s = SPIN_S

    def add(self, late_s: float) -> None:
        """A timer came so much after the moment it was set for (negative: before it)."""
        self._latest.append(min(max(late_s, LATE_MIN_S), LATE_MAX_S))
        self.margin_s = sorted(self._latest)[int(len(self._latest) * LATE_SHARE)]


class ShapedLink:
    """One direction of one link: a serialiser, a delay line and a die.

    ``packet`` and ``wake`` need a running event loop; ``depart`` and ``late_by_loss_s`` may be called by any thread.
    """

    def __init__(self, shape: LinkShape, die: random.Random, lateness: Lateness | None = None) -> None:
        self.shape = shape
        self._die = die
        self._lateness = lateness or Lateness()
        self.free_s = 0.0
        """When the serialiser has sent everything it took (monotonic seconds)."""
        self._last_due_s = 0.0
        self._waiting: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._timer: asyncio.Handle | None = None
        self._planned_s: float | None = None
        """The moment the timer is set for, when it follows a sleep long enough to be late after."""
        self._spinning_s: float | None = None
        self._rested_s = 0.0
        self._serialising = threading.Lock()

    def packet(self, size: int, deliver: Callable[[], None]) -> str | None:
        """Send a packet of ``size`` bytes; ``deliver`` is called when it comes out. The reason when it is lost."""
        shape = self.shape
        if shape == LinkShape() and not self._waiting:
            deliver()
            return None
        if shape.mtu is not None and size + IP_UDP_OVERHEAD > shape.mtu:
            return "shaped_mtu"
        if shape.loss and self._die.random() < shape.loss:
            return "shaped_loss"
        now_s = time.monotonic()
        due_s = self.depart(size + IP_UDP_OVERHEAD, now_s)
        if due_s is None or len(self._waiting) >= QUEUE_PACKETS:
            return "shaped_queue"
        self.wake(due_s, deliver)
        return None

    def wake(self, due_s: float, call: Callable[[], None]) -> None:
        """Call at ``due_s`` (monotonic seconds) or right after, never before it and never from within this call."""
        self._count += 1
        heapq.heappush(self._waiting, (due_s, self._count, call))
        if self._waiting[0][1] == self._count:
            self._arm(time.monotonic())

    def depart(self, size: int, now_s: float, *, bounded: bool = True) -> float | None:
        """When the last byte of ``size`` bytes arrives (monotonic seconds); None when the queue is full.

        With ``bounded=False`` the caller waits instead of losing anything: the TLS lane.
        """
        with self._serialising:
            shape = self.shape
            start_s = max(now_s, self.free_s)
            if shape.bytes_per_s is not None:
                if bounded and start_s - now_s > QUEUE_SECONDS:
                    return None
                self.free_s = start_s + size / shape.bytes_per_s
                start_s = self.free_s
            delay_us = shape.delay_us + (self._die.random() * shape.jitter_us if shape.jitter_us else 0)
            self._last_due_s = max(self._last_due_s, start_s + delay_us / 1_000_000)
            return self._last_due_s

    @property
    def is_cut(self) -> bool:
        """Nothing arrives however often it is sent again."""
        return self.shape.loss >= 1

    def late_by_loss_s(self) -> float:
        """Extra delay of a chunk on a reliable lane: a lost one is sent again after about a round trip."""
        shape = self.shape
        return max(0.01, 2 * shape.delay_us / 1_000_000) if shape.loss and self._die.random() < shape.loss else 0.0

    def _arm(self, now_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._planned_s = None
        loop, rest_s, margin_s = asyncio.get_running_loop(), self._waiting[0][0] - now_s, self._lateness.margin_s
        if rest_s > max(margin_s, SPIN_S):
            self._planned_s = now_s + rest_s - margin_s
            self._timer = loop.call_later(rest_s - margin_s, self._fire)
        elif rest_s > SPIN_S:
            self._timer = loop.call_later(rest_s - SPIN_S, self._fire)
        elif now_s >= self._rested_s:
            self._spinning_s = self._spinning_s or now_s
            self._timer = loop.call_soon(self._fire)
        else:
            self._timer = loop.call_later(max(0.0, rest_s), self._fire)

    def _fire(self) -> None:
        self._timer = None
        now_s = time.monotonic()
        if self._planned_s is not None:
            self._lateness.add(now_s - self._planned_s)
        if self._waiting[0][0] > now_s:
            self._arm(now_s)
            return
        if self._spinning_s is not None:
            self._rested_s = now_s + SPIN_REST * (now_s - self._spinning_s)
            self._spinning_s = None
        due = []
        while self._waiting and self._waiting[0][0] <= now_s:
            due.append(heapq.heappop(self._waiting)[2])
        for call in due:  # each may ask to be woken again
            call()
        if self._waiting and self._timer is None:
            self._arm(now_s)
