"""What the mesh should serve: one wish per slot, known by every node, turned into what the coordinator core takes.

A wish is a register: the highest version wins, on a tie the larger digest. Every node keeps the wishes it has seen in its
state directory and repeats them in its own row, so a wish ends only by being taken back, never with the node where it was
said. Taking back is a wish too (``removed``).
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from coordinator.assignment.moment import ServedModelSpec
from protocol.errors import ModelError
from protocol.ids import NodeId, Slot
from protocol.messages import PackageOffer
from protocol.rows import NodeRow, ServedModel
from stage_agent.library import LocalModel, ModelLibrary

MAX_SLOTS = 16
"""As many as a row can state, those taken back included."""
ASK_AGAIN_US = 3_000_000
"""A package that nobody sent is asked for again, of another node."""


@dataclass(frozen=True, slots=True)
class WishUpdate:
    """``specs`` is ``None`` when nothing changed; ``ask`` are packages to request, by node; ``news``: publish the row."""

    specs: tuple[ServedModelSpec, ...] | None
    ask: tuple[tuple[NodeId, str], ...]
    news: bool


@dataclass(slots=True)
class Wishes:
    """The wishes this node knows. ``keep`` makes one durable; it raises ``StateError``, and then nothing has changed."""

    library: ModelLibrary
    node_id: NodeId
    keep: Callable[[ServedModel], None]
    specs: tuple[ServedModelSpec, ...] = ()
    """What the coordinator core was last told."""
    _known: dict[Slot, ServedModel] = field(default_factory=dict)
    _last: tuple[tuple[str, str, str, int], ...] | None = None
    _asked: dict[str, int] = field(default_factory=dict)

    def restore(self, wish: ServedModel) -> None:
        """A wish that was kept before the restart."""
        self._known[Slot(wish.slot)] = wish

    def wish(self, slot: Slot, model: LocalModel, priority: int) -> None:
        """``slot`` shall serve ``model``. Raises ``ModelError`` above ``MAX_SLOTS``, ``StateError`` on a full disk."""
        if slot not in self._known and len(self._known) >= MAX_SLOTS:
            raise ModelError(f"{MAX_SLOTS} slots have been used in this mesh: reuse one of them")
        self.library.hold(model)
        digest, source = model.package.digest, str(model.path)
        self._take(ServedModel(slot=slot, source=source, digest=digest, priority=priority, version=self._next(slot)))

    def take_back(self, slot: Slot) -> bool:
        """``slot`` shall serve nothing; whether it was to serve something. Raises ``StateError``."""
        known = self._known.get(slot)
        if known is None or known.removed:
            return False
        self._take(known.model_copy(update={"removed": True, "version": self._next(slot)}))
        return True

    @property
    def known(self) -> tuple[ServedModel, ...]:
        """For the own row, by slot, those taken back included."""
        return tuple(self._known[slot] for slot in sorted(self._known))

    def update(self, rows: tuple[NodeRow, ...], now_us: int) -> WishUpdate:
        """Call with the rows of connected members, as often as they change. Raises ``StateError``."""
        news = self._adopt(rows)
        specs: list[ServedModelSpec] = []
        ask: list[tuple[NodeId, str]] = []
        for wish in self.known:
            package = self.library.package(wish.digest)
            if wish.removed:
                continue
            if package is not None:
                specs.append(ServedModelSpec(Slot(wish.slot), wish.source, package, wish.priority))
            elif now_us - self._asked.get(wish.digest, -ASK_AGAIN_US) >= ASK_AGAIN_US:
                ask += self._ask(wish.digest, rows, now_us)
        key = tuple((spec.slot, spec.source, spec.package.digest, spec.priority) for spec in specs)
        if key == self._last:
            return WishUpdate(None, tuple(ask), news)
        self._last, self.specs = key, tuple(specs)
        return WishUpdate(self.specs, tuple(ask), news)

    def learn(self, offer: PackageOffer) -> bool:
        """A peer's answer; whether something was learnt."""
        return offer.digest in self._asked and self.library.learn(offer.digest, offer.document)

    def _ask(self, digest: str, rows: tuple[NodeRow, ...], now_us: int) -> list[tuple[NodeId, str]]:
        """One node that knows the package, another one each time."""
        knowing = sorted(
            row.node_id
            for row in rows
            if row.node_id != self.node_id and any(model.digest == digest for model in row.models)
        )
        if not knowing:
            return []
        self._asked[digest] = now_us
        return [(NodeId(knowing[now_us // ASK_AGAIN_US % len(knowing)]), digest)]

    def _adopt(self, rows: tuple[NodeRow, ...]) -> bool:
        news = False
        for row in rows:
            for wish in row.serves:
                slot = Slot(wish.slot)
                known = self._known.get(slot)
                if known is None and len(self._known) >= MAX_SLOTS:
                    continue
                if known is None or (wish.version, wish.digest) > (known.version, known.digest):
                    self._take(wish)
                    news = True
        return news

    def _next(self, slot: Slot) -> int:
        known = self._known.get(slot)
        return 1 if known is None else known.version + 1

    def _take(self, wish: ServedModel) -> None:
        self.keep(wish)
        self._known[Slot(wish.slot)] = wish
