"""Ballot messages: how a coordinator places a plan on agents, and what they answer (PROTOCOL §4)."""

from typing import Annotated, Literal

from pydantic import Field

from config.cache_types import DEFAULT_CACHE_TYPE, CacheType
from protocol.wire import Bytes, Count, Digest, Epoch, Id, InstanceId, Label, Micros, Text, Wire

NackReason = Literal[
    "older_ballot",
    "sticky",
    "other_plan_accepted",
    "wrong_instance",
    "not_accepted",
    "insufficient_memory",
    "model_mismatch",
    "range_invalid",
    "engine_mismatch",
    "load_failed",
    "draining",
    "state_unavailable",
]


class ArtifactRef(Wire):
    """A content-addressed piece of the model."""

    path: Annotated[str, Field(max_length=512)]
    sha256: Digest
    size_bytes: Bytes


class CacheEpoch(Wire):
    """``value`` (u32): caches made under another value are meaningless."""

    value: Annotated[int, Field(ge=0, le=2**32 - 1)]


class StageShare(Wire):
    """Who holds which layers of a plan: half-open range, and the bytes of its weights."""

    node_id: Id
    layer_start: Count
    layer_end: Count
    parameter_bytes: Bytes = 0


class FormerSplit(Wire):
    """What a cut move by measured timings replaced: the ends of the same nodes' ranges, and what a token took then."""

    layer_ends: Annotated[tuple[Count, ...], Field(min_length=1, max_length=1024)]
    tpot_us: Micros


class StageAssignment(Wire):
    """One stage of a plan as its agent gets it."""

    slot: Id
    stage_index: Count
    stage_count: Count
    node_id: Id
    instance: InstanceId
    model_digest: Digest
    model_source: Annotated[str, Field(max_length=1024)]
    layer_start: Count
    layer_end: Count
    roles: Annotated[tuple[Literal["driver", "embedding", "intermediate", "readout"], ...], Field(max_length=4)]
    required_bytes: Bytes
    parameter_bytes: Bytes
    context_length: Count
    lanes: Count
    cache_type: CacheType = DEFAULT_CACHE_TYPE
    """Of the attention cache, in every stage; ``required_bytes`` counts with it."""
    previous: Annotated[str, Field(max_length=64)] = ""
    next: Annotated[str, Field(max_length=64)] = ""
    driver: Annotated[str, Field(max_length=64)] = ""
    cache_epoch: CacheEpoch = CacheEpoch(value=0)
    first_request_id: Count = 0
    calibration: Label = ""
    load_deadline_us: Micros = 60_000_000
    artifacts: Annotated[tuple[ArtifactRef, ...], Field(max_length=4096)] = ()
    stages: Annotated[tuple[StageShare, ...], Field(max_length=1024)] = ()
    """All stages of the plan in order, for engines whose first stage drives the others."""
    former: FormerSplit | None = None
    """Stage 0 only, and only after a cut was moved: kept and told in its row, so that any coordinator can go back."""


class Prepare(Wire):
    """May I stage a plan at ``ballot``? Never stops serving."""

    type: Literal["prepare"] = "prepare"
    ballot: Epoch
    slot: Id
    participant_set_hash: Digest
    force: bool = False


class Promise(Wire):
    """Yes, and here is what I hold. ``promised`` was durable before this left."""

    type: Literal["promise"] = "promise"
    ballot: Epoch
    slot: Id
    instance: InstanceId
    accepted: Epoch | None = None
    accepted_hash: Digest | None = None
    active: Epoch | None = None
    active_hash: Digest | None = None
    usable_memory_bytes: Bytes = 0
    """What this slot may use when everything that this agent holds now, this slot's active plan included, stays."""
    replaceable_bytes: Bytes = 0
    """What retiring this slot's active plan would add to that."""
    cache_epoch: CacheEpoch = CacheEpoch(value=0)
    keeps_loads: bool = True
    """A load serves another plan with the same layers, context and lanes as it is; else it is loaded a second time."""


class Nack(Wire):
    """No, because: which claim is refused, what I promised instead, and how long to wait."""

    type: Literal["nack"] = "nack"
    ballot: Epoch
    slot: Id
    claim: Literal["prepare", "stage", "activate", "abort", "keepalive", "retire"]
    promised: Epoch
    reason: NackReason
    detail: Text = ""
    retry_after_us: Micros = 0


class Stage(Wire):
    """Load this, but do not serve it yet. ``participants`` are all agents of the plan."""

    type: Literal["stage"] = "stage"
    ballot: Epoch
    slot: Id
    plan_hash: Digest
    assignment: StageAssignment
    participants: Annotated[tuple[Id, ...], Field(max_length=1024)] = ()


class StageProgress(Wire):
    """Loading goes on; resets the coordinator's load deadline only while bytes grow."""

    type: Literal["stage_progress"] = "stage_progress"
    ballot: Epoch
    slot: Id
    loaded_bytes: Bytes
    total_bytes: Bytes


class Ready(Wire):
    """Loaded and able to serve ``plan_hash`` at ``ballot``; holds for this ``instance`` only."""

    type: Literal["ready"] = "ready"
    ballot: Epoch
    slot: Id
    plan_hash: Digest
    instance: InstanceId


class Activate(Wire):
    """Serve. Sent only after ``Ready`` from all participants, last stage first, stage 0 last."""

    type: Literal["activate"] = "activate"
    ballot: Epoch
    slot: Id
    plan_hash: Digest
    instance: InstanceId


class Active(Wire):
    """Serving at ``ballot``; durable before this left."""

    type: Literal["active"] = "active"
    ballot: Epoch
    slot: Id
    plan_hash: Digest
    instance: InstanceId


class Abort(Wire):
    """Forget what was accepted at ``ballot``; the promise and the active plan stay. Only its own coordinator may say so."""

    type: Literal["abort"] = "abort"
    ballot: Epoch
    slot: Id
    reason: Text = ""


class Retire(Wire):
    """Unload what is active at ``ballot``: the model is not served any more, or this agent is not in the new plan.

    What was only accepted at it is forgotten as by ``Abort``. Obeyed from the ballot's own coordinator, or from one that
    names a newer ballot in ``superseded_by``.
    """

    type: Literal["retire"] = "retire"
    ballot: Epoch
    slot: Id
    superseded_by: Epoch | None = None
    reason: Text = ""


class Keepalive(Wire):
    """The coordinator of ``ballot`` lives; resets the orphan timer and nothing else."""

    type: Literal["keepalive"] = "keepalive"
    ballot: Epoch
    slot: Id


class PublishedPlan(Wire):
    """The coordinator's plan for people and metrics, as the JSON of ``plan --json``. Never used to decide anything."""

    type: Literal["published_plan"] = "published_plan"
    ballot: Epoch
    slot: Id
    generation: Count
    state: Label
    document: Annotated[bytes, Field(max_length=524_288)]


BallotMessage = Prepare | Stage | Activate | Abort | Retire | Keepalive
"""From a coordinator to an agent."""

BallotReply = Promise | Nack | StageProgress | Ready | Active
"""From an agent to a coordinator."""
