"""Which memory the plans of several slots need, node by node.

Slots are planned against what the others hold. A slot that has no plan because of that may have the memory of slots with a
lower priority: the least important of them is withdrawn, one at a time, and only when the more important one then fits.
"""

from collections.abc import Iterable

from coordinator.assignment.running import RunningPlan
from coordinator.planner.plan import Plan
from protocol.ids import NodeId


def held_bytes(running: RunningPlan | None, begun: Plan | None) -> dict[NodeId, int]:
    """What a slot's plan, and the one being placed in its stead, need; of a node in both the larger need counts."""
    held = {} if running is None else {stage.node_id: stage.required_bytes for stage in running.stages}
    for stage in () if begun is None else begun.stages:
        node_id = NodeId(stage.node_id)
        held[node_id] = max(held.get(node_id, 0), stage.required_bytes)
    return held


def added(holdings: Iterable[dict[NodeId, int]]) -> dict[NodeId, int]:
    """Several slots together."""
    total: dict[NodeId, int] = {}
    for held in holdings:
        for node_id, size in held.items():
            total[node_id] = total.get(node_id, 0) + size
    return total
