"""Large-frame bandwidth of one direction, from transfers that happened anyway.

Only frames of at least ``bandwidth_min_frame_bytes`` that took at least ``bandwidth_min_duration_us`` count; smaller ones
measure latency. A sample limited by the link is a measurement and moves the estimate (weight 1/4); one limited by the
application, the CPU or a window only proves that the link is at least that fast. An estimate older than
``bandwidth_expiry_us`` is no estimate.
"""

from dataclasses import dataclass
from typing import Literal

from config.settings import LinkSettings

LimitedBy = Literal["link", "app", "cpu", "window"]
Direction = Literal["send", "receive"]


@dataclass(frozen=True, slots=True)
class BandwidthView:
    """``limited_by`` other than ``link`` marks a lower bound."""

    bytes_per_s: int
    limited_by: LimitedBy
    at_us: int


class BandwidthEstimate:
    """One direction of one link."""

    def __init__(self, settings: LinkSettings) -> None:
        self._settings = settings
        self._view: BandwidthView | None = None

    def add(self, size: int, duration_us: int, limited_by: LimitedBy, now_us: int) -> bool:
        """Take a finished transfer; ``False`` if it says nothing about bandwidth."""
        if size < self._settings.bandwidth_min_frame_bytes or duration_us < self._settings.bandwidth_min_duration_us:
            return False
        rate = size * 1_000_000 // duration_us
        current = self.view(now_us)
        if current is None or (limited_by == "link" and current.limited_by != "link"):
            # A real measurement replaces a lower bound, but never below what was proven.
            proven = 0 if current is None else current.bytes_per_s
            self._view = BandwidthView(max(rate, proven) if limited_by == "link" else rate, limited_by, now_us)
        elif limited_by == "link":
            rate = (3 * current.bytes_per_s + rate) // 4
            self._view = BandwidthView(rate, "link", now_us)
        elif rate >= current.bytes_per_s:
            self._view = BandwidthView(rate, limited_by, now_us)
        return True

    def view(self, now_us: int) -> BandwidthView | None:
        """The estimate unless it expired."""
        if self._view is not None and now_us - self._view.at_us > self._settings.bandwidth_expiry_us:
            self._view = None
        return self._view

    def void(self) -> None:
        """Forget everything: the clock or the path changed."""
        self._view = None


def merge_bytes_per_s(*ends: tuple[int, LimitedBy | None]) -> int | None:
    """Views of one direction, each with its limit: the smaller (DESIGN: signals, large-frame bandwidth).

    Lower bounds count only where nobody measured: that a link carries at least so much refutes no measurement of it. A
    limit that is not known is taken for a measurement.
    """
    measured = [rate for rate, limited_by in ends if limited_by in {"link", None}]
    return min(measured or [rate for rate, _ in ends], default=None)
