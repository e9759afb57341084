"""What still has to be told, and to whom.

Every fact is told ``4·⌈log10(n+1)⌉`` times and then dropped; the facts told least go first, so fresh news is not starved
by old. A fact replaces the older fact about the same subject. A peer is told the same thing twice only after everybody
connected was told once. Rows travel whole when they fit a datagram; larger ones are announced by version and fetched by
whoever lacks them, so a big row crosses each link once instead of ``4·log n`` times.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

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
            return len(fact.node_id) + len(fact.signer) + len(fact.mesh_id) + 128 + 160


@dataclass(slots=True)
class _Queued:
    fact: Fact
    size: int
    order: int
    told: int = 0
    told_to: set[NodeId] = field(default_factory=set)


class GossipQueue:
    """Facts by subject. ``take`` picks for one peer; the caller tells the mesh size and who is connected."""

    def __init__(self, items_max: int) -> None:
        self._items_max = items_max
        self._queue: dict[tuple[str, str], _Queued] = {}
        self._order = 0

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, kind: str, subject: str, fact: Fact, *, told_by: NodeId | None = None) -> None:
        """Queue a fact, in the place of any older fact of the same kind about the same subject."""
        self._order += 1
        queued = _Queued(fact, encoded_bytes(fact), self._order)
        if told_by is not None:
            queued.told_to.add(told_by)
        self._queue.pop((kind, subject), None)
        if len(self._queue) >= MAX_FACTS:
            del self._queue[max(self._queue, key=lambda key: self._queue[key].told)]
        self._queue[kind, subject] = queued

    def drop(self, kind: str, subject: str) -> None:
        """No longer worth telling."""
        self._queue.pop((kind, subject), None)

    def clear(self) -> None:
        """Nobody is there to be told; whoever connects gets a digest."""
        self._queue.clear()

    def take(
        self, peer: NodeId, nodes: int, connected: int, *, first: Iterable[Fact] = (), budget: int = GOSSIP_BUDGET_BYTES
    ) -> Gossip:
        """Up to ``items_max`` facts for ``peer`` within ``budget`` bytes; ``first`` are sent in any case and not counted."""
        chosen: list[Fact] = list(first)
        budget -= sum(encoded_bytes(fact) for fact in chosen)
        if not self._queue:
            return gather(chosen)
        limit = transmissions(nodes)
        spent: list[tuple[str, str]] = []
        ranked = sorted(self._queue.items(), key=lambda pair: (pair[1].told, -pair[1].order))
        for key, queued in ranked:
            if len(chosen) >= self._items_max or budget <= 0:
                break
            if peer in queued.told_to or queued.size > budget:
                continue
            chosen.append(queued.fact)
            budget -= queued.size
            queued.told += 1
            queued.told_to.add(peer)
            if len(queued.told_to) >= connected:
                queued.told_to.clear()
            if queued.told >= limit:
                spent.append(key)
        for key in spent:
            del self._queue[key]
        return gather(chosen)


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
