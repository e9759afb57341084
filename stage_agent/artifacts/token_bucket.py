"""A bandwidth limit: a token bucket that may go into debt, so that no waiter starves behind smaller ones.

``take`` always grants, and says how long to wait before the bytes may move. Tokens are micro-bytes: integer arithmetic
loses nothing however often it is asked.
"""

from dataclasses import dataclass

_MICRO = 1_000_000
BURST_US = 100_000
"""Bytes of this time may move at once: below what passive samples and people notice."""


@dataclass(slots=True)
class TokenBucket:
    """``rate`` in bytes per second; ``None`` never waits. One bucket is shared by all transfers of a direction."""

    rate_bytes_per_s: int | None
    _tokens: int = 0
    _at_us: int | None = None

    def take(self, size: int, now_us: int) -> int:
        """Charge ``size`` bytes; microseconds to wait before they may move (rounded up)."""
        if self.rate_bytes_per_s is None:
            return 0
        full = self.rate_bytes_per_s * BURST_US
        if self._at_us is None:
            self._tokens = full
        else:
            self._tokens = min(full, self._tokens + self.rate_bytes_per_s * max(0, now_us - self._at_us))
        self._at_us = now_us if self._at_us is None else max(now_us, self._at_us)
        self._tokens -= size * _MICRO
        return 0 if self._tokens >= 0 else -(self._tokens // self.rate_bytes_per_s)
