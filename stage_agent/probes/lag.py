"""How late the event loop runs its timers: the difference between a slow network and a busy process.

Above ``DEGRADED_US`` a node must stop probing others (it would report its own lateness as theirs) and say so; above
``OVERLOADED_US`` it must shed connections, because retransmission timers shorter than the lag feed on themselves.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from time import monotonic_ns
from typing import Literal

from protocol.beat import BEAT_US, EARLY_US, at_beat_us

DEGRADED_US = 200_000
OVERLOADED_US = 1_000_000
WINDOW_US = 2_000_000
"""A stall is remembered this long."""

Level = Literal["ok", "degraded", "overloaded"]


class LagMeter:
    """The worst lateness of the last window. Pure except for ``run``."""

    def __init__(self) -> None:
        self._worst: deque[tuple[int, int]] = deque()
        """Decreasing lateness with increasing time: the front is the window's maximum."""

    def record(self, late_us: int, now_us: int) -> None:
        """A timer that was due ran ``late_us`` late."""
        while self._worst and self._worst[-1][1] <= late_us:
            self._worst.pop()
        self._worst.append((now_us, late_us))

    def lag_us(self, now_us: int) -> int:
        """The maximum within the window before ``now_us``."""
        while self._worst and now_us - self._worst[0][0] > WINDOW_US:
            self._worst.popleft()
        return self._worst[0][1] if self._worst else 0

    def level(self, now_us: int) -> Level:
        """What the lag asks for."""
        lag_us = self.lag_us(now_us)
        if lag_us > OVERLOADED_US:
            return "overloaded"
        return "degraded" if lag_us > DEGRADED_US else "ok"

    async def run(self, late: Callable[[int], None], phase_us: int = 0) -> None:
        """Measure this loop at every beat until cancelled; ``late`` hears at once of lateness over ``DEGRADED_US``."""
        now_us = monotonic_ns() // 1_000
        while True:
            due_us = at_beat_us(now_us + BEAT_US // 2, phase_us)
            await asyncio.sleep((due_us - now_us + EARLY_US) / 1e6)
            now_us = monotonic_ns() // 1_000
            late_us = max(0, now_us - due_us - EARLY_US)
            self.record(late_us, now_us)
            if late_us > DEGRADED_US:
                late(late_us)
