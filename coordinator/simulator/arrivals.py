"""Which request arrives when: a list, a seeded random process, or a closed loop of users that answer with think time."""

import random
from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from coordinator.simulator.scenario_workload import Traffic


class Arrivals:
    """Requests in time order. In a closed loop every completion releases that user's next request."""

    def __init__(self, traffic: Traffic, rng: random.Random) -> None:
        self._traffic = traffic
        self._rng = rng
        self._open: Iterator[tuple[int, int, int]] = self._open_loop()
        self._heap: list[tuple[int, int, int]] = []
        self._released = 0
        if traffic.arrivals == "closed":
            self._released = min(traffic.streams, traffic.requests)
            self._heap = [(0, traffic.prompt_tokens, traffic.output_tokens)] * self._released
            heapify(self._heap)
        else:
            self._pull()

    def _open_loop(self) -> Iterator[tuple[int, int, int]]:
        traffic = self._traffic
        if traffic.arrivals == "trace":
            for entry in traffic.trace:
                yield entry.at_us, entry.prompt_tokens, entry.output_tokens
        elif traffic.arrivals == "poisson":
            at = 0.0
            for _ in range(traffic.requests):
                at += self._rng.expovariate(1 / traffic.gap_us)
                yield int(at), traffic.prompt_tokens, traffic.output_tokens
        elif traffic.arrivals == "burst":
            for index in range(traffic.requests):
                yield index // traffic.burst_size * traffic.gap_us, traffic.prompt_tokens, traffic.output_tokens

    def _pull(self) -> None:
        following = next(self._open, None)
        if following is not None:
            heappush(self._heap, following)

    @property
    def next_us(self) -> int | None:
        """When the next request arrives; ``None`` when none is on its way."""
        return self._heap[0][0] if self._heap else None

    def take(self) -> tuple[int, int, int]:
        """The next request: arrival (µs), prompt tokens, output tokens."""
        entry = heappop(self._heap)
        if self._traffic.arrivals != "closed":
            self._pull()
        return entry

    def finished(self, now_us: int) -> None:
        """One request ended (answered or failed)."""
        traffic = self._traffic
        if traffic.arrivals == "closed" and self._released < traffic.requests:
            self._released += 1
            heappush(self._heap, (now_us + traffic.think_us, traffic.prompt_tokens, traffic.output_tokens))
