"""A coordinator's word about one slot: the table of PROTOCOL §4, row by row.

Each rule asks the fence first, then checks what only this process can know (instance, memory, drain), then changes the
record and lists the effects: ``Persist`` always before the answer or runtime effect that depends on it.
"""

from dataclasses import replace
from typing import Final, assert_never

from config.settings import ElectionSettings
from protocol.ballots import (
    Abort,
    Activate,
    Active,
    BallotMessage,
    CacheEpoch,
    Keepalive,
    Nack,
    NackReason,
    Prepare,
    Promise,
    Ready,
    Retire,
    Stage,
    StageProgress,
)
from protocol.fencing import NO_EPOCH, PlanEpoch, epoch_from_wire, epoch_to_wire
from protocol.ids import Instance, NodeId
from stage_agent.stage.checks import check_assignment
from stage_agent.stage.effects import ActivateRuntime, Count, Persist, Reply, StageEffect
from stage_agent.stage.fence import BallotFence
from stage_agent.stage.frames import FrameFence
from stage_agent.stage.loads import LoadLedger
from stage_agent.stage.record import HeldPlan
from stage_agent.stage.slot import Held, SlotState


class Claims:
    """Judges ballot messages. Holds no slot state of its own, only what all slots of the process have in common."""

    def __init__(
        self,
        *,
        node_id: NodeId,
        instance: Instance,
        loads: LoadLedger,
        settings: ElectionSettings,
        fence: BallotFence,
        frame_fence_type: type[FrameFence] = FrameFence,
    ) -> None:
        self._node_id: Final = node_id
        self._instance: Final = instance
        self._loads: Final = loads
        self._settings: Final = settings
        self.fence: Final = fence
        self._frame_fence_type: Final = frame_fence_type
        self.alive: frozenset[NodeId] = frozenset({node_id})
        self.draining = False

    def judge(
        self, state: SlotState, sender: NodeId, message: BallotMessage, ballot: PlanEpoch, now_us: int
    ) -> list[StageEffect]:
        """The effects of ``message`` on ``state``; its sender has been checked against the ballot."""
        match message:
            case Prepare():
                return self._prepare(state, sender, message, ballot, now_us)
            case Stage():
                return self._stage(state, sender, message, ballot, now_us)
            case Activate():
                return self._activate(state, sender, message, ballot)
            case Abort():
                return self._abort(state, ballot)
            case Retire():
                return self._retire(state, sender, message, ballot)
            case Keepalive():
                return self._keepalive(state, sender, message, ballot, now_us)
            case _:
                assert_never(message)

    def _prepare(
        self, state: SlotState, sender: NodeId, message: Prepare, ballot: PlanEpoch, now_us: int
    ) -> list[StageEffect]:
        record, wait_us = state.record, self._sticky_for_us(state, ballot, now_us)
        refusal = self.fence.prepare(record, ballot, sticky=wait_us > 0 and not message.force)
        if refusal is not None:
            detail = "newer promise" if refusal == "older_ballot" else "the current coordinator was heard lately"
            nack = refusal_of(message, record.promised, refusal, detail, wait_us if refusal == "sticky" else 0)
            return [Count("ballot_refused"), Reply(sender, nack)]
        effects: list[StageEffect] = []
        if ballot > record.promised:
            state.record = replace(record, promised=ballot)
            effects.append(Persist(state.slot, state.record))
        effects.append(Reply(sender, self._promise(state, ballot)))
        return effects

    def _promise(self, state: SlotState, ballot: PlanEpoch) -> Promise:
        record, (usable, replaceable) = state.record, self._loads.available_to(state)
        return Promise(
            ballot=epoch_to_wire(ballot),
            slot=state.slot,
            instance=self._instance,
            accepted=None if record.accepted is None else epoch_to_wire(record.accepted.ballot),
            accepted_hash=None if record.accepted is None else record.accepted.plan_hash,
            active=None if record.active is None else epoch_to_wire(record.active.ballot),
            active_hash=None if record.active is None else record.active.plan_hash,
            usable_memory_bytes=usable,
            replaceable_bytes=replaceable,
            cache_epoch=CacheEpoch(value=record.cache_epoch),
            keeps_loads=self._loads.keeps_loads,
        )

    def _sticky_for_us(self, state: SlotState, ballot: PlanEpoch, now_us: int) -> int:
        """How long the current ballot's coordinator still keeps others out; 0 = not at all."""
        current = state.record.current
        if current == NO_EPOCH or current.node_id == ballot.node_id or current.node_id not in self.alive:
            return 0
        if state.heard_at_us is None:
            return 0
        return max(0, state.heard_at_us + self._settings.sticky_us - now_us)

    def _stage(
        self, state: SlotState, sender: NodeId, message: Stage, ballot: PlanEpoch, now_us: int
    ) -> list[StageEffect]:
        record, assignment = state.record, message.assignment
        refusal = self.fence.stage(record, ballot, message.plan_hash)
        if refusal is not None:
            return self._refuse_stage(state, sender, message, ballot, refusal)
        held = state.find(ballot)
        if held is not None:
            return [self.readiness(state, held)]
        if state.failure is not None and state.failure.ballot == ballot:
            return self._refuse_stage(state, sender, message, ballot, "older_ballot")
        problem = check_assignment(assignment, slot=state.slot, node_id=self._node_id, instance=self._instance)
        if self.draining:
            problem = ("draining", "this node takes no new stages")
        shortage = self._loads.shortage(state, assignment)
        if problem is None and shortage is not None:
            problem = ("insufficient_memory", shortage)
        if problem is not None:
            return [Count("ballot_refused"), Reply(sender, refusal_of(message, record.promised, *problem))]
        state.record = replace(record, promised=ballot, accepted=HeldPlan(ballot, message.plan_hash, assignment))
        effects: list[StageEffect] = [Persist(state.slot, state.record)]
        effects += self._loads.stage(state, ballot, message.plan_hash, assignment, now_us)
        assert state.staged is not None
        return [*effects, self.readiness(state, state.staged)]

    def _refuse_stage(
        self, state: SlotState, sender: NodeId, message: Stage, ballot: PlanEpoch, refusal: NackReason
    ) -> list[StageEffect]:
        promised, failure = state.record.promised, state.failure
        if failure is not None and failure.ballot == ballot:
            nack = refusal_of(message, promised, failure.reason, failure.detail)
        else:
            detail = "this ballot was closed here" if ballot <= state.record.closed else ""
            nack = refusal_of(message, promised, refusal, detail)
        return [Count("ballot_refused"), Reply(sender, nack)]

    def readiness(self, state: SlotState, held: Held) -> StageEffect:
        """What the load's coordinator should hear now: ``Ready`` or ``StageProgress``."""
        ballot, coordinator = epoch_to_wire(held.ballot), held.ballot.node_id
        if held.phase in {"ready", "serving"}:
            ready = Ready(ballot=ballot, slot=state.slot, plan_hash=held.plan_hash, instance=self._instance)
            return Reply(coordinator, ready)
        progress = StageProgress(
            ballot=ballot, slot=state.slot, loaded_bytes=held.loaded_bytes, total_bytes=held.total_bytes
        )
        return Reply(coordinator, progress)

    def _activate(self, state: SlotState, sender: NodeId, message: Activate, ballot: PlanEpoch) -> list[StageEffect]:
        record, mine = state.record, message.instance == self._instance
        active = Active(ballot=message.ballot, slot=state.slot, plan_hash=message.plan_hash, instance=self._instance)
        serving = state.serving
        again = serving is not None and serving.ballot == ballot and serving.plan_hash == message.plan_hash
        if again and mine and self.fence.answers(record, ballot):
            return [Reply(sender, active)]
        refusal = self.fence.activate(record, ballot, message.plan_hash, instance_is_mine=mine)
        staged = state.staged
        if refusal is None and (staged is None or staged.ballot != ballot or staged.phase != "ready"):
            refusal = "not_accepted"
        if refusal is not None:
            return [Count("ballot_refused"), Reply(sender, refusal_of(message, record.promised, refusal))]
        assert staged is not None
        warm = serving is not None and serving.weights == staged.weights
        cache_epoch = max(staged.assignment.cache_epoch.value, record.cache_epoch + (0 if warm else 1))
        state.record = replace(
            record,
            accepted=None,
            active=HeldPlan(ballot, staged.plan_hash, staged.assignment),
            last_active=ballot,
            cache_epoch=cache_epoch,
            first_request_id=max(record.first_request_id, staged.assignment.first_request_id),
        )
        staged.phase, state.serving, state.staged, state.restarted = "serving", staged, None, False
        state.frames = self._frame_fence_type(ballot, state.record.first_request_id)
        effects: list[StageEffect] = [
            Persist(state.slot, state.record),
            ActivateRuntime(state.slot, ballot, staged.assignment, cache_epoch, state.record.first_request_id),
        ]
        if serving is not None:
            effects += self._loads.release(state, serving)
        return [*effects, Reply(sender, active)]

    def _abort(self, state: SlotState, ballot: PlanEpoch) -> list[StageEffect]:
        record = state.record
        active_here = record.active is not None and record.active.ballot == ballot
        if ballot > record.promised or ballot <= record.closed or active_here:
            return []
        accepted = record.accepted
        keep = accepted is None or accepted.ballot > ballot
        state.record = replace(record, accepted=accepted if keep else None, closed=ballot)
        effects: list[StageEffect] = [Persist(state.slot, state.record)]
        if state.staged is not None and state.staged.ballot <= ballot:
            released, state.staged = state.staged, None
            effects += self._loads.release(state, released)
        return effects + self._loads.start_waiting()

    def _retire(self, state: SlotState, sender: NodeId, message: Retire, ballot: PlanEpoch) -> list[StageEffect]:
        newer = message.superseded_by is not None and epoch_from_wire(message.superseded_by) > ballot
        if sender != ballot.node_id and not newer:
            return [Count("ballot_sender_mismatch")]
        return self.close_active(state, ballot)

    def close_active(self, state: SlotState, ballot: PlanEpoch) -> list[StageEffect]:
        """Stop serving ``ballot`` for good; also forgets it when it was only accepted."""
        record = state.record
        if record.active is None or record.active.ballot != ballot:
            return self._abort(state, ballot)
        state.record = replace(record, active=None, closed=max(record.closed, ballot))
        state.frames = None
        effects: list[StageEffect] = [Persist(state.slot, state.record)]
        if state.serving is not None:
            released, state.serving = state.serving, None
            effects += self._loads.release(state, released)
        if state.failure is not None and state.failure.ballot == ballot:
            state.failure = None
        return effects + self._loads.start_waiting()

    def _keepalive(
        self, state: SlotState, sender: NodeId, message: Keepalive, ballot: PlanEpoch, now_us: int
    ) -> list[StageEffect]:
        record = state.record
        known = [held.ballot for held in (record.accepted, record.active) if held is not None]
        if ballot not in known and ballot != record.promised:
            reason: NackReason = "older_ballot" if ballot < record.promised else "not_accepted"
            return [Reply(sender, refusal_of(message, record.promised, reason))]
        state.kept_at_us = now_us
        serving = state.serving
        if record.active is not None and record.active.ballot == ballot and serving is None:
            return [Reply(sender, refusal_of(message, record.promised, "wrong_instance", "not loaded in this process"))]
        return []


def refusal_of(
    message: BallotMessage, promised: PlanEpoch, reason: NackReason, detail: str = "", wait_us: int = 0
) -> Nack:
    """A refusal that explains itself: which claim, what was promised instead, how long to wait."""
    return Nack(
        ballot=message.ballot,
        slot=message.slot,
        claim=message.type,
        promised=epoch_to_wire(promised),
        reason=reason,
        detail=detail[:512],
        retry_after_us=wait_us,
    )
