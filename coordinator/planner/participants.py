"""The participant set and its hash (DESIGN §10): when it changes a planning round is due, otherwise none is.

Speeds are quantised on a log scale in 10 % buckets and round-trip times in the classes ≤ 1, 2, 5, 10, 20, 40, 80 … ms,
so that noise inside a bucket changes nothing. Hysteresis at a bucket's border needs memory and belongs to the live
view; it uses the quantising functions of this module.
"""

import hashlib
import json
import math

from coordinator.planner.memory import usable_bytes
from coordinator.planner.problem import Participant, PlanningProblem, PlanRequest
from coordinator.planner.trust import NodeSignals, TrustedSignals, stripped, trusted_signals

BUCKET_RATIO = 1.1
RTT_CLASSES_US = (1_000, 2_000, 5_000, 10_000)
RTT_DOUBLING_FROM_US = 20_000


def log_bucket(value: int | None) -> int | None:
    """Index of the 10 % bucket that holds ``value`` ≥ 1: ⌊log₁.₁ value⌋; 0 for 0, ``None`` for unknown."""
    if value is None:
        return None
    return 0 if value < 1 else 1 + math.floor(math.log(value) / math.log(BUCKET_RATIO) + 1e-9)


def rtt_class(rtt_us: int | None) -> int | None:
    """Upper bound (µs) of the class that holds ``rtt_us``: 1, 2, 5, 10, 20 ms, then doubling; ``None`` for unknown."""
    if rtt_us is None:
        return None
    for bound in RTT_CLASSES_US:
        if rtt_us <= bound:
            return bound
    bound = RTT_DOUBLING_FROM_US
    while rtt_us > bound:
        bound *= 2
    return bound


def participant_set_hash(problem: PlanningProblem) -> str:
    """SHA-256 (hex) of the canonical encoding; independent of the order of nodes and links."""
    aware = problem.request.performance_aware
    if not aware:
        problem = stripped(problem)
    signals = trusted_signals(problem)
    document = {
        "model": problem.model.digest,
        "calibration": problem.calibration.name,
        "policy": _policy(problem.request),
        "participants": sorted(
            (_participant(node, signals, performance_aware=aware) for node in problem.participants),
            key=lambda row: str(row["id"]),
        ),
        "edges": sorted(
            [source, target, rtt_class(edge.rtt_us), log_bucket(edge.large_frame_bytes_per_s)]
            for (source, target), edge in signals.edges.items()
        ),
        "return_refused": sorted(list(pair) for pair in signals.return_refused),
    }
    return hashlib.sha256(json.dumps(document, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _participant(node: Participant, signals: TrustedSignals, *, performance_aware: bool) -> dict[str, object]:
    believed = signals.nodes[node.node_id] if performance_aware else NodeSignals()
    return {
        "id": node.node_id,
        "usable": usable_bytes(node),
        "max_layers": node.max_layers,
        "bandwidth": log_bucket(believed.bandwidth_bytes_per_s),
        "compute": log_bucket(believed.compute_flops_per_s),
        "observed": log_bucket(believed.observed_us_per_layer),
        "rtt": rtt_class(believed.coordinator_rtt_us),
        "withheld": believed.withheld,
        "cached": node.cached_bytes,
        "missing": node.missing_bytes,
        "transfer": node.artifact_transfer,
    }


def _policy(request: PlanRequest) -> dict[str, object]:
    locked = request.locked
    return {
        "objective": request.objective,
        "policy": request.policy,
        "target_us": request.target_decode_tpot_us,
        "concurrency": request.concurrency,
        "minimum_nodes": request.minimum_nodes,
        "context": request.context_length,
        "lanes": request.parallel_lanes,
        "kv_cache": request.kv_cache,
        "performance_aware": request.performance_aware,
        "return": request.direct_prediction_return,
        "prefer": request.prefer,
        "prefer_cached": request.prefer_cached,
        "tolerance": request.objective_tolerance_milli,
        "pin_stage0": request.pin_stage0,
        "exclude": sorted(request.exclude_nodes),
        "require": sorted(request.require_nodes),
        "locked": None
        if locked is None
        else [[stage.node_id, stage.layer_start, stage.layer_end] for stage in locked.stages],
    }
