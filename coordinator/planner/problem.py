"""What the planner is asked: participants, directed edges, a model, a calibration, a request. Frozen and complete.

Units: bytes, microseconds, bytes per second, floating-point operations per second. ``None`` means "not known", which is
never the same as zero. Trust is judged inside the planner (``trust.py``) from the sample counts and ages given here, so
that scenario files and the live mesh are held to one rule.
"""

from dataclasses import dataclass, field
from typing import Literal

from coordinator.model.package import ModelPackage

Objective = Literal["interactive", "throughput", "capacity"]
Policy = Literal["must_meet_target", "best_effort"]
ReturnMode = Literal["require", "allow_fallback"]
Topology = Literal["chain", "star"]
KvCache = Literal["per_lane", "unified"]
EdgeBasis = Literal["measured", "reverse", "coordinator", "unknown"]


@dataclass(frozen=True, slots=True)
class Participant:
    """A node that may take a stage. ``node_id`` is unique within the problem and orders ties."""

    node_id: str
    detected_memory_bytes: int
    operator_cap_bytes: int | None = None
    runtime_headroom_bytes: int | None = None
    """``None`` = ⌈10 %⌉ of detected memory."""
    memory_bandwidth_bytes_per_s: int | None = None
    compute_flops_per_s: int | None = None
    observed_decode_us_per_layer: int | None = None
    observed_decode_samples: int = 0
    observed_decode_age_us: int = 0
    cached_bytes: int | None = None
    missing_bytes: int | None = None
    artifact_transfer: bool = False
    coordinator_rtt_us: int | None = None
    signals_trusted: bool = True
    """False while the node's RTT to the coordinator is not settled: its performance and edges are withheld."""
    bandwidth_source: Literal["measured", "shaped", "spec", "unknown"] = "unknown"
    max_layers: int | None = None
    calibrated_bytes_per_s: int | None = None
    """Bandwidth that its layers were found to get from live runs; stands above the benchmark, whose compute scales along."""


@dataclass(frozen=True, slots=True)
class Edge:
    """A directed link. ``rtt_*`` ages in µs; ``None`` sample counts mean "given by a person, trusted as it is"."""

    source: str
    target: str
    rtt_us: int | None = None
    rtt_samples: int | None = None
    rtt_first_age_us: int | None = None
    rtt_last_age_us: int | None = None
    large_frame_bytes_per_s: int | None = None
    direct_prediction_return_supported: bool = True


@dataclass(frozen=True, slots=True)
class Calibration:
    """An engine's overheads (DESIGN §5). Defaults are the built-in profile ``skippy``. Multipliers are in thousandths."""

    name: str = "skippy"
    per_layer_us: int = 0
    per_stage_us: int = 1_300
    per_hop_us: int = 13_000
    rtt_multiplier_milli: int = 1_000
    return_bytes: int | None = None
    """Payload of the return hop; ``None`` = one activation frame."""
    bandwidth_efficiency_milli: int = 1_000
    kv_touch_us: int = 0
    topology: Topology = "chain"
    tied_output: Literal["head", "last"] = "head"
    """Star: where logits are made when the output layer is the embedding (``readout.py``)."""


@dataclass(frozen=True, slots=True)
class LockedStage:
    """One stage of an operator's exact split, half-open."""

    node_id: str
    layer_start: int
    layer_end: int


@dataclass(frozen=True, slots=True)
class LockedTopology:
    """Checked, then never moved. ``model`` and ``manifest_digest`` must match when given."""

    stages: tuple[LockedStage, ...]
    version: int = 1
    model: str | None = None
    manifest_digest: str | None = None


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Everything an operator or client asks for. Defaults are those of DESIGN §4–6."""

    objective: Objective = "interactive"
    policy: Policy = "best_effort"
    target_decode_tpot_us: int = 33_000
    concurrency: int = 1
    prompt_tokens: int = 512
    output_tokens: int = 128
    prefill_chunk_tokens: int = 256
    minimum_nodes: int = 1
    context_length: int | None = None
    parallel_lanes: int | None = None
    kv_cache: KvCache = "per_lane"
    performance_aware: bool = True
    direct_prediction_return: ReturnMode = "allow_fallback"
    prefer: Literal["speed", "context"] = "speed"
    prefer_cached: bool = False
    objective_tolerance_milli: int = 20
    pin_stage0: str | None = None
    exclude_nodes: frozenset[str] = frozenset()
    require_nodes: frozenset[str] = frozenset()
    locked: LockedTopology | None = None
    search_budget_ms: int = 250
    incumbent: tuple[str, ...] = ()
    """Node order of the running plan, offered to the search as a first candidate; never changes which plan is best."""


@dataclass(frozen=True, slots=True)
class PlanningProblem:
    """The planner's only input. Node and edge order never matter."""

    model: ModelPackage
    participants: tuple[Participant, ...]
    edges: tuple[Edge, ...] = ()
    calibration: Calibration = field(default_factory=Calibration)
    request: PlanRequest = field(default_factory=PlanRequest)
