"""One link to one peer over whatever paths it has used.

A *path* is the remote host and the local interface; another port is the same path (NAT rebinding). A new path starts a
new RTT window, since the old minimum says nothing about it, but the best figure ever seen stays as a yardstick:
``degraded`` is raised when the present path is ``degraded_factor`` times worse (and by at least 1 ms). The commonest
silent failure is a fall-back from cable to Wi-Fi or a VPN; it changes the address or the interface, or nothing visible at
all. In the last case a whole minute of samples far above the minimum counts as a change of path. Like is compared with
like: idle samples with idle ones and samples under load with such, because idle radios sleep.
"""

from collections import deque
from dataclasses import dataclass

from config.settings import LinkSettings
from protocol.links.bandwidth import BandwidthEstimate, BandwidthView, Direction, LimitedBy
from protocol.links.rtt import RttView, RttWindow

DEGRADED_FLOOR_US = 1_000
"""A path is not called degraded for a difference below this: host scheduling makes that much."""
UNSURE_US = 30_000_000
"""A transfer is reported when it ends; samples younger than this are not yet called idle."""
SHIFT_SPAN_US = 60_000_000
SHIFT_SAMPLES = 10
LOADED_INTERVALS = 8
PATHS_KEPT = 8


@dataclass(frozen=True, slots=True)
class Path:
    """``host`` without port; ``interface`` empty when unknown."""

    host: str
    interface: str


@dataclass(frozen=True, slots=True)
class LinkView:
    """Snapshot of a link; times are monotonic µs of this node. ``settled`` is for the moment it was taken."""

    path: Path | None
    rtt: RttView | None
    settled: bool
    degraded: bool
    best_path: Path | None
    best_rtt_us: int | None
    loaded_rtt_us: int | None
    path_changed_us: int | None
    path_changes: int
    send: BandwidthView | None
    receive: BandwidthView | None


