"""The best that each path of a link has shown, to notice when the present is far worse.

Compared are medians of recent samples, never single ones: the luckiest of a thousand samples on a jittery path is many
times below the usual, and would call every ordinary minute degraded. Like is compared with like: idle samples with idle
ones, samples under load with such, because an idle Wi-Fi radio sleeps and answers in 77 ms what it carries in 3 ms.
"""

from dataclasses import dataclass, field

SAMPLES_MIN = 8
PATHS_KEPT = 8


@dataclass(frozen=True, slots=True)
class Path:
    """``host`` without port; ``interface`` empty when unknown."""

    host: str
    interface: str


@dataclass(slots=True)
class _Best:
    minimum_us: int
    medians: dict[bool, int] = field(default_factory=dict)


def median_us(samples: list[int]) -> int | None:
    """Lower median; ``None`` for fewer than ``SAMPLES_MIN``."""
    if len(samples) < SAMPLES_MIN:
        return None
    return sorted(samples)[(len(samples) - 1) // 2]


class Yardstick:
    """Lowest minimum and lowest medians by path; at most ``PATHS_KEPT`` paths, the worst goes first."""

    def __init__(self) -> None:
        self._best: dict[Path, _Best] = {}

    def note(self, path: Path, samples: dict[bool, list[int]]) -> None:
        """Enter samples of a path by kind (``True``: under load)."""
        everything = [*samples[False], *samples[True]]
        if not everything:
            return
        best = self._best.setdefault(path, _Best(min(everything)))
        best.minimum_us = min(best.minimum_us, *everything)
        for loaded, group in samples.items():
            median = median_us(group)
            if median is not None:
                best.medians[loaded] = min(median, best.medians.get(loaded, median))
        while len(self._best) > PATHS_KEPT:
            del self._best[max(self._best, key=lambda known: (known != path, self._best[known].minimum_us))]

    def retire(self, path: Path, name: Path) -> None:
        """The path has silently become another: what it was once stays under a new name."""
        if path in self._best:
            self._best[name] = self._best.pop(path)

    def reference_us(self, loaded: bool, path: Path | None = None) -> int | None:
        """Lowest median of this kind on ``path``, or on any path."""
        known = self._best.values() if path is None else [best for key, best in self._best.items() if key == path]
        return min((best.medians[loaded] for best in known if loaded in best.medians), default=None)

    def minimum(self, host: str | None = None) -> tuple[Path, int] | None:
        """The fastest path (to ``host``, if given) and its minimum RTT."""
        known = [
            (best.minimum_us, index, path)
            for index, (path, best) in enumerate(self._best.items())
            if host is None or path.host == host
        ]
        if not known:
            return None
        minimum_us, _, path = min(known, key=lambda item: item[:2])
        return path, minimum_us
