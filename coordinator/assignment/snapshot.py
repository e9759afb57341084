"""What people, API and metrics read of the coordinator."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from coordinator.assignment.effects import Decision, SlotPhase
from coordinator.assignment.slot import SlotCoordinator
from coordinator.planner.plan import Plan, PlanRefused
from protocol.fencing import PlanEpoch
from protocol.ids import Instance, NodeId, Slot, Term


@dataclass(frozen=True, slots=True)
class SlotSnapshot:
    """One slot for people, API and metrics."""

    slot: Slot
    state: SlotPhase
    plan: Plan | None
    ballot: PlanEpoch | None
    generation: int
    """Term of the running ballot; 0 without one."""
    participant_set_hash: str
    nodes: tuple[NodeId, ...]
    routable: bool
    stage0: NodeId | None
    refused: PlanRefused | None
    lost: Mapping[NodeId, str]
    attempt: str
    """Phase of an attempt in flight, empty without one."""
    loaded_bytes: int
    total_bytes: int
    active_since_us: int | None = None
    """Since when this node knows the running plan."""
    instances: Mapping[NodeId, Instance] = field(default_factory=dict)
    left_out: Mapping[NodeId, str] = field(default_factory=dict)
    """Nodes that failed this slot and are backing off, and how."""


@dataclass(frozen=True, slots=True)
class CoordinatorSnapshot:
    """What this node believes about coordination."""

    role: Literal["coordinator", "follower"]
    canonical: NodeId | None
    term: Term
    settled: bool
    left_out: Mapping[NodeId, str]
    slots: tuple[SlotSnapshot, ...]
    decisions: tuple[Decision, ...]


def slot_snapshot(slot: SlotCoordinator, now_us: int, *, settled: bool) -> SlotSnapshot:
    """One slot as it is now."""
    running, attempt = slot.running, slot.attempt
    loaded, total = (0, 0) if attempt is None else attempt.progress
    return SlotSnapshot(
        slot=slot.spec.slot,
        state=phase_of(slot, settled=settled),
        plan=None if running is None else running.plan,
        ballot=None if running is None else running.ballot,
        generation=0 if running is None else running.ballot.term,
        participant_set_hash=slot.participant_hash,
        nodes=() if running is None else running.nodes,
        routable=slot.routable,
        stage0=running.nodes[0] if running is not None and slot.routable else None,
        refused=slot.refused,
        lost=slot.watch.health.lost,
        attempt="" if attempt is None else attempt.phase,
        loaded_bytes=loaded,
        total_bytes=total,
        active_since_us=None if running is None else running.active_since_us,
        instances={} if running is None else {stage.node_id: stage.instance for stage in running.stages},
        left_out=slot.culprits.current(now_us),
    )


def phase_of(slot: SlotCoordinator, *, settled: bool) -> SlotPhase:
    """One word; what serves wins over what is being prepared."""
    if slot.routable:
        return "serving"
    if slot.attempt is not None:
        match slot.attempt.phase:
            case "loading":
                return "loading"
            case "activating":
                return "activating"
            case _:
                return "preparing"
    if slot.running is not None:
        return "degraded"
    if slot.round is not None:
        return "planning"
    if not settled:
        return "settling"
    return "withdrawn" if slot.withdrawn else "idle"