class Link:
    """Everything measured on the way to one peer."""

    def __init__(self, settings: LinkSettings) -> None:
        self._settings = settings
        self._path: Path | None = None
        self._window = RttWindow()
        self._best: dict[Path, dict[bool, int]] = {}
        self._loaded: deque[tuple[int, int]] = deque(maxlen=LOADED_INTERVALS)
        self._loaded_rtt_us: int | None = None
        self._changed_us: int | None = None
        self._changes = 0
        self._noted_us = -(2**62)
        self._bandwidth: dict[Direction, BandwidthEstimate] = {
            "send": BandwidthEstimate(settings),
            "receive": BandwidthEstimate(settings),
        }

    def on_path(self, address: str, interface: str, now_us: int) -> bool:
        """The connection now uses this remote address; ``True`` if that is another path than before."""
        path = Path(host_of(address), interface)
        if path == self._path:
            return False
        self._note_best(now_us)
        if self._path is not None:
            self._changes += 1
            self._changed_us = now_us
        self._path = path
        self._start_window()
        return True

    def on_rtt(self, rtt_us: int, now_us: int) -> bool:
        """Take a sample of the present path; ``False`` if it was refused as absurd."""
        return self._window.add(rtt_us, now_us)

    def on_transfer(
        self, direction: Direction, size: int, duration_us: int, limited_by: LimitedBy, now_us: int
    ) -> None:
        """A bulk transfer ended now. RTT samples taken meanwhile are samples under load."""
        self._bandwidth[direction].add(size, duration_us, limited_by, now_us)
        if duration_us >= self._settings.bandwidth_min_duration_us:
            self._loaded.append((now_us - duration_us, now_us))
            loaded = [rtt for at, rtt in self._window.recent(now_us - duration_us) if self._is_loaded(at)]
            if loaded:
                self._loaded_rtt_us = min(*loaded, self._loaded_rtt_us or loaded[0])

    def void(self) -> None:
        """A clock gap: nothing measured before it counts."""
        self._start_window()
        self._loaded.clear()
        for estimate in self._bandwidth.values():
            estimate.void()

    def settled(self, now_us: int) -> bool:
        """DESIGN: enough samples over enough time, and the newest fresh."""
        rtt = self._window.view()
        return (
            rtt is not None
            and rtt.samples >= self._settings.settle_samples
            and rtt.last_us - rtt.first_us >= self._settings.settle_span_us
            and now_us - rtt.last_us <= self._settings.settle_max_age_us
        )

    def p99_us(self) -> int | None:
        """Recent worst case of the present path."""
        return self._window.p99_us()

    def min_rtt_us(self) -> int | None:
        """Minimum of the present path."""
        rtt = self._window.view()
        return None if rtt is None else rtt.min_rtt_us

    def refresh(self, now_us: int) -> None:
        """Look for a silent change of path. Called about once a second."""
        self._note_best(now_us - UNSURE_US)
        recent = self._window.recent(now_us - SHIFT_SPAN_US)
        if self._path is None or len(recent) < SHIFT_SAMPLES or recent[-1][0] - recent[0][0] < SHIFT_SPAN_US * 3 // 4:
            return
        best = self._best.get(self._path)
        if not best or not self._far_worse(min(rtt_us for _, rtt_us in recent), min(best.values())):
            return
        idle = [sample for at, sample in recent if not self._is_loaded(at)]
        loaded = [sample for at, sample in recent if self._is_loaded(at)]
        if loaded and True in best:
            shifted = self._far_worse(min(loaded), best[True])
        else:
            shifted = bool(idle) and False in best and self._far_worse(min(idle), best[False])
        if shifted:
            self._changes += 1
            self._changed_us = now_us
            self._start_window(recent)
            # The yardstick moves to a path of its own, so that the present one starts afresh.
            self._best[Path(self._path.host, f"{self._path.interface}~before-{self._changes}")] = self._best.pop(
                self._path
            )
            self._trim()

    def view(self, now_us: int) -> LinkView:
        """Everything at once."""
        best_path, best_us = self._best_of_all()
        minimum = self.min_rtt_us()
        degraded = minimum is not None and best_us is not None and self._far_worse(minimum, best_us)
        rtt = self._window.view()
        return LinkView(
            path=self._path,
            rtt=rtt,
            settled=self.settled(now_us),
            degraded=degraded and rtt is not None and rtt.samples >= self._settings.settle_samples,
            best_path=best_path,
            best_rtt_us=best_us,
            loaded_rtt_us=self._loaded_rtt_us,
            path_changed_us=self._changed_us,
            path_changes=self._changes,
            send=self._bandwidth["send"].view(now_us),
            receive=self._bandwidth["receive"].view(now_us),
        )

    def best_of(self, host: str) -> int | None:
        """Best RTT ever seen on any path to this remote host."""
        return min(
            (min(best.values()) for path, best in self._best.items() if path.host == host and best), default=None
        )

    def _start_window(self, samples: list[tuple[int, int]] | None = None) -> None:
        self._window = RttWindow()
        self._loaded_rtt_us = None
        for at_us, rtt_us in samples or []:
            self._window.add(rtt_us, at_us)

    def _note_best(self, until_us: int) -> None:
        """Enter samples up to then into the best of their path: later ones may yet turn out to be under load."""
        if self._path is None or until_us <= self._noted_us:
            return
        best = self._best.get(self._path, {})
        for at_us, rtt_us in self._window.recent(self._noted_us + 1):
            if at_us <= until_us:
                kind = self._is_loaded(at_us)
                best[kind] = min(rtt_us, best.get(kind, rtt_us))
        self._noted_us = until_us
        if best:
            self._best[self._path] = best
            self._trim()

    def _trim(self) -> None:
        while len(self._best) > PATHS_KEPT:
            worst = max(self._best, key=lambda path: (path != self._path, min(self._best[path].values(), default=0)))
            del self._best[worst]

    def _best_of_all(self) -> tuple[Path | None, int | None]:
        known = [(min(best.values()), index, path) for index, (path, best) in enumerate(self._best.items()) if best]
        if not known:
            return None, None
        rtt_us, _, path = min(known, key=lambda item: item[:2])
        return path, rtt_us

    def _is_loaded(self, at_us: int) -> bool:
        return any(start <= at_us <= end for start, end in self._loaded)

    def _far_worse(self, present_us: int, best_us: int) -> bool:
        return present_us >= self._settings.degraded_factor * best_us and present_us - best_us >= DEGRADED_FLOOR_US


def host_of(address: str) -> str:
    """``host`` of ``host:port`` or ``[v6]:port``; the text itself when it has no port."""
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdigit():
        return address
    return host.strip("[]")
