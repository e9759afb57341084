"""Named deadlines of one core: setting a name again moves it, and what is left over in the heap is skipped."""

import heapq

TimerKey = tuple[str, str]
"""What is due, and for whom (a node id, an address, a probe number as text, or empty)."""


class Timers:
    """Deadlines in microseconds, earliest first; ties in the order in which they were set."""

    def __init__(self) -> None:
        self._at: dict[TimerKey, tuple[int, int]] = {}
        self._heap: list[tuple[int, int, TimerKey]] = []
        self._counter = 0

    def set(self, kind: str, subject: str, at_us: int) -> None:
        """(Re)arm; any earlier deadline of the same name is void."""
        self._counter += 1
        key = (kind, subject)
        self._at[key] = (at_us, self._counter)
        heapq.heappush(self._heap, (at_us, self._counter, key))
        if len(self._heap) > 64 + 4 * len(self._at):
            self._heap = [(at, counter, key) for key, (at, counter) in self._at.items()]
            heapq.heapify(self._heap)

    def advance(self, kind: str, subject: str, by_us: int) -> None:
        """Bring an armed deadline forward by that much."""
        armed = self._at.get((kind, subject))
        if armed is not None:
            self.set(kind, subject, armed[0] - by_us)

    def cancel(self, kind: str, subject: str = "") -> None:
        """Void the deadline if it is armed."""
        self._at.pop((kind, subject), None)

    def deadline(self, kind: str, subject: str = "") -> int | None:
        """When this name is due, if it is armed."""
        armed = self._at.get((kind, subject))
        return None if armed is None else armed[0]

    def next(self) -> int | None:
        """The earliest deadline."""
        while self._heap:
            at_us, counter, key = self._heap[0]
            if self._at.get(key) == (at_us, counter):
                return at_us
            heapq.heappop(self._heap)
        return None

    def pop_due(self, now_us: int) -> TimerKey | None:
        """Disarm and name the earliest deadline that is not after ``now_us``."""
        at_us = self.next()
        if at_us is None or at_us > now_us:
            return None
        key = heapq.heappop(self._heap)[2]
        del self._at[key]
        return key

    def __len__(self) -> int:
        return len(self._at)

    def clear(self) -> None:
        """Disarm everything."""
        self._at.clear()
        self._heap.clear()
