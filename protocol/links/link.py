"""One link to one peer over whatever paths it has used.

A *path* is the remote host and the local interface; another port is the same path (NAT rebinding). A new path starts a
new RTT window and an empty bandwidth, since the old figures say nothing about it, but what the paths have shown stays as a yardstick:
``degraded`` is raised when the present path is ``degraded_factor`` times worse (and by at least 1 ms). The commonest
silent failure is a fall-back from cable to Wi-Fi or a VPN; it changes the address or the interface, or nothing visible at
all. In the last case a whole minute of samples that is far worse than the same path once was counts as a change of path.
"""

from dataclasses import dataclass
from typing import NamedTuple

from config.settings import LinkSettings
from protocol.links.bandwidth import BandwidthEstimate, BandwidthView, Direction, LimitedBy
from protocol.links.rtt import RttView, RttWindow
from protocol.links.yardstick import Path, Yardstick, median_us

DEGRADED_FLOOR_US = 1_000
"""A path is not called degraded for a difference below this: host scheduling makes that much."""
UNSURE_US = 30_000_000
"""A transfer is reported when it ends; samples younger than this are not yet called idle."""
SHIFT_SPAN_US = 60_000_000
LOADED_INTERVALS = 32
JOIN_US = 1_000_000
"""Transfers that follow each other this closely are one time under load."""
NOTE_EVERY = 8
"""Samples between two looks at the yardstick."""


class LinkMark(NamedTuple):
    """What of a link can be material."""

    settled: bool
    degraded: bool
    min_rtt_us: int | None
    send_bytes_per_s: int | None
    receive_bytes_per_s: int | None
    over_tcp: bool = False


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
    over_tcp: bool = False


