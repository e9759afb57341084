"""Is an assignment meant for this process, and is it one that could run?"""

from typing import Literal

from protocol.ballots import StageAssignment
from protocol.ids import Instance, NodeId, Slot

Problem = tuple[Literal["wrong_instance", "range_invalid", "draining", "insufficient_memory"], str]


def check_assignment(assignment: StageAssignment, *, slot: Slot, node_id: NodeId, instance: Instance) -> Problem | None:
    """Reason and detail of the refusal, or ``None``. Memory and the model's presence are judged elsewhere."""
    if assignment.node_id != node_id or assignment.instance != instance:
        return ("wrong_instance", "the assignment names another process start")
    if assignment.slot != slot:
        return ("range_invalid", "the assignment names another slot")
    if assignment.layer_start >= assignment.layer_end:
        return ("range_invalid", f"empty range [{assignment.layer_start}, {assignment.layer_end})")
    if not 0 <= assignment.stage_index < assignment.stage_count:
        return ("range_invalid", f"stage {assignment.stage_index} of {assignment.stage_count}")
    if assignment.lanes == 0 or assignment.context_length == 0:
        return ("range_invalid", "no lanes or no context")
    return None
