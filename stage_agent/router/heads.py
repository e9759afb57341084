"""Who is the head of a slot now: read from the agents' own words, never guessed. Pure."""

from dataclasses import dataclass

from protocol.fencing import PlanEpoch, epoch_from_wire
from stage_agent.api.snapshot import NodeSnapshot


@dataclass(frozen=True, slots=True)
class HeadOf:
    """Stage 0 of the slot's active plan."""

    slot: str
    node_id: str
    epoch: PlanEpoch


def find_head(snapshot: NodeSnapshot, slot: str) -> HeadOf | None:
    """The node that says it serves stage 0 of ``slot``; of several, the one of the newest plan. ``None`` while replanning."""
    living = {member.node_id for member in snapshot.members if member.state in {"alive", "suspect"}}
    heads = [
        HeadOf(slot, view.node_id, epoch_from_wire(view.fact.active))
        for view in snapshot.stages
        if view.fact.slot == slot
        and view.fact.stage_index == 0
        and view.fact.state == "serving"
        and view.fact.active is not None
        and view.node_id in living
    ]
    return max(heads, key=lambda head: head.epoch, default=None)


def choose_slot(snapshot: NodeSnapshot, wanted: object) -> str | None:
    """The slot that a request's ``model`` names; any other name means ``default``, or the only slot."""
    names = _names(snapshot)
    if isinstance(wanted, str) and wanted in names:
        return wanted
    if "default" in names:
        return "default"
    return names[0] if len(names) == 1 else None


def _names(snapshot: NodeSnapshot) -> list[str]:
    return sorted({slot.slot for slot in snapshot.slots} or {view.fact.slot for view in snapshot.stages})
