"""What the planner answers: a ``Plan`` or a ``PlanRefused``. Both are values; ``document()`` is the JSON of INTERFACES."""

from dataclasses import dataclass, field
from typing import Literal

from config.cache_types import DEFAULT_CACHE_TYPE, CacheType
from coordinator.planner.problem import EdgeBasis, Objective

Role = Literal["driver", "embedding", "intermediate", "readout"]
Placement = Literal["performance_aware", "capacity_only", "locked"]
SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """Layers ``[layer_start, layer_end)`` on ``node_id``. ``stage_us`` is ``None`` when not modelled."""

    stage_index: int
    node_id: str
    layer_start: int
    layer_end: int
    roles: tuple[Role, ...]
    parameter_bytes: int
    required_bytes: int
    usable_bytes: int
    stage_us: int | None
    reason_codes: tuple[str, ...] = ()
    slowness_milli: int = 1_000
    """By calibration, how many times as long as its benchmark says the node needs, in thousandths; 1000 = not calibrated."""


@dataclass(frozen=True, slots=True)
class PlannedHop:
    """A directed edge the plan uses. ``hop_us`` is ``None`` when the edge is unknown."""

    source: str
    target: str
    kind: Literal["forward", "return"]
    rtt_us: int | None
    transfer_us: int
    hop_us: int | None
    basis: EdgeBasis


@dataclass(frozen=True, slots=True)
class PlannedBoundary:
    """A cut before ``layer`` and what crosses it per token."""

    layer: int
    decision: Literal["accepted", "rejected"]
    wire_bytes_per_token: int
    reason_codes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Modeled:
    """Predictions of the cost model; ``None`` = not modelled."""

    decode_tpot_us: int | None = None
    network_us_per_token: int | None = None
    pipelined_period_us: int | None = None
    ttft_us: int | None = None
    tokens_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """What was asked for; ``met`` is ``None`` while nothing proves or refutes it."""

    decode_tpot_us: int
    met: bool | None


@dataclass(frozen=True, slots=True)
class SearchCertificate:
    """``proven_optimal``, or ``gap`` = (cost − lower bound) / lower bound; ``None`` when there is no modelled cost."""

    proven_optimal: bool
    gap: float | None
    expanded: int
    elapsed_ms: int


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One line for people, with a stable snake_case ``code`` for programs."""

    severity: Literal["info", "warning", "error"]
    code: str
    message: str

    def __str__(self) -> str:
        return f"[{self.severity}] {self.message}"


@dataclass(frozen=True, slots=True)
class Plan:
    """Ordered stages, contiguous and complete over the model's layers."""

    plan_id: str
    """First 16 hex digits of ``plan_hash``."""
    plan_hash: str
    """SHA-256 over the canonical encoding of what agents are told (model, stages, context, lanes, cache type)."""
    model_name: str
    model_digest: str
    layer_count: int
    participant_set_hash: str
    context_length: int
    parallel_lanes: int
    objective: Objective
    calibration: str
    placement: Placement
    stages: tuple[PlannedStage, ...]
    hops: tuple[PlannedHop, ...]
    boundaries: tuple[PlannedBoundary, ...]
    modeled: Modeled
    target: Target
    search: SearchCertificate
    diagnostics: tuple[Diagnostic, ...] = ()
    cache_type: CacheType = DEFAULT_CACHE_TYPE
    """Of the attention cache: its memory is counted with it, and the engine is told it."""


@dataclass(frozen=True, slots=True)
class PlanRefused:
    """No plan, and why. ``code`` is one of INTERFACES' refusal codes; ``details`` is JSON-ready."""

    code: str
    message: str
    details: dict[str, object] = field(default_factory=dict)
    best_effort: Plan | None = None
    """For ``target_missed``: the plan that would be returned under ``best_effort``."""
