"""Round-trip time of one path: the minimum ever seen, how often and how long ago, and what it looks like lately.

The minimum is what planning uses: queueing, a busy peer and a sleeping radio only ever add. Idle Wi-Fi answers pings in
77 ms and carries traffic in 3 ms, so samples taken while a bulk transfer ran are also kept apart (``loaded``); they may
only lower the minimum, like any sample. Jitter is shown to people and never planned on. A sample of 0 µs or less is a
bug or a lie and never enters.
"""

from dataclasses import dataclass

RECENT = 64
"""Latest samples kept for the 99th percentile and the recent minimum."""


@dataclass(frozen=True, slots=True)
class RttView:
    """Times are monotonic µs of this node."""

    min_rtt_us: int
    samples: int
    first_us: int
    last_us: int
    jitter_us: int


class RttWindow:
    """Samples of one path since it came into use. ``minimum_us`` is ``None`` and the times 0 before the first."""

    def __init__(self) -> None:
        self.minimum_us: int | None = None
        self.samples = 0
        self.first_us = 0
        self.last_us = 0
        self._previous: int | None = None
        self._jitter_us = 0
        self._recent: list[tuple[int, int]] = []

    def add(self, rtt_us: int, now_us: int) -> bool:
        """Take a sample; ``False`` if it cannot be one."""
        if rtt_us <= 0:
            return False
        if self.minimum_us is None:
            self.minimum_us, self.first_us = rtt_us, now_us
        self.minimum_us = min(self.minimum_us, rtt_us)
        self.samples += 1
        self.last_us = now_us
        if self._previous is not None:
            # RFC 3550 §6.4.1: mean deviation of consecutive samples, weight 1/16.
            self._jitter_us += (abs(rtt_us - self._previous) - self._jitter_us) // 16
        self._previous = rtt_us
        # A list, for a deque takes 600 bytes at its first sample and most links of a large mesh have a few.
        self._recent.append((now_us, rtt_us))
        if len(self._recent) > RECENT:
            del self._recent[0]
        return True

    def view(self) -> RttView | None:
        """``None`` before the first sample."""
        if self.minimum_us is None:
            return None
        return RttView(self.minimum_us, self.samples, self.first_us, self.last_us, self._jitter_us)

    def recent(self, since_us: int) -> list[tuple[int, int]]:
        """(time, RTT) of the latest samples, at most ``RECENT``, taken at or after ``since_us``."""
        return [sample for sample in self._recent if sample[0] >= since_us]

    def p99_us(self) -> int | None:
        """99th percentile of the latest samples: with at most 64 of them, the largest."""
        return max((rtt for _, rtt in self._recent), default=None)
