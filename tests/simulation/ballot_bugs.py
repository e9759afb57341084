"""Broken variants of the cores: each is one plausible mistake, planted to show that the checkers bite."""

from typing import Any

from coordinator.assignment.attempt import Attempt
from coordinator.assignment.slot import SlotCoordinator
from coordinator.coordinator import Coordinator
from coordinator.view import SignalQuantiser
from protocol.fencing import PlanEpoch
from protocol.ids import NodeId, Slot
from stage_agent.stage.agent import StageAgent
from stage_agent.stage.effects import Persist, StageEffect
from stage_agent.stage.fence import BallotFence, Refusal
from stage_agent.stage.frames import FlowEpoch, FrameVerdict
from stage_agent.stage.record import SlotRecord
from tests.simulation.ballot_mesh import Variant


class OffByOneFence(BallotFence):
    """Lets the term before the promised one through."""

    def stage(self, record: SlotRecord, ballot: PlanEpoch, plan_hash: str) -> Refusal | None:
        if ballot.term == record.promised.term - 1:
            return None
        return super().stage(record, ballot, plan_hash)


class OffByOneAgent(StageAgent):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments, fence=OffByOneFence())


class HastyAgent(StageAgent):
    """Answers first and writes afterwards."""

    def on_message(self, sender: NodeId, message: Any, now_us: int) -> list[StageEffect]:
        effects = super().on_message(sender, message, now_us)
        return sorted(effects, key=lambda effect: isinstance(effect, Persist))


class EpochlessAgent(StageAgent):
    """Applies any frame while it serves anything."""

    def accept_frame(
        self, slot: Slot, epoch: PlanEpoch, request_id: int, flow: FlowEpoch | None, now_us: int
    ) -> FrameVerdict:
        verdict = super().accept_frame(slot, epoch, request_id, flow, now_us)
        return FrameVerdict("accept", verdict.active) if verdict.outcome != "not_serving" else verdict


class ImpatientAttempt(Attempt):
    """Activates when all but one are ready."""

    def all_ready(self) -> bool:
        return len(self._ready) >= max(1, len(self.nodes) - 1)


class ImpatientSlot(SlotCoordinator):
    attempt_type = ImpatientAttempt


class ImpatientCoordinator(Coordinator):
    slot_type = ImpatientSlot


class RawSignals(SignalQuantiser):
    """Passes every signal on as it is: noise at a bucket's border flips the bucket."""

    def __init__(self) -> None:
        super().__init__(hold_milli=0)


class FlappingSlot(SlotCoordinator):
    quantiser_type = RawSignals


class FlappingCoordinator(Coordinator):
    slot_type = FlappingSlot


BUGS = {
    "a fence that is off by one": (Variant(agent=OffByOneAgent), 1),
    "a promise that is not persisted before the reply": (Variant(agent=HastyAgent), 1),
    "an activation before all are ready": (Variant(coordinator=ImpatientCoordinator), 3),
    "a ballot without the instance and a cloned id": (Variant(blank_instances=True, clones=True), 2),
    "frames accepted without the epoch": (Variant(agent=EpochlessAgent), 3),
    "rows that are resurrected": (Variant(row_is_newer=lambda new, old: new is not old), 5),
    "a hash that flaps": (Variant(coordinator=FlappingCoordinator), 8),
}
"""Name → (variant, the invariant that finds it)."""
