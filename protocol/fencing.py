"""The one total order of ballots.

A ballot *is* the plan epoch: whoever campaigns picks ``(term, node_id, instance)`` and every stage, activation and
frame that follows carries it. Two ballots are equal only if the same process start of the same node used the same term,
so a clone of a node or a restarted coordinator can never be mistaken for the one that was promised.
"""

from typing import NamedTuple

from protocol.ids import Instance, NodeId, Term
from protocol.wire import Epoch


class PlanEpoch(NamedTuple):
    """A ballot, ordered lexicographically (the tuple order *is* the protocol's order).

    ``term`` ≥ 1 for real ballots; ``NO_EPOCH`` (term 0, empty ids) sorts below all of them.
    """

    term: Term
    node_id: NodeId
    instance: Instance

    def __str__(self) -> str:
        """``term/node/instance`` shortened for people."""
        return f"{self.term}/{self.node_id[:8]}/{self.instance[:8]}"


NO_EPOCH = PlanEpoch(0, NodeId(""), Instance(""))
"""Promised before anything was promised."""


def next_term(last_used: Term, *seen: Term) -> Term:
    """``1 + max(last used, every term seen)``: the only way a term is chosen. Persist before use."""
    return 1 + max((last_used, *seen))


def epoch_from_wire(epoch: Epoch) -> PlanEpoch:
    """A validated wire epoch in the form that is compared."""
    return PlanEpoch(epoch.term, NodeId(epoch.node_id), Instance(epoch.instance))


def epoch_to_wire(epoch: PlanEpoch) -> Epoch:
    """The form that travels; ``NO_EPOCH`` is allowed."""
    return Epoch(term=epoch.term, node_id=epoch.node_id, instance=epoch.instance)
