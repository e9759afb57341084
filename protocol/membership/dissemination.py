"""What still has to be told, and to whom.

Every fact is told ``4·⌈log10(n+1)⌉`` times and then dropped; being told a row that is known already counts as telling it,
which saves half of the messages. The facts told least go first, so fresh news is not starved by old; accusations,
refutations and admissions go before rows. A fact replaces the older fact about the same subject. A peer is told the same thing twice only after everybody
connected was told once. A *quiet* fact, a row that says nothing new but its number, rides along with what is sent anyway
and causes no message of its own. Rows travel whole when they fit a datagram; larger ones are announced by version and fetched by
whoever lacks them, so a big row crosses each link once instead of ``4·log n`` times.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from protocol.ids import NodeId
from protocol.messages import Gossip, RowVersion
from protocol.rows import Accusation, Admission, Refutation, SignedRow

Fact = SignedRow | RowVersion | Accusation | Refutation | Admission

GOSSIP_BUDGET_BYTES = 940
"""What a datagram has left for gossip beside the envelope and the largest carrier message."""
EAGER_ROW_BYTES = 880
"""A signed row up to this size fits a datagram and is pushed whole."""
MAX_FACTS = 8_192
"""Beyond it the fact told most often is dropped; anti-entropy repairs."""


def transmissions(nodes: int) -> int:
    """How often one node repeats a fact in a mesh of ``nodes``."""
    return 4 * math.ceil(math.log10(nodes + 1))


def encoded_bytes(fact: Fact) -> int:
    """Upper bound of the fact's share of an encoded message (ids are at most 64 bytes, integers 9)."""
    match fact:
        case SignedRow():
            return len(fact.payload) + 64 + 28
        case Accusation():
            return len(fact.node_id) + len(fact.accuser) + 80
        case Refutation():
            return len(fact.node_id) + 64 + 80
        case RowVersion():
            return len(fact.node_id) + 60
        case Admission():
            return len(fact.node_id) + len(fact.signer) + len(fact.mesh_id) + len(fact.successor) + 128 + 176


URGENT = ("accusation", "refutation", "admission")
"""Kinds that are told before any row."""
LOOK_AT = 32
"""Facts considered for one message; a longer queue is served over several."""
TOLD_MAX = 4 * 5
"""More than ``transmissions`` ever asks for."""

Subject = tuple[str, str]
"""(kind, what it is about)."""


@dataclass(slots=True)
class _Queued:
    fact: Fact
    size: int
    level: int
    quiet: bool = False
    told: int = 0
    told_to: set[NodeId] = field(default_factory=set)


class GossipQueue:
    """Facts by subject. ``take`` picks for one peer; the caller tells the mesh size and who is connected.

    Facts stand in levels: urgent before rows, told less before told more, and newest first within a level.
    """

    def __init__(self, items_max: int) -> None:
        self._items_max = items_max
        self._queue: dict[Subject, _Queued] = {}
        self._loud = 0
        self._levels: list[dict[Subject, _Queued]] = [{} for _ in range(2 * (TOLD_MAX + 1))]

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def pressing(self) -> bool:
        """Whether anything is worth a message of its own."""
        return self._loud > 0

    def add(self, kind: str, subject: str, fact: Fact, *, told_by: NodeId | None = None, quiet: bool = False) -> None:
        """Queue a fact, in the place of any older fact of the same kind about the same subject.

        What replaces a fact that still presses is not quiet: who was not told the older one gets its news by this one.
        """
        older = self._queue.get((kind, subject))
        quiet = quiet and (older is None or older.quiet)
        self.drop(kind, subject)
        if len(self._queue) >= MAX_FACTS:
            self.drop(*next(key for level in reversed(self._levels) for key in level))
        queued = _Queued(fact, encoded_bytes(fact), 0 if kind in URGENT else TOLD_MAX + 1, quiet)
        if told_by is not None:
            queued.told_to.add(told_by)
        self._queue[kind, subject] = self._levels[queued.level][kind, subject] = queued
        self._loud += not quiet

    def drop(self, kind: str, subject: str) -> None:
        """No longer worth telling."""
        queued = self._queue.pop((kind, subject), None)
        if queued is not None:
            self._loud -= not queued.quiet
            del self._levels[queued.level][kind, subject]

    def heard(self, kind: str, subject: str, peer: NodeId, nodes: int, connected: int) -> None:
        """The peer told just what stands here: it need not be told, and one repetition less is due."""
        queued = self._queue.get((kind, subject))
        if queued is not None and peer not in queued.told_to:
            self._told((kind, subject), peer, transmissions(nodes), connected)

    def clear(self) -> None:
        """Nobody is there to be told; whoever connects gets a digest."""
        self._queue.clear()
        self._loud = 0
        for level in self._levels:
            level.clear()

    def take(
        self, peer: NodeId, nodes: int, connected: int, *, first: Iterable[Fact] = (), budget: int = GOSSIP_BUDGET_BYTES
    ) -> Gossip:
        """Up to ``items_max`` facts for ``peer`` within ``budget`` bytes; ``first`` are sent in any case and not counted."""
        chosen: list[Fact] = list(first)
        if not self._queue:
            return gather(chosen)
        budget -= sum(encoded_bytes(fact) for fact in chosen)
        picked: list[Subject] = []
        for key, queued in islice(self._ranked(), LOOK_AT):
            if len(chosen) >= self._items_max:
                break
            if peer not in queued.told_to and queued.size <= budget:
                chosen.append(queued.fact)
                budget -= queued.size
                picked.append(key)
        for key in picked:
            self._told(key, peer, transmissions(nodes), connected)
        return gather(chosen)

    def _ranked(self) -> Iterator[tuple[Subject, _Queued]]:
        for level in self._levels:
            if level:
                yield from reversed(level.items())

    def _told(self, key: Subject, peer: NodeId, limit: int, connected: int) -> None:
        queued = self._queue[key]
        queued.told += 1
        queued.told_to.add(peer)
        if queued.told >= min(limit, TOLD_MAX):
            self.drop(*key)
            return
        if len(queued.told_to) >= connected:
            queued.told_to.clear()
        del self._levels[queued.level][key]
        queued.level += 1
        self._levels[queued.level][key] = queued


def gather(facts: Iterable[Fact]) -> Gossip:
    """Sort facts into the message's fields."""
    rows: list[SignedRow] = []
    accusations: list[Accusation] = []
    admissions: list[Admission] = []
    refutations: list[Refutation] = []
    versions: list[RowVersion] = []
    for fact in facts:
        match fact:
            case SignedRow():
                rows.append(fact)
            case Accusation():
                accusations.append(fact)
            case Admission():
                admissions.append(fact)
            case Refutation():
                refutations.append(fact)
            case RowVersion():
                versions.append(fact)
    if not (rows or accusations or admissions or refutations or versions):
        return NOTHING
    return Gossip(
        rows=tuple(rows),
        accusations=tuple(accusations),
        admissions=tuple(admissions),
        refutations=tuple(refutations),
        versions=tuple(versions),
    )


NOTHING = Gossip()
