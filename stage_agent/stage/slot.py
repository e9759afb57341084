"""One slot of an agent: its durable record and the loads that exist in this process.

A slot holds at most one *serving* and one *staged* load (make before break), plus loads that are *leaving*: told to
unload, their memory still counted until the runtime says it is free. Loads with equal model, range, context and lanes
share weights; shared weights count once.
"""

from dataclasses import dataclass, field, replace
from typing import Literal

from config.cache_types import DEFAULT_CACHE_TYPE
from protocol.ballots import StageAssignment
from protocol.fencing import NO_EPOCH, PlanEpoch, epoch_to_wire
from protocol.ids import Slot
from protocol.rows import StageFact
from stage_agent.stage.effects import LoadFailure
from stage_agent.stage.frames import FrameFence
from stage_agent.stage.record import SlotRecord

Phase = Literal["waiting", "loading", "ready", "serving"]
LoadKey = tuple[str, int, int, int, int, str]


def load_key(assignment: StageAssignment) -> LoadKey:
    """Weights and caches may be kept exactly while this is equal."""
    return (
        assignment.model_digest,
        assignment.layer_start,
        assignment.layer_end,
        assignment.context_length,
        assignment.lanes,
        assignment.cache_type,
    )


@dataclass(slots=True)
class Held:
    """A load in this process. ``weights`` numbers the memory it uses; shared memory has one number."""

    ballot: PlanEpoch
    plan_hash: str
    assignment: StageAssignment
    weights: int
    phase: Phase
    reuse: PlanEpoch | None = None
    loaded_bytes: int = 0
    total_bytes: int = 0
    progress_at_us: int = 0


@dataclass(frozen=True, slots=True)
class Failure:
    """Why the load of ``ballot`` is gone; repeated to whoever asks again."""

    ballot: PlanEpoch
    reason: LoadFailure
    detail: str


@dataclass(slots=True)
class SlotState:
    """Mutable state of one slot; only ``StageAgent`` changes it."""

    slot: Slot
    record: SlotRecord = field(default_factory=SlotRecord)
    serving: Held | None = None
    staged: Held | None = None
    leaving: dict[PlanEpoch, Held] = field(default_factory=dict)
    failure: Failure | None = None
    frames: FrameFence | None = None
    kept_at_us: int = 0
    """Last keepalive, frame or ballot message: the orphan timer counts from here."""
    heard_at_us: int | None = None
    """Last word of the current ballot's coordinator, for stickiness."""
    restarted: bool = False
    """The record says active, but that process is gone."""

    def snapshot(self) -> "SlotState":
        """A copy to go back to if the next record cannot be written."""
        leaving = {ballot: replace(held) for ballot, held in self.leaving.items()}
        serving = None if self.serving is None else replace(self.serving)
        staged = None if self.staged is None else replace(self.staged)
        return replace(self, serving=serving, staged=staged, leaving=leaving)

    def holds(self) -> list[Held]:
        """Everything that occupies or will occupy memory, waiting loads included."""
        held = [item for item in (self.serving, self.staged) if item is not None]
        return held + list(self.leaving.values())

    def find(self, ballot: PlanEpoch) -> Held | None:
        """The load labelled ``ballot``, leaving ones excluded."""
        for item in (self.serving, self.staged):
            if item is not None and item.ballot == ballot:
                return item
        return None

    def reusable(self, assignment: StageAssignment) -> Held | None:
        """A load whose weights the new assignment can share."""
        for item in (self.staged, self.serving):
            if item is not None and item.phase != "waiting" and load_key(item.assignment) == load_key(assignment):
                return item
        return None

    def fact(self) -> StageFact:
        """This agent's own word about the slot, for its row."""
        record, shown = self.record, self.serving or self.staged
        moving = self.staged or self.serving
        return StageFact(
            slot=self.slot,
            state=self._state(),
            promised=None if record.promised == NO_EPOCH else epoch_to_wire(record.promised),
            accepted=None if record.accepted is None else epoch_to_wire(record.accepted.ballot),
            active=None if record.active is None else epoch_to_wire(record.active.ballot),
            plan_hash=None if shown is None else shown.plan_hash,
            model_digest=None if shown is None else shown.assignment.model_digest,
            layer_start=0 if shown is None else shown.assignment.layer_start,
            layer_end=0 if shown is None else shown.assignment.layer_end,
            stage_index=0 if shown is None else shown.assignment.stage_index,
            stage_count=0 if shown is None else shown.assignment.stage_count,
            context_length=0 if shown is None else shown.assignment.context_length,
            lanes=0 if shown is None else shown.assignment.lanes,
            cache_type=DEFAULT_CACHE_TYPE if shown is None else shown.assignment.cache_type,
            required_bytes=0 if shown is None else shown.assignment.required_bytes,
            former=None if shown is None else shown.assignment.former,
            loaded_bytes=0 if moving is None else moving.loaded_bytes,
            total_bytes=0 if moving is None else moving.total_bytes,
            detail=self._detail(),
        )

    def _state(self) -> Literal["idle", "loading", "ready", "serving", "draining", "failed"]:
        if self.serving is not None:
            return "serving"
        if self.staged is not None:
            return "ready" if self.staged.phase == "ready" else "loading"
        if self.leaving:
            return "draining"
        if self.failure is not None or self.record.active is not None:
            return "failed"
        return "idle"

    def _detail(self) -> str:
        if self.failure is not None:
            return f"{self.failure.reason}: {self.failure.detail}"[:512]
        if self.restarted and self.record.active is not None and self.serving is None:
            return "restarted: what was active before is not loaded any more"
        return ""


def memory_bytes(loads: list[Held]) -> int:
    """Bytes of all distinct weights; a shared load counts once, with its largest requirement."""
    by_weights: dict[int, int] = {}
    for item in loads:
        by_weights[item.weights] = max(by_weights.get(item.weights, 0), item.assignment.required_bytes)
    return sum(by_weights.values())
