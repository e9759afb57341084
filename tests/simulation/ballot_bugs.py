"""Broken variants of the cores: each is one plausible mistake, planted to show that the checkers bite."""

from typing import Any

from coordinator.assignment.attempt import Attempt
from coordinator.assignment.effects import Effect, Send
from coordinator.assignment.moment import Moment
from coordinator.assignment.rounds import Conclusion, PlanningRound
from coordinator.assignment.slot import SlotCoordinator
from coordinator.coordinator import Coordinator
from coordinator.planner.plan import Plan
from coordinator.view import SignalQuantiser
from protocol.ballots import Stage
from protocol.fencing import PlanEpoch
from protocol.ids import NodeId
from stage_agent.stage.agent import StageAgent
from stage_agent.stage.effects import ActivateRuntime, Persist, StageEffect, Unload
from stage_agent.stage.fence import BallotFence, Refusal
from stage_agent.stage.frames import FlowEpoch, FrameFence, FrameVerdict
from stage_agent.stage.record import SlotRecord
from tests.simulation.ballot_mesh import Variant


class OffByOneFence(BallotFence):
    """Lets the term before the promised one through."""

    def prepare(self, record: SlotRecord, ballot: PlanEpoch, *, sticky: bool) -> Refusal | None:
        if ballot.term == record.promised.term - 1:
            return None
        return super().prepare(record, ballot, sticky=sticky)

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


class EpochlessFence(FrameFence):
    """Looks at the request epoch in the frame's header and at nothing that says which plan it belongs to."""

    def judge(self, epoch: PlanEpoch, request_id: int, flow: FlowEpoch | None) -> FrameVerdict:
        del epoch  # the mistake
        return super().judge(self._active, max(request_id, self._first_request_id), flow)


class EpochlessAgent(StageAgent):
    frame_fence_type = EpochlessFence


class FlowlessFence(FrameFence):
    """Looks at everything but the request epoch in the frame's header."""

    def judge(self, epoch: PlanEpoch, request_id: int, flow: FlowEpoch | None) -> FrameVerdict:
        del flow  # the mistake
        return super().judge(epoch, request_id, None)


class FlowlessAgent(StageAgent):
    frame_fence_type = FlowlessFence


class ImpatientAttempt(Attempt):
    """Activates when all but one are ready."""

    def all_ready(self) -> bool:
        return len(self._ready) >= max(1, len(self.nodes) - 1)


class ImpatientSlot(SlotCoordinator):
    attempt_type = ImpatientAttempt


class ImpatientCoordinator(Coordinator):
    slot_type = ImpatientSlot


class ShortAttempt(Attempt):
    """The last stage is assigned one layer too few."""

    def _begin_loading(self, now_us: int) -> list[Effect]:
        return [self._shortened(effect) for effect in super()._begin_loading(now_us)]

    def _shortened(self, effect: Effect) -> Effect:
        if not isinstance(effect, Send) or not isinstance(effect.message, Stage):
            return effect
        part = effect.message.assignment
        if part.stage_index < part.stage_count - 1:
            return effect
        less = part.model_copy(update={"layer_end": part.layer_end - 1})
        return Send(effect.peer, effect.message.model_copy(update={"assignment": less}))


class ShortSlot(SlotCoordinator):
    attempt_type = ShortAttempt


class ShortCoordinator(Coordinator):
    slot_type = ShortSlot


class DeafCoordinator(Coordinator):
    """Plans with nodes that an operator excluded."""

    @property
    def _excluded(self) -> frozenset[NodeId]:
        return frozenset()


class HoardingAgent(StageAgent):
    """Serves the new plan and keeps the layers of the old one."""

    def on_message(self, sender: NodeId, message: Any, now_us: int) -> list[StageEffect]:
        effects = super().on_message(sender, message, now_us)
        moves = any(isinstance(effect, ActivateRuntime) for effect in effects)
        return [effect for effect in effects if not (moves and isinstance(effect, Unload))]


class RawSignals(SignalQuantiser):
    """Passes every signal on as it is: noise at a bucket's border flips the bucket."""

    def __init__(self) -> None:
        super().__init__(hold_milli=0)


class FlappingSlot(SlotCoordinator):
    quantiser_type = RawSignals


class FlappingCoordinator(Coordinator):
    slot_type = FlappingSlot


class RememberingSlot(SlotCoordinator):
    """Takes the plan that it made for the same nodes before, whatever their hash is now."""

    def _place(self, concluded: PlanningRound, answer: Conclusion, plan: Plan, moment: Moment) -> list[Effect]:
        self.plans = getattr(self, "plans", {})
        nodes = frozenset(node.node_id for node in concluded.problem.participants)
        return super()._place(concluded, answer, self.plans.setdefault(nodes, plan), moment)


class RememberingCoordinator(Coordinator):
    slot_type = RememberingSlot


BUGS = {
    "a fence that is off by one": (Variant(agent=OffByOneAgent), 1),
    "a promise that is not persisted before the reply": (Variant(agent=HastyAgent), 1),
    "an activation before all are ready": (Variant(coordinator=ImpatientCoordinator), 3),
    "a ballot without the instance and a cloned id": (Variant(blank_instances=True, clones=True), 2),
    "frames accepted without the epoch": (Variant(agent=EpochlessAgent), 4),
    "frames accepted without the request epoch": (Variant(agent=FlowlessAgent), "frames"),
    "rows that are resurrected": (Variant(row_is_newer=lambda new, old: new is not old), "rows"),
    "a hash that flaps": (Variant(coordinator=FlappingCoordinator), 8),
    "a stage of a plan for another participant hash": (Variant(coordinator=RememberingCoordinator), 8),
    "a last stage that is one layer too short": (Variant(coordinator=ShortCoordinator), 9),
    "an exclusion that is not obeyed": (Variant(coordinator=DeafCoordinator), 7),
    "layers of the former plan that are kept": (Variant(agent=HoardingAgent), 4),
}
"""Name → (variant, the invariant that finds it)."""
