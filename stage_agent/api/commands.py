"""What the API may ask of the node. Commands are values; the driver's ``CommandSink`` turns them into core inputs.

Each is the validated body of one ``POST``: unknown keys are refused, everything is bounded.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

from coordinator.calibrated import MOST_BYTES_PER_S, MOST_HOP_US, MOST_MULTIPLIER_MILLI
from protocol.orders import MAX_LOCKED_STAGES

SlotName = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.\-]+$")]
NodeRef = Annotated[str, Field(max_length=64, pattern=r"^[a-zA-Z0-9_.\-]*$")]
"""A node by id, unique id prefix, or unique name; empty where that means "none"."""


class Command(BaseModel):
    """Base: frozen, strict, closed."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class PreviewPlan(Command):
    """Plan over the live mesh without placing anything. Empty ``model`` = what ``slot`` serves."""

    model: str = Field(default="", max_length=1024)
    slot: SlotName = "default"
    objective: Literal["interactive", "throughput", "capacity"] | None = None
    policy: Literal["must_meet_target", "best_effort"] | None = None
    target_decode_tpot_ms: float | None = Field(default=None, gt=0, le=1e9)
    concurrency: int | None = Field(default=None, ge=1, le=65_536)
    context_length: int | None = Field(default=None, ge=1, le=2**32)
    parallel_lanes: int | None = Field(default=None, ge=1, le=1024)
    performance_aware: bool | None = None
    exclude_nodes: tuple[NodeRef, ...] = Field(default=(), max_length=1024)
    pin_stage0: NodeRef = ""


class ExplainPlan(Command):
    """Why the active plan of ``slot`` is as it is: the document of ``stagemesh explain --json``."""

    slot: SlotName = "default"


class ServeModel(Command):
    """The mesh should place ``model`` (a path on this node, a layer package, or an alias) in ``slot``."""

    model: str = Field(min_length=1, max_length=1024)
    slot: SlotName = "default"
    priority: int = Field(default=0, ge=0, le=1_000_000)


class UnserveModel(Command):
    """The mesh should not serve ``slot`` any more."""

    slot: SlotName = "default"


class Drain(Command):
    """Take this node out of planning gently; its stages go on until the mesh has replanned."""


class Resume(Command):
    """Take part in planning again."""


class Leave(Command):
    """Drain, say goodbye to the mesh and end the daemon."""


class Revoke(Command):
    """Expel a node for good: its identity is refused everywhere from now on."""

    node: NodeRef = Field(min_length=1)


class RotateKey(Command):
    """Give this node a new key and id; the old key is worth nothing afterwards."""


class Generate(Command):
    """Run token ids through the placed stages with the verification engine; stage 0's node answers."""

    slot: SlotName = "default"
    prompt: tuple[Annotated[int, Field(ge=0, le=2**31)], ...] = Field(min_length=1, max_length=4096)
    max_tokens: int = Field(default=32, ge=1, le=4096)


class Pin(Command):
    """Bind stage 0, the coordinator, or both to a node; an empty text takes that pin away, ``None`` leaves it."""

    stage0: NodeRef | None = None
    coordinator: NodeRef | None = None


class Exclude(Command):
    """Plan without ``add``; plan with ``remove`` again."""

    add: tuple[NodeRef, ...] = Field(default=(), max_length=1024)
    remove: tuple[NodeRef, ...] = Field(default=(), max_length=1024)


class SetPolicy(Command):
    """Change what all plans of the mesh aim for; ``None`` leaves a value, ``reset`` first takes all orders back."""

    reset: bool = False
    objective: Literal["interactive", "throughput", "capacity"] | None = None
    policy: Literal["must_meet_target", "best_effort"] | None = None
    target_decode_tpot_ms: float | None = Field(default=None, gt=0, le=1e9)
    concurrency: int | None = Field(default=None, ge=1, le=65_536)
    performance_aware: bool | None = None


class FoundSpeed(Command):
    """What the layers on ``node`` get, as live runs say."""

    node: NodeRef
    bytes_per_s: int = Field(ge=1, le=MOST_BYTES_PER_S)


class FoundHops(Command):
    """What a hop costs with the engine of ``profile``, as live runs say."""

    profile: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.\-]+$")]
    rtt_multiplier_milli: int = Field(ge=0, le=MOST_MULTIPLIER_MILLI)
    per_hop_us: int = Field(ge=0, le=MOST_HOP_US)


class ApplyCalibration(Command):
    """Plan by what live runs say, over benchmarks and profile; ``reset`` first takes back what was said before."""

    reset: bool = False
    speeds: tuple[FoundSpeed, ...] = Field(default=(), max_length=64)
    hops: FoundHops | None = None


class LockedRange(Command):
    """One stage of an exact split, half-open."""

    node: Annotated[str, Field(min_length=1, max_length=64)]
    layer_start: int = Field(ge=0, le=65_536)
    layer_end: int = Field(ge=1, le=65_536)


class LockTopology(Command):
    """Hold ``slot`` on exactly these stages; an empty list unlocks it."""

    slot: SlotName = "default"
    version: Literal[1] = 1
    model: str | None = Field(default=None, max_length=256)
    manifest_digest: str | None = Field(default=None, max_length=128)
    stages: tuple[LockedRange, ...] = Field(default=(), max_length=MAX_LOCKED_STAGES)


AnyCommand = (
    PreviewPlan
    | ExplainPlan
    | ServeModel
    | UnserveModel
    | Drain
    | Resume
    | Leave
    | Revoke
    | RotateKey
    | Generate
    | Pin
    | Exclude
    | SetPolicy
    | LockTopology
    | ApplyCalibration
)


@dataclass(frozen=True, slots=True)
class Accepted:
    """Done or begun; ``document`` is the answer (for ``PreviewPlan`` the plan itself)."""

    document: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Refused:
    """Not done, state unchanged. ``code`` is stable snake_case, ``message`` one sentence with what to do."""

    code: str
    message: str
    details: dict[str, Any] = field(default_factory=dict)
    status: int = 409


class CommandSink(Protocol):
    """Where the API's writes go."""

    async def submit(self, command: AnyCommand) -> Accepted | Refused:
        """Carry out ``command`` or say why not; returns within seconds and does not raise for a refusal."""
        ...