class Link:
    """Everything measured on the way to one peer."""

    def __init__(self, settings: LinkSettings) -> None:
        self._settings = settings
        self._path: Path | None = None
        self._over_tcp = False
        self._window = RttWindow()
        self._yardstick = Yardstick()
        self._since_note = 0
        self._degraded = False
        self._loaded: list[tuple[int, int]] = []
        self._loaded_rtt_us: int | None = None
        self._changed_us: int | None = None
        self._changes = 0
        self._bandwidth: dict[Direction, BandwidthEstimate] = {
            "send": BandwidthEstimate(settings),
            "receive": BandwidthEstimate(settings),
        }

    def on_path(self, address: str, interface: str, now_us: int, *, over_tcp: bool = False) -> bool:
        """The connection now uses this remote address; ``True`` if that is another path than before.

        An interface that was or is not known (empty) makes no other path. ``over_tcp``: UDP does not pass.
        """
        self._over_tcp = over_tcp
        path = Path(host_of(address), interface)
        if self._path is not None and self._path.host == path.host and not (interface and self._path.interface):
            path = self._path = Path(path.host, interface or self._path.interface)
        if path == self._path:
            return False
        if self._path is not None:
            self._yardstick.note(self._path, self._kinds(now_us - SHIFT_SPAN_US, now_us))
            self._changed(now_us)
        self._path = path
        self._start_window()
        return True

    def on_rtt(self, rtt_us: int, now_us: int) -> bool:
        """Take a sample of the present path; ``False`` if it was refused as absurd."""
        self._since_note += 1
        return self._window.add(rtt_us, now_us)

    def on_transfer(
        self, direction: Direction, size: int, duration_us: int, limited_by: LimitedBy, now_us: int
    ) -> None:
        """A bulk transfer ended now. RTT samples taken meanwhile are samples under load.

        What began before the path changed is no sample of the present path's bandwidth.
        """
        if self._changed_us is None or now_us - duration_us >= self._changed_us:
            self._bandwidth[direction].add(size, duration_us, limited_by, now_us)
        if duration_us >= self._settings.bandwidth_min_duration_us:
            start_us = now_us - duration_us
            if self._loaded and start_us <= self._loaded[-1][1] + JOIN_US:
                start_us = min(start_us, self._loaded.pop()[0])
            self._loaded.append((start_us, now_us))
            del self._loaded[:-LOADED_INTERVALS]
            loaded = [
                rtt
                for at, rtt in self._window.recent(now_us - duration_us)
                if any(start <= at <= end for start, end in self._loaded)
            ]
            if loaded:
                self._loaded_rtt_us = min(*loaded, self._loaded_rtt_us or loaded[0])

    def void(self) -> None:
        """A clock gap: nothing measured before it counts."""
        self._start_window()
        self._loaded.clear()
        self._void_bandwidth()

    def settled(self, now_us: int) -> bool:
        """DESIGN: enough samples over enough time, and the newest fresh."""
        window = self._window
        return (
            window.samples >= self._settings.settle_samples
            and window.last_us - window.first_us >= self._settings.settle_span_us
            and now_us - window.last_us <= self._settings.settle_max_age_us
        )

    def settles_in_us(self, now_us: int) -> int | None:
        """How long from now until the next sample can settle this link; ``None`` when it is settled."""
        if self.settled(now_us):
            return None
        window = self._window
        return max(0, window.first_us + self._settings.settle_span_us - now_us) if window.samples else 0

    def p99_us(self) -> int | None:
        """Recent worst case of the present path."""
        return self._window.p99_us()

    @property
    def measured_us(self) -> int:
        """Time of the latest RTT sample; 0 before the first."""
        return self._window.last_us

    def min_rtt_us(self) -> int | None:
        """Minimum of the present path."""
        return self._window.minimum_us

    def refresh(self, now_us: int) -> None:
        """Judge the present path against the yardstick. Called about once a second; most calls cost nothing."""
        if self._path is None or self._since_note < NOTE_EVERY:
            return
        self._since_note = 0
        since_us = now_us - SHIFT_SPAN_US
        self._yardstick.note(self._path, self._kinds(since_us, now_us - UNSURE_US))
        present = self._kinds(since_us, now_us)
        self._degraded = self._far_worse(present, None)
        recent = self._window.recent(since_us)
        # Nothing is recent after a stall (or a leap of the clock) of more than a minute.
        whole_minute = bool(recent) and recent[-1][0] - recent[0][0] >= SHIFT_SPAN_US * 3 // 4
        if whole_minute and self._far_worse(present, self._path, every=True):
            self._changed(now_us)
            self._yardstick.retire(self._path, Path(self._path.host, f"{self._path.interface}~before-{self._changes}"))
            self._start_window(recent)

    @property
    def degraded(self) -> bool:
        """As of the latest ``refresh``."""
        return self._degraded

    def mark(self, now_us: int) -> LinkMark:
        """The part of this link that can be worth a new row."""
        send, receive = self._bandwidth["send"].view(now_us), self._bandwidth["receive"].view(now_us)
        return LinkMark(
            self.settled(now_us),
            self._degraded,
            self._window.minimum_us,
            None if send is None else send.bytes_per_s,
            None if receive is None else receive.bytes_per_s,
            self._over_tcp,
        )

    def view(self, now_us: int) -> LinkView:
        """Everything at once."""
        rtt = self._window.view()
        best = self._yardstick.minimum()
        return LinkView(
            path=self._path,
            rtt=rtt,
            settled=self.settled(now_us),
            degraded=self._degraded,
            best_path=None if best is None else best[0],
            best_rtt_us=None if best is None else best[1],
            loaded_rtt_us=self._loaded_rtt_us,
            path_changed_us=self._changed_us,
            path_changes=self._changes,
            send=self._bandwidth["send"].view(now_us),
            receive=self._bandwidth["receive"].view(now_us),
            over_tcp=self._over_tcp,
        )

    def best_of(self, host: str) -> int | None:
        """Best RTT ever seen on any path to this remote host."""
        best = self._yardstick.minimum(host)
        return None if best is None else best[1]

    def _changed(self, now_us: int) -> None:
        self._changes += 1
        self._changed_us = now_us
        self._void_bandwidth()

    def _void_bandwidth(self) -> None:
        for estimate in self._bandwidth.values():
            estimate.void()

    def _start_window(self, samples: list[tuple[int, int]] | None = None) -> None:
        self._window = RttWindow()
        self._loaded_rtt_us = None
        self._since_note = 0
        self._degraded = self._degraded and samples is not None
        for at_us, rtt_us in samples or []:
            self._window.add(rtt_us, at_us)

    def _kinds(self, since_us: int, until_us: int) -> dict[bool, list[int]]:
        kinds: dict[bool, list[int]] = {False: [], True: []}
        for at_us, rtt_us in self._window.recent(since_us):
            if at_us <= until_us:
                kinds[any(start <= at_us <= end for start, end in self._loaded)].append(rtt_us)
        return kinds

    def _far_worse(self, present: dict[bool, list[int]], path: Path | None, *, every: bool = False) -> bool:
        """The median (``every``: even the best) of the present samples against the best median of ``path`` or any path.

        Samples under load decide if there are any to compare, else idle ones.
        """
        for loaded in (True, False):
            now, then = median_us(present[loaded]), self._yardstick.reference_us(loaded, path)
            if now is not None and then is not None:
                now = min(present[loaded]) if every else now
                return now >= self._settings.degraded_factor * then and now - then >= DEGRADED_FLOOR_US
        return False


def host_of(address: str) -> str:
    """``host`` of ``host:port`` or ``[v6]:port``; the text itself when it has no port."""
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdigit():
        return address
    return host.strip("[]")
