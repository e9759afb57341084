"""What the stage core asks its driver to do, and what the driver and the runtime tell it.

Effects are carried out strictly in the order given. A ``Persist`` must be durable before the next effect starts; if it
fails, the rest of the list is dropped and ``StageAgent.on_state(available=False)`` is called, which takes the input back.
"""

from dataclasses import dataclass
from typing import Literal

from protocol.ballots import BallotReply, StageAssignment
from protocol.fencing import PlanEpoch
from protocol.ids import NodeId, Slot
from stage_agent.stage.record import SlotRecord


@dataclass(frozen=True, slots=True)
class Persist:
    """Write the slot's record durably, replacing the one before."""

    slot: Slot
    record: SlotRecord


@dataclass(frozen=True, slots=True)
class Reply:
    """Send ``message`` to ``peer`` (which may be this node). Losing it is harmless: coordinators ask again."""

    peer: NodeId
    message: BallotReply


@dataclass(frozen=True, slots=True)
class Load:
    """Start loading; the runtime answers ``LoadProgress`` … ``Loaded`` or ``LoadFailed``.

    ``reuse`` names a load of this slot with equal model, range, context and lanes: its weights and caches should serve
    both labels until one is unloaded; only neighbours differ.
    """

    slot: Slot
    ballot: PlanEpoch
    assignment: StageAssignment
    reuse: PlanEpoch | None = None


@dataclass(frozen=True, slots=True)
class Unload:
    """Stop and free the load labelled ``ballot``; the runtime answers ``Unloaded`` once its memory is free."""

    slot: Slot
    ballot: PlanEpoch


@dataclass(frozen=True, slots=True)
class ActivateRuntime:
    """Serve frames of ``ballot`` from now on. Caches made under another ``cache_epoch`` are meaningless."""

    slot: Slot
    ballot: PlanEpoch
    assignment: StageAssignment
    cache_epoch: int
    first_request_id: int


CountKind = Literal[
    "stale_frame",
    "stale_request",
    "frame_not_serving",
    "ballot_sender_mismatch",
    "ballot_refused",
    "orphaned",
    "runtime_died",
    "load_failed",
    "slots_full",
]


@dataclass(frozen=True, slots=True)
class Count:
    """One more of a bounded set of labels."""

    kind: CountKind


StageEffect = Persist | Reply | Load | Unload | ActivateRuntime | Count


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """``loaded_bytes`` of ``total_bytes`` are there; only growth keeps the coordinator waiting."""

    slot: Slot
    ballot: PlanEpoch
    loaded_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """Ready to serve; nothing is served before ``ActivateRuntime``."""

    slot: Slot
    ballot: PlanEpoch


LoadFailure = Literal["load_failed", "insufficient_memory", "model_mismatch", "range_invalid", "engine_mismatch"]


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """The load labelled ``ballot`` is gone and its memory free."""

    slot: Slot
    ballot: PlanEpoch
    reason: LoadFailure = "load_failed"
    detail: str = ""


@dataclass(frozen=True, slots=True)
class RuntimeDied:
    """A load that was ready or serving is gone and its memory free."""

    slot: Slot
    ballot: PlanEpoch
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Unloaded:
    """The memory of the load labelled ``ballot`` is free."""

    slot: Slot
    ballot: PlanEpoch


RuntimeEvent = LoadProgress | Loaded | LoadFailed | RuntimeDied | Unloaded
