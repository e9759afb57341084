"""The agent core: fence first, then the state machine of every slot (PROTOCOL §4, §5).

A slot goes idle → loading → ready → serving → draining → idle; ``failed`` is a load that is gone while somebody counts on
it. Ballots are fenced by ``BallotFence`` against the durable record; every change of the record is a ``Persist`` that
stands *before* the answer or runtime effect that depends on it. Loading never stops what is serving: old and new plan
live side by side when memory allows; when the new one fits only after the old one is gone, it waits until the runtime
reports the memory free.

After a restart the record is restored but nothing is loaded: the slot says ``failed`` until a newer ballot stages it.

Nothing here knows the time, the disk or the engine: those are arguments, effects and events.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final, assert_never

from config.settings import ElectionSettings
from protocol.ballots import (
    Abort,
    Activate,
    BallotMessage,
    Keepalive,
    Nack,
    Prepare,
    Stage,
)
from protocol.fencing import NO_EPOCH, PlanEpoch, epoch_from_wire, epoch_to_wire
from protocol.ids import Instance, NodeId, Slot, Term
from protocol.rows import StageFact
from stage_agent.stage.amnesia import Amnesia
from stage_agent.stage.claims import Claims, refusal_of
from stage_agent.stage.effects import (
    Count,
    Loaded,
    LoadFailed,
    LoadFailure,
    LoadProgress,
    Persist,
    Reply,
    RuntimeDied,
    RuntimeEvent,
    StageEffect,
    Unloaded,
)
from stage_agent.stage.fence import BallotFence
from stage_agent.stage.frames import FlowEpoch, FrameFence, FrameVerdict
from stage_agent.stage.loads import LoadLedger
from stage_agent.stage.record import SlotRecord
from stage_agent.stage.slot import Failure, Held, SlotState

MAX_SLOTS = 16
"""As many as a row can state. At the limit new slots are refused with ``state_unavailable``."""
PROGRESS_INTERVAL_US = 500_000
"""Progress is reported at most this often per load."""


class StageAgent:
    """All slots of one node. Single-threaded; every input returns the effects to carry out, in order."""

    frame_fence_type: type[FrameFence] = FrameFence

    def __init__(
        self,
        *,
        node_id: NodeId,
        instance: Instance,
        restored: Mapping[Slot, SlotRecord],
        usable_memory_bytes: int,
        now_us: int,
        settings: ElectionSettings | None = None,
        fence: BallotFence | None = None,
        keeps_loads: bool = True,
        amnesia: bool = False,
    ) -> None:
        """``keeps_loads``: the engine can serve another plan with the same layers as they are loaded.

        ``amnesia``: the records were lost, see ``stage_agent.stage.amnesia``.
        """
        self._node_id: Final = node_id
        self._instance: Final = instance
        self._settings: Final = settings or ElectionSettings()
        self._slots: dict[Slot, SlotState] = {
            slot: SlotState(slot, record, kept_at_us=now_us, restarted=True) for slot, record in restored.items()
        }
        self._state_available = True
        self._before: dict[Slot, SlotState | None] = {}
        """The slot of the last input as it was before."""
        self._last_event: RuntimeEvent | None = None
        self._unrecorded: list[RuntimeEvent] = []
        self._loads: Final = LoadLedger(self._slots, usable_memory_bytes, keeps_loads=keeps_loads)
        self._claims: Final = Claims(
            node_id=node_id,
            instance=instance,
            loads=self._loads,
            settings=self._settings,
            fence=fence or BallotFence(),
            frame_fence_type=self.frame_fence_type,
        )
        self._amnesia: Final = Amnesia(now_us + self._settings.settle_us) if amnesia else None

    # ------------------------------------------------------------------ what is around

    def on_members(self, alive: frozenset[NodeId], max_term: Term = 0) -> None:
        """Who is connected, and the highest term in their rows.

        A coordinator that is gone does not keep others from campaigning.
        """
        self._claims.alive = alive | {self._node_id}
        if self._amnesia is not None:
            self._amnesia.heard(max_term)

    @property
    def remembers(self) -> bool:
        """The records were never lost, or hold a promise again."""
        return self._amnesia is None or any(state.record.promised != NO_EPOCH for state in self._slots.values())

    def on_memory(self, allocatable_bytes: int) -> None:
        """``allocatable_bytes`` more could be allocated now: others may have taken what was offered to layers.

        What is loaded stays; the next promise tells what is free by this figure, and the next ``Stage`` is judged by it.
        """
        self._loads.on_allocatable(allocatable_bytes)

    def drain(self) -> None:
        """Refuse new stages; what serves goes on until it is retired."""
        self._claims.draining = True

    def resume(self) -> None:
        """Accept stages again."""
        self._claims.draining = False

    def on_state(self, *, available: bool) -> list[StageEffect]:
        """A ``Persist`` failed, or the store may work again.

        On failure (call it before anything else reaches this core) the last input is taken back: its effects behind the
        failed write were not carried out, its answer did not leave, and what served before serves on. Every ballot is
        refused until ``available``; then all records are written again, and events of the runtime that could not be
        recorded are taken up by the next ``on_timer``.
        """
        self._state_available = available
        if available:
            self._before = {}
            return [Persist(slot, state.record) for slot, state in sorted(self._slots.items())]
        for slot, before in self._before.items():
            if before is None:
                del self._slots[slot]
            else:
                self._slots[slot] = before
        if self._last_event is not None:
            self._unrecorded.append(self._last_event)
        self._before, self._last_event = {}, None
        return []

    def _remember(self, slot: Slot, event: RuntimeEvent | None = None) -> None:
        """Before every input: what to go back to."""
        state = self._slots.get(slot)
        self._before = {slot: None if state is None else state.snapshot()}
        self._last_event = event

    # ------------------------------------------------------------------ ballots

    def on_message(self, sender: NodeId, message: BallotMessage, now_us: int) -> list[StageEffect]:
        """A coordinator's word. ``sender`` comes from the handshake, never from the payload."""
        ballot, slot = epoch_from_wire(message.ballot), Slot(message.slot)
        if isinstance(message, Prepare | Stage | Activate | Abort) and sender != ballot.node_id:
            return [Count("ballot_sender_mismatch")]
        self._remember(slot)
        state = self._slots.get(slot)
        if state is None:
            if not isinstance(message, Prepare | Stage):
                return self._unknown_slot(sender, message)
            if len(self._slots) >= MAX_SLOTS:
                return [
                    Count("slots_full"),
                    Reply(sender, refusal_of(message, NO_EPOCH, "state_unavailable", "slots full")),
                ]
            state = self._slots[slot] = SlotState(slot, kept_at_us=now_us)
        refusal = self._unfit_for(state, message, ballot, now_us)
        if refusal is not None:
            return [Count("ballot_refused"), Reply(sender, refusal)]
        effects = self._claims.judge(state, sender, message, ballot, now_us)
        if sender == ballot.node_id:
            if ballot == state.record.current:
                state.heard_at_us = now_us
            if ballot == state.record.promised:
                state.kept_at_us = now_us
        return effects

    def _unfit_for(self, state: SlotState, message: BallotMessage, ballot: PlanEpoch, now_us: int) -> Nack | None:
        """Why this node can promise nothing now, whatever the ballot is worth: no disk, or no memory of what was promised."""
        promised = state.record.promised
        if not self._state_available and not isinstance(message, Keepalive):
            return refusal_of(message, promised, "state_unavailable", "the state is not writable")
        if self._amnesia is not None and isinstance(message, Prepare) and promised == NO_EPOCH:
            lost = self._amnesia.refusal(ballot, now_us)
            return None if lost is None else refusal_of(message, self._amnesia.promised, *lost)
        return None

    def _unknown_slot(self, sender: NodeId, message: BallotMessage) -> list[StageEffect]:
        if isinstance(message, Activate | Keepalive):
            return [
                Count("ballot_refused"),
                Reply(sender, refusal_of(message, NO_EPOCH, "not_accepted", "slot never prepared")),
            ]
        return []

    # ------------------------------------------------------------------ runtime

    def on_runtime(self, event: RuntimeEvent, now_us: int) -> list[StageEffect]:
        """What became of a load. Events of labels that are not held any more are stale and change nothing."""
        if not self._state_available and isinstance(event, LoadFailed):
            self._unrecorded.append(event)
            return []
        self._remember(event.slot, event)
        return self._runtime(event, now_us)

    def _runtime(self, event: RuntimeEvent, now_us: int) -> list[StageEffect]:
        state = self._slots.get(event.slot)
        if state is None:
            return []
        if isinstance(event, Unloaded):
            state.leaving.pop(event.ballot, None)
            return self._loads.start_waiting()
        held = state.find(event.ballot)
        if held is None:
            if isinstance(event, LoadFailed | RuntimeDied):
                state.leaving.pop(event.ballot, None)
                return self._loads.start_waiting()
            return []
        match event:
            case LoadProgress():
                return self._progress(state, held, event, now_us)
            case Loaded():
                if held.phase != "loading":
                    return []
                held.phase, held.loaded_bytes = "ready", held.total_bytes
                return (
                    [self._claims.readiness(state, held)]
                    if self._claims.fence.answers(state.record, held.ballot)
                    else []
                )
            case LoadFailed():
                return [Count("load_failed"), *self._lost(state, held, event.reason, event.detail)]
            case RuntimeDied():
                return [Count("runtime_died"), *self._lost(state, held, "load_failed", event.detail)]
            case _:
                assert_never(event)

    def _progress(self, state: SlotState, held: Held, event: LoadProgress, now_us: int) -> list[StageEffect]:
        held.total_bytes = max(event.total_bytes, held.total_bytes)
        if event.loaded_bytes <= held.loaded_bytes:
            return []
        held.loaded_bytes = event.loaded_bytes
        if held.phase != "loading" or now_us - held.progress_at_us < PROGRESS_INTERVAL_US:
            return []
        held.progress_at_us = now_us
        return [self._claims.readiness(state, held)] if self._claims.fence.answers(state.record, held.ballot) else []

    def _lost(self, state: SlotState, held: Held, reason: LoadFailure, detail: str) -> list[StageEffect]:
        state.failure = Failure(held.ballot, reason, detail[:256])
        if held is state.serving:
            # The record keeps ``active``: this node promised to serve it, and its row now says that it does not.
            state.serving, state.frames = None, None
            return self._loads.start_waiting()
        state.staged = None
        record = state.record
        state.record = replace(record, accepted=None, closed=max(record.closed, held.ballot))
        nack = Nack(
            ballot=epoch_to_wire(held.ballot),
            slot=state.slot,
            claim="stage",
            promised=epoch_to_wire(record.promised),
            reason=reason,
            detail=detail[:512],
        )
        persist = Persist(state.slot, state.record)
        return [persist, Reply(held.ballot.node_id, nack), *self._loads.start_waiting()]

    # ------------------------------------------------------------------ frames and time

    def accept_frame(
        self, slot: Slot, epoch: PlanEpoch, request_id: int, flow: FlowEpoch | None, now_us: int
    ) -> FrameVerdict:
        """May this frame be applied? Refused ones are to be counted by ``outcome`` and answered, never applied."""
        state = self._slots.get(slot)
        if state is None or state.frames is None:
            active = None if state is None or state.record.active is None else state.record.active.ballot
            return FrameVerdict("not_serving", active)
        verdict = state.frames.judge(epoch, request_id, flow)
        if verdict.accepted:
            state.kept_at_us = now_us
        return verdict

    def on_timer(self, now_us: int) -> list[StageEffect]:
        """Orphans: no keepalive and no frame for ``orphan_us`` means that nobody counts on this load any more.

        One record a call, so that a failed write takes back exactly one change.
        """
        if not self._state_available:
            return []
        if self._unrecorded:
            return self.on_runtime(self._unrecorded.pop(0), now_us)
        for slot, state in sorted(self._slots.items()):
            due = self._orphan_at_us(state)
            held = state.record.active or state.record.accepted
            if due is not None and now_us >= due and held is not None:
                self._remember(slot)
                return [Count("orphaned"), *self._claims.close_active(state, held.ballot)]
        return []

    def next_deadline(self) -> int | None:
        """When the first slot becomes an orphan; 0 (at once) while something waits to be recorded.

        Asking means that the effects of the last input are done: it can not be taken back any more.
        """
        self._before = {}
        if not self._state_available:
            return None
        if self._unrecorded:
            return 0
        orphans = (self._orphan_at_us(state) for state in self._slots.values())
        return min((due for due in orphans if due is not None), default=None)

    def _orphan_at_us(self, state: SlotState) -> int | None:
        if state.record.accepted is None and state.record.active is None:
            return None
        return state.kept_at_us + self._settings.orphan_us

    # ------------------------------------------------------------------ what others may read

    def facts(self, now_us: int) -> tuple[StageFact, ...]:
        """One fact per slot, for this node's row. ``now_us`` is reserved for ages of measured timings."""
        assert now_us >= 0
        return tuple(state.fact() for _, state in sorted(self._slots.items()))

    def record(self, slot: Slot) -> SlotRecord:
        """The durable word about ``slot``; an empty record for one never heard of."""
        state = self._slots.get(slot)
        return SlotRecord() if state is None else state.record

    def validate(self) -> None:
        """Invariants 1 and 4 as far as one agent can see them; asserts."""
        for state in self._slots.values():
            state.record.validate()
            if state.serving is not None:
                active = state.record.active
                assert active is not None, state.slot
                assert active.ballot == state.serving.ballot, (active.ballot, state.serving.ballot)
            if state.staged is not None:
                accepted = state.record.accepted
                assert accepted is not None, state.slot
                assert accepted.ballot == state.staged.ballot, (accepted.ballot, state.staged.ballot)
