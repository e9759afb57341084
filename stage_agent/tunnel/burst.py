"""What a tunnel's transfers say about its link.

Engines talk in bursts: weights for minutes, activations for milliseconds, then they compute. Only the time within a burst
counts, otherwise a link would look as slow as the model. Within one, time spent waiting for the link (its buffers full at
the sender, the rest of a chunk missing at the receiver) is told from time spent waiting for the engine.
"""

import time
from dataclasses import dataclass, field

from protocol.quic.bulk import BUSY_SHARE, REPORT_US, SAMPLE_MIN_BYTES, WAIT_SHARE, Observe
from protocol.quic.interface import Direction, LimitedBy

GAP_S = 0.02
"""A pause of the engine that ends a burst."""


@dataclass(slots=True)
class Burst:
    """One direction of one connection. Times are monotonic seconds; used by the connection's own thread only."""

    direction: Direction
    observe: Observe
    size: int = 0
    link_s: float = 0.0
    begun_s: float | None = None
    last_s: float = 0.0
    _cpu_s: float = field(default=0.0)

    def begin(self, now_s: float) -> None:
        """Bytes are about to move; nothing when they already do."""
        if self.begun_s is None:
            self.begun_s = self.last_s = now_s
            self.size, self.link_s, self._cpu_s = 0, 0.0, time.thread_time()

    def moved(self, size: int, now_s: float) -> None:
        """``size`` bytes have moved. A receiver's first piece only starts the clock: it does not know when it was sent."""
        if self.begun_s is None:
            self.begin(now_s)
            return
        self.size += size
        self.last_s = now_s
        if (now_s - self.begun_s) * 1_000_000 >= REPORT_US:
            self.end()
            self.begin(now_s)

    def waited(self, seconds: float, now_s: float, *, for_link: bool) -> None:
        """Nothing moved for a while."""
        if self.begun_s is None:
            return
        if for_link:
            self.link_s += seconds
        elif now_s - self.last_s >= GAP_S:
            self.end()

    def end(self) -> None:
        """Report, if there is enough to say."""
        if self.begun_s is None:
            return
        duration_s, self_begun = self.last_s - self.begun_s, self.begun_s
        self.begun_s = None
        if self.size < SAMPLE_MIN_BYTES or self.last_s <= self_begun:
            return
        limit: LimitedBy = "app"
        if self.link_s >= WAIT_SHARE * duration_s:
            limit = "link"
        elif time.thread_time() - self._cpu_s >= BUSY_SHARE * duration_s:
            limit = "cpu"
        self.observe(self.direction, self.size, max(1, round(duration_s * 1_000_000)), limit)
