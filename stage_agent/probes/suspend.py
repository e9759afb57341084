"""Notices that the machine slept: the clock that counts through suspension has run ahead of the one that does not.

The wall clock plays no part: setting it by an hour changes nothing.
"""

import time
from collections.abc import Callable

SUSPENDED_US = 5_000_000
"""A gap over this voids every sample taken before it (PROTOCOL §3)."""


def sleep_offset_us() -> int:
    """How long this boot of the machine has been suspended in all; constant 0 where the system cannot say."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return (time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.clock_gettime_ns(time.CLOCK_MONOTONIC)) // 1_000
    if hasattr(time, "CLOCK_UPTIME_RAW"):  # macOS: MONOTONIC_RAW counts sleep, UPTIME_RAW does not
        raw = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)
        return (raw - time.clock_gettime_ns(time.CLOCK_UPTIME_RAW)) // 1_000
    return 0


class SuspendMeter:
    """Reports each suspension once."""

    def __init__(self, offset_us: Callable[[], int] = sleep_offset_us) -> None:
        self._offset_us = offset_us
        self._seen_us = offset_us()

    def gap_us(self) -> int:
        """How long the machine slept since the last call; 0 unless that is over ``SUSPENDED_US``."""
        now_us = self._offset_us()
        gap_us = now_us - self._seen_us
        if gap_us <= SUSPENDED_US:
            return 0  # not remembered: two readings of two clocks differ by microseconds, and short naps add up
        self._seen_us = now_us
        return gap_us
