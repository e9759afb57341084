"""What the mesh should serve: the union of all rows' wishes, turned into what the coordinator core takes."""

from dataclasses import dataclass, field

from coordinator.assignment.moment import ServedModelSpec
from protocol.ids import NodeId
from protocol.messages import PackageOffer
from protocol.rows import NodeRow
from stage_agent.library import ModelLibrary, wishes


@dataclass(frozen=True, slots=True)
class WishUpdate:
    """``specs`` is ``None`` when nothing changed; ``ask`` are packages to request, by owner."""

    specs: tuple[ServedModelSpec, ...] | None
    ask: tuple[tuple[NodeId, str], ...]


@dataclass(slots=True)
class Wishes:
    """Remembers what the coordinator was last told, and which packages were asked of whom."""

    library: ModelLibrary
    node_id: NodeId
    specs: tuple[ServedModelSpec, ...] = ()
    """What the coordinator core was last told."""
    _last: tuple[tuple[str, str, str, int], ...] | None = None
    _asked: dict[str, int] = field(default_factory=dict)
    _round: int = 0

    def update(self, rows: tuple[NodeRow, ...]) -> WishUpdate:
        """Call with all rows of connected members, as often as they change. A package is asked for again every 30 calls."""
        self._round += 1
        specs: list[ServedModelSpec] = []
        ask: list[tuple[NodeId, str]] = []
        for slot, (served, row) in wishes(rows).items():
            package = self.library.package(served.digest)
            if package is not None:
                specs.append(ServedModelSpec(slot, served.source, package, served.priority))
            elif row.node_id != self.node_id and self._round - self._asked.get(served.digest, -30) >= 30:
                self._asked[served.digest] = self._round
                ask.append((NodeId(row.node_id), served.digest))
        key = tuple((spec.slot, spec.source, spec.package.digest, spec.priority) for spec in specs)
        if key == self._last:
            return WishUpdate(None, tuple(ask))
        self._last, self.specs = key, tuple(specs)
        return WishUpdate(self.specs, tuple(ask))

    def learn(self, offer: PackageOffer) -> bool:
        """A peer's answer; whether something was learnt."""
        return offer.digest in self._asked and self.library.learn(offer.digest, offer.document)
