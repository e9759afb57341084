"""Is this node ready: joined, and its stages in the state that the active plan assigns.

Readiness is the agent's own word about its stages compared with the plan it is part of; a node without a stage in any
plan is ready as soon as it is joined. A draining node is not ready: nothing new should be sent to it.
"""

from stage_agent.api.snapshot import NodeSnapshot, SlotView


def not_ready_reasons(snapshot: NodeSnapshot) -> tuple[str, ...]:
    """Why the node is not ready, in words; empty = ready."""
    if not snapshot.joined:
        return (snapshot.status_text or "not joined to a mesh yet",)
    reasons = ["draining"] if snapshot.draining else []
    unlike = (_unlike_assignment(snapshot, slot) for slot in snapshot.slots)
    return (*reasons, *(reason for reason in unlike if reason))


def _unlike_assignment(snapshot: NodeSnapshot, slot: SlotView) -> str | None:
    """How this node's stage of ``slot`` differs from its assignment, if it has one."""
    stages = (slot.plan or {}).get("stages", ())
    mine = next((stage for stage in stages if stage["node_id"] == snapshot.node_id), None)
    fact = next((s.fact for s in snapshot.stages if s.node_id == snapshot.node_id and s.fact.slot == slot.slot), None)
    if fact is not None and fact.state == "failed":
        return f"stage of slot {slot.slot} failed: {fact.detail or 'see the log'}"
    if mine is None or slot.state not in ("loading", "activating", "active", "degraded"):
        return None
    if fact is None:
        return f"stage of slot {slot.slot} is assigned but not begun"
    if fact.state != "serving":
        return f"stage of slot {slot.slot} is {fact.state}, assigned to serve"
    if (fact.layer_start, fact.layer_end) != (mine["layer_start"], mine["layer_end"]):
        return f"stage of slot {slot.slot} holds other layers than assigned"
    return None
