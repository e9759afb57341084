"""When this node's next row goes out: on news, on material change of a link or label, and to refresh.

Rows for links and labels are spaced by a second per 16 nodes: in a starting mesh every link settles at its own moment, and
each row costs every node a fetch. For RTTs that only drifted they are half a refresh apart.
"""

from protocol.membership.conditions import Conditions, in_conflict
from protocol.membership.ground import Ground
from protocol.membership.news import is_news
from protocol.membership.own import OwnRow
from protocol.membership.prober import Prober
from protocol.membership.records import Records

TICK_US = 1_000_000
TICK_NODES = 64
"""Above this many nodes links are looked at proportionally more rarely."""


class Issuer:
    """Timers ``links`` (look for material changes) and ``refresh``."""

    def __init__(self, ground: Ground, own: OwnRow, prober: Prober, records: Records) -> None:
        self._ground = ground
        self._own = own
        self._prober = prober
        self._records = records
        self._labels: tuple[str, ...] = ()
        self.conditions = Conditions()

    @property
    def in_conflict_us(self) -> int | None:
        """When this node last saw another process with its own identity."""
        return self._records.conflict_us

    def issue(self, now_us: int, *, status: str | None = None) -> None:
        """Number, sign and spread the row as of now."""
        ground = self._ground
        links = ground.links.publish(now_us, self._prober.pace.is_sampled)
        self._labels = self._present_labels(now_us)
        coordinate = None if ground.everyone_connects else ground.vivaldi.coordinate()
        before = self._own.row
        signed = self._own.issue(links, coordinate, self._labels, now_us, status=status)
        if signed is None or self._own.row is None:
            return
        quiet = before is not None and not is_news(before, self._own.row)
        ground.spread_row(signed, ground.node_id, self._own.version, told_by=None, quiet=quiet)
        refresh_us = ground.row_refresh_us
        ground.timers.set("refresh", "", now_us + refresh_us * 9 // 10 + ground.jitter(refresh_us // 10))
        ground.wake_push(now_us)

    def tick(self, now_us: int) -> None:
        """Look at links and labels; issue if it is worth it."""
        ground = self._ground
        ground.timers.set("links", "", ground.at_beat(now_us + TICK_US * max(1, ground.nodes // TICK_NODES)))
        if not ground.everyone_connects:
            self._prober.pace.measure_nearest()
        change = ground.links.refresh(now_us, self._prober.pace.is_sampled)
        ground.table.revision += change == "material"
        pressing = change == "material" or self._present_labels(now_us) != self._labels
        spacing_us = max(TICK_US, ground.nodes * TICK_US // 16) if pressing else ground.row_refresh_us // 2
        if now_us - self._own.issued_us >= spacing_us and (pressing or change == "drift"):
            self.issue(now_us)

    def _present_labels(self, now_us: int) -> tuple[str, ...]:
        return self.conditions.labels(
            now_us,
            blocked=bool(self._prober.blocked) or any(each.over_tcp for each in self._ground.connections.values()),
            degraded=self._ground.links.degraded,
            conflict=in_conflict(self._records.conflict_us, self._ground.row_refresh_us, now_us),
        )
