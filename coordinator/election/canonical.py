"""Which node should coordinate (PROTOCOL §4). Advice only: a wrong belief is harmless, the agents' fences decide.

The pinned node if it can; else the incumbent, whose ballot is the highest that any connected stage serves; else the
largest *installed* memory class, then the smallest id. Memory classes are powers of two, rounded to the nearest, so that
what firmware reserves does not decide.

A node that flaps is not relied on until it has settled again, unless that would leave no majority: who sees most of the
mesh come back was away itself, never sees its own flaps, and would choose itself, as would everybody after a bad hour.
"""

from collections.abc import Callable

from coordinator.view import ClusterView, MemberFacts
from protocol.fencing import PlanEpoch, epoch_from_wire
from protocol.ids import NodeId


def memory_class(installed_bytes: int) -> int:
    """Exponent of the nearest power of two; 0 for nothing."""
    return (installed_bytes * 4 // 3).bit_length()


def can_coordinate(member: MemberFacts) -> bool:
    """Connected, willing, staying, and not one of two clones."""
    return member.connected and member.row.can_coordinate and member.row.status == "running" and not member.conflict


def serving_ballot(view: ClusterView) -> PlanEpoch | None:
    """The highest ballot that a connected stage serves, over all slots."""
    ballots = [
        epoch_from_wire(fact.active)
        for member in view.connected.values()
        for fact in member.row.stages
        if fact.state == "serving" and fact.active is not None
    ]
    return max(ballots, default=None)


def canonical_coordinator(view: ClusterView, *, counts: Callable[[NodeId], bool], pin: str = "") -> NodeId | None:
    """``counts``: the node has settled enough to be relied on. ``None`` when nobody can coordinate."""
    able = {node_id: member for node_id, member in view.connected.items() if can_coordinate(member)}
    if pin and NodeId(pin) in able:
        return NodeId(pin)
    ballot = serving_ballot(view)
    if ballot is not None and ballot.node_id in able:
        return ballot.node_id
    counted = [node_id for node_id in able if counts(node_id)]
    relied_on = counted if 2 * len(counted) > len(able) else list(able)
    return min(
        relied_on, key=lambda node_id: (-memory_class(able[node_id].row.detected_memory_bytes), node_id), default=None
    )
