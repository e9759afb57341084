"""When to send bytes only to learn a link's bandwidth: rarely, within a budget, never beside traffic. Off unless paid for.

Transfers that happen anyway measure links for nothing (``bandwidth``); a pair that exchanges nothing large stays unknown.
For such pairs this core starts a *probe*: ``size_bytes`` on a bulk stream, read and thrown away at the other end, observed
there and here like any transfer. Four rules keep it harmless:

* **Budget.** A node moves at most ``active_probe_bytes_per_hour`` in any hour, sent and received together. The whole size
  is reserved before the first byte; what did not move is returned at the end. A charge counts until an hour after its
  probe *ended*, so that no window of an hour, wherever it begins, holds more than the budget. The receiver reserves from
  its own budget and refuses what it cannot pay.
* **One at a time**, sent or received, at random distances: two meshes that start together drift apart.
* **No traffic.** While anything else moves bytes here nothing starts, nothing is accepted, and what runs is called off.
* **Small first.** A probe that ended sooner than counts as a measurement says how much larger the next must be; it grows
  at most eightfold, up to ``PROBE_MAX_BYTES``. A link that is too fast even for that rests until an estimate would have
  expired, and so does one that could not carry the smallest probe in the shell's time.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from random import Random

from config.settings import LinkSettings
from protocol.ids import NodeId

HOUR_US = 3_600_000_000
PROBE_MAX_BYTES = 64 * 1_048_576
"""Counts at up to 640 MB/s with the default ``bandwidth_min_duration_us``."""
FIRST_FRAMES = 2
"""The first probe of a link, in frames of ``bandwidth_min_frame_bytes``."""
AIM_DURATIONS = 3
"""A sized probe should last this many ``bandwidth_min_duration_us``: start-up and jitter must not end it too soon."""
GROWTH_MAX = 8
REFUSED_SPACINGS = 30
"""A peer that refused or failed is left alone for this many spacings, on average."""
PEERS_MAX = 1_024
"""Peers remembered; the oldest is forgotten and starts small again."""


@dataclass(frozen=True, slots=True)
class StartProbe:
    """Send ``size_bytes`` to ``peer``; answer with ``finished`` or ``refused``."""

    peer: NodeId
    size_bytes: int


@dataclass(frozen=True, slots=True)
class AbortProbe:
    """Stop the probe with ``peer``, sent or received, at once; answer with ``finished`` or ``received``."""

    peer: NodeId


Effect = StartProbe | AbortProbe


@dataclass(slots=True)
class _Running:
    peer: NodeId
    size: int
    incoming: bool
    called_off: bool = False


class ActiveProbe:
    """The probes of one node. Inputs return effects in the order to carry them out."""

    def __init__(self, settings: LinkSettings, random: Random, now_us: int) -> None:
        self._settings = settings
        self._random = random
        self._budget = settings.active_probe_bytes_per_hour
        self._charges: deque[tuple[int, int]] = deque()
        """(end, bytes) of probes that ended within the hour."""
        self._running: _Running | None = None
        self._traffic = False
        self._sizes: dict[NodeId, int] = {}
        self._rests: dict[NodeId, int] = {}
        self._next_us = now_us + self._spacing_us()

    @property
    def enabled(self) -> bool:
        """Whether there is a budget at all."""
        return self._budget > 0

    @property
    def running(self) -> bool:
        """Whether a probe is under way, sent or received."""
        return self._running is not None

    def next_deadline(self) -> int | None:
        """When ``on_timer`` may have something to do; ``None`` while off, busy, or beside traffic."""
        return None if self._budget == 0 or self._running is not None or self._traffic else self._next_us

    def available_bytes(self, now_us: int) -> int:
        """What may be reserved now."""
        while self._charges and now_us - self._charges[0][0] > HOUR_US:
            self._charges.popleft()
        reserved = 0 if self._running is None else self._running.size
        return self._budget - reserved - sum(size for _, size in self._charges)

    def on_timer(self, unknown: Collection[NodeId], now_us: int) -> list[Effect]:
        """``unknown``: connected peers whose sending bandwidth is not known or has expired. At most one probe starts."""
        due_us = self.next_deadline()
        if due_us is None or now_us < due_us:
            return []
        self._next_us = now_us + self._spacing_us()
        available = self.available_bytes(now_us)
        ready = sorted(
            peer for peer in unknown if self._rests.get(peer, now_us) <= now_us and self._size_for(peer) <= available
        )
        if not ready or self._budget < self._settings.bandwidth_min_frame_bytes:
            return []
        peer = self._random.choice(ready)
        self._running = _Running(peer, self._size_for(peer), incoming=False)
        return [StartProbe(peer, self._running.size)]

    def traffic_started(self, now_us: int) -> list[Effect]:
        """Something else moves bytes here from now on."""
        self._traffic = True
        self._next_us = now_us + self._spacing_us()
        if self._running is None or self._running.called_off:
            return []
        self._running.called_off = True
        return [AbortProbe(self._running.peer)]

    def traffic_ended(self, now_us: int) -> None:
        """It is quiet again; a probe waits for its spacing."""
        self._traffic = False
        self._next_us = now_us + self._spacing_us()

    def finished(self, peer: NodeId, sent_bytes: int, duration_us: int | None, now_us: int) -> None:
        """The probe sent to ``peer`` is over after ``sent_bytes``; ``duration_us`` to the acknowledgement, ``None`` = it broke off."""
        running = self._end(peer, sent_bytes, now_us, incoming=False)
        if duration_us is None:
            if not running.called_off:
                self._rest(peer, now_us + self._refused_us())
            return
        least_us = self._settings.bandwidth_min_duration_us
        aim = sent_bytes * AIM_DURATIONS * least_us // max(1, duration_us)
        floor = FIRST_FRAMES * self._settings.bandwidth_min_frame_bytes
        self._remember(self._sizes, peer, max(floor, min(aim, GROWTH_MAX * running.size, PROBE_MAX_BYTES)))
        if duration_us < least_us and self._size_for(peer) <= running.size:
            self._rest(peer, now_us + self._settings.bandwidth_expiry_us)

    def refused(self, peer: NodeId, now_us: int) -> None:
        """The peer did not take the probe, or could not be reached: nothing was sent."""
        self._end(peer, 0, now_us, incoming=False)
        self._rest(peer, now_us + self._refused_us())

    def asked(self, peer: NodeId, size_bytes: int, now_us: int) -> bool:
        """``peer`` wants to send a probe here. ``True`` reserves it from this node's budget; end it with ``received``."""
        if self._traffic or self._running is not None or not 0 < size_bytes <= PROBE_MAX_BYTES:
            return False
        if size_bytes > self.available_bytes(now_us):
            return False
        self._running = _Running(peer, size_bytes, incoming=True)
        return True

    def received(self, peer: NodeId, received_bytes: int, now_us: int) -> None:
        """The probe accepted from ``peer`` is over after ``received_bytes``."""
        self._end(peer, received_bytes, now_us, incoming=True)

    def _end(self, peer: NodeId, moved_bytes: int, now_us: int, *, incoming: bool) -> _Running:
        running = self._running
        assert running is not None
        assert (running.peer, running.incoming) == (peer, incoming)
        assert 0 <= moved_bytes <= running.size
        self._running = None
        if moved_bytes:
            self._charges.append((now_us, moved_bytes))
        self._next_us = now_us + self._spacing_us()
        return running

    def _size_for(self, peer: NodeId) -> int:
        """Never more than the whole budget, which could not be reserved."""
        return min(self._budget, self._sizes.get(peer, FIRST_FRAMES * self._settings.bandwidth_min_frame_bytes))

    def _rest(self, peer: NodeId, until_us: int) -> None:
        self._remember(self._rests, peer, until_us)

    @staticmethod
    def _remember(kept: dict[NodeId, int], peer: NodeId, value: int) -> None:
        kept.pop(peer, None)
        if len(kept) >= PEERS_MAX:
            del kept[next(iter(kept))]
        kept[peer] = value

    def _spacing_us(self) -> int:
        spacing_us = self._settings.active_probe_spacing_us
        return spacing_us // 2 + self._random.randrange(spacing_us)

    def _refused_us(self) -> int:
        return REFUSED_SPACINGS * self._spacing_us()
