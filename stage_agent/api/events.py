"""The ring of remembered events and the counters that only grow: what the driver writes and a snapshot copies.

Bounded: the ring keeps the newest ``capacity`` events, an older one is forgotten; ``seq`` keeps counting, so a reader
sees that it missed some.
"""

from collections import deque
from typing import Any

from stage_agent.api.snapshot import Event, HistogramView

MAX_EVENTS = 1_024
MAX_TEXT_CHARACTERS = 512
SEARCH_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class EventLog:
    """Remembers what happened, newest last."""

    def __init__(self, capacity: int = MAX_EVENTS) -> None:
        self._events: deque[Event] = deque(maxlen=capacity)
        self._last = 0

    def append(self, *, now_us: int, at: str, kind: str, text: str, **fields: Any) -> Event:
        """Add one event. ``at`` is the wall clock for people; ``fields`` must be ready for JSON."""
        self._last += 1
        event = Event(self._last, at, now_us, kind, text[:MAX_TEXT_CHARACTERS], fields)
        self._events.append(event)
        return event

    def after(self, seq: int = 0) -> tuple[Event, ...]:
        """Events newer than ``seq``, oldest first; walks back from the newest, so following is cheap."""
        newer: list[Event] = []
        for event in reversed(self._events):
            if event.seq <= seq:
                break
            newer.append(event)
        return tuple(reversed(newer))


class DurationHistogram:
    """Counts of durations per upper bound in seconds, as Prometheus wants them."""

    def __init__(self, bounds_s: tuple[float, ...] = SEARCH_BOUNDS_S) -> None:
        self._bounds = (*bounds_s, float("inf"))
        self._counts = [0] * len(self._bounds)
        self._total_us = 0

    def observe(self, duration_us: int) -> None:
        """Count one duration."""
        self._total_us += duration_us
        for index, bound in enumerate(self._bounds):
            if duration_us <= bound * 1e6:
                self._counts[index] += 1

    def view(self) -> HistogramView:
        """The present counts (cumulative)."""
        return HistogramView(tuple(zip(self._bounds, self._counts, strict=True)), self._total_us / 1e6)
