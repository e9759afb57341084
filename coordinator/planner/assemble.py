"""From a chosen placement to the ``Plan`` that everybody reads: roles, reasons, boundaries, diagnostics, identity."""

import hashlib
import json

from config.cache_types import DEFAULT_CACHE_TYPE, CacheType
from coordinator.planner.diagnostics import diagnostics_of
from coordinator.planner.evaluate import Evaluation, evaluate
from coordinator.planner.instance import Candidate, Instance
from coordinator.planner.memory import ShapeMemory, parameter_bytes
from coordinator.planner.participants import participant_set_hash
from coordinator.planner.plan import (
    Placement,
    Plan,
    PlannedBoundary,
    PlannedStage,
    Role,
    SearchCertificate,
    Target,
)

BASIS_REASONS = {
    "measured": "edge_measured",
    "reverse": "edge_from_reverse",
    "coordinator": "edge_from_coordinator_rtt",
    "unknown": "edge_unknown",
}


def assemble(
    instance: Instance,
    candidate: Candidate,
    placement: Placement,
    search: SearchCertificate,
    participant_hash: str = "",
) -> Plan:
    """Price ``candidate`` and write the plan down."""
    problem, evaluation = instance.problem, evaluate(instance, candidate)
    stages = tuple(
        _stage(instance, candidate, evaluation, placement, index) for index in range(len(candidate.sequence))
    )
    plan_hash = plan_hash_of(problem.model.digest, candidate, problem.model.cache_type)
    return Plan(
        plan_id=plan_hash[:16],
        plan_hash=plan_hash,
        model_name=problem.model.name,
        model_digest=problem.model.digest,
        layer_count=problem.model.layer_count,
        participant_set_hash=participant_hash or participant_set_hash(problem),
        context_length=candidate.shape.context_length,
        parallel_lanes=candidate.shape.lanes,
        objective=problem.request.objective,
        calibration=problem.calibration.name,
        placement=placement,
        stages=stages,
        hops=evaluation.hops,
        boundaries=_boundaries(instance, candidate, evaluation),
        modeled=evaluation.modeled,
        target=Target(problem.request.target_decode_tpot_us, evaluation.met),
        search=search,
        diagnostics=diagnostics_of(instance, candidate, evaluation, stages),
        cache_type=problem.model.cache_type,
    )


def plan_hash_of(model_digest: str, candidate: Candidate, cache_type: CacheType = DEFAULT_CACHE_TYPE) -> str:
    """SHA-256 over what agents are told: model, stages, context, lanes, cache type.

    The default cache type is left out, as in plans from before it could be chosen: those keep their names.
    """
    told: dict[str, object] = {
        "model": model_digest,
        "stages": [list(span) for span in candidate.spans],
        "context_length": candidate.shape.context_length,
        "parallel_lanes": candidate.shape.lanes,
    }
    if cache_type != DEFAULT_CACHE_TYPE:
        told["cache_type"] = cache_type
    return hashlib.sha256(json.dumps(told, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def roles_of(index: int, count: int) -> tuple[Role, ...]:
    """Driver and embedding first, readout last, intermediate between."""
    roles: list[Role] = []
    if index == 0:
        roles += ["driver", "embedding"]
    if index == count - 1:
        roles.append("readout")
    return tuple(roles) or ("intermediate",)


def _stage(
    instance: Instance, candidate: Candidate, evaluation: Evaluation, placement: Placement, index: int
) -> PlannedStage:
    node_id, start, end = candidate.spans[index]
    memory = instance.memory(candidate.shape)
    slowness_milli = _slowness_milli(instance, node_id)
    calibrated = () if slowness_milli == 1_000 else ("speed_calibrated",)
    return PlannedStage(
        stage_index=index,
        node_id=node_id,
        layer_start=start,
        layer_end=end,
        roles=roles_of(index, len(candidate.sequence)),
        parameter_bytes=parameter_bytes(instance.problem.model, start, end),
        required_bytes=memory.required(start, end),
        usable_bytes=instance.usable[node_id],
        stage_us=evaluation.stage_us[index],
        reason_codes=(*_stage_reasons(instance, candidate, memory, placement, index), *calibrated),
        slowness_milli=slowness_milli,
    )


def _slowness_milli(instance: Instance, node_id: str) -> int:
    node = next(each for each in instance.problem.participants if each.node_id == node_id)
    benchmark, calibrated = node.memory_bandwidth_bytes_per_s, node.calibrated_bytes_per_s
    if not benchmark or not calibrated or instance.signals.nodes[node_id].bandwidth_bytes_per_s != calibrated:
        return 1_000
    return max(1, benchmark * 1_000 // calibrated)


def _stage_reasons(
    instance: Instance, candidate: Candidate, memory: ShapeMemory, placement: Placement, index: int
) -> list[str]:
    request = instance.problem.request
    node_id, start, end = candidate.spans[index]
    times, usable = instance.times[node_id], instance.usable[node_id]
    reasons = []
    if placement == "locked":
        reasons.append("locked_by_operator")
    if index == 0 and request.pin_stage0 == node_id:
        reasons.append("pinned_stage0")
    if node_id in request.require_nodes:
        reasons.append("required_by_operator")
    if len(candidate.sequence) == 1:
        reasons.append("single_node_holds_model")
    elif (end < memory.model.layer_count and memory.required(start, end + 1) > usable) or (
        start > 0 and memory.required(start - 1, end) > usable
    ):
        reasons.append("memory_limited")
    if times is None:
        withheld = instance.signals.nodes[node_id].withheld
        reasons.append("signals_withheld" if withheld else "bandwidth_unknown")
    else:
        stream, compute = times.stream[end] - times.stream[start], times.compute[end] - times.compute[start]
        floor = times.observed_us_per_layer * (end - start)
        if floor > max(stream, compute):
            reasons.append("observed_timing_floor")
        else:
            reasons.append("compute_limited" if compute > stream else "memory_bandwidth_limited")
    layers = instance.problem.model.layers[start:end]
    if any(layer.recurrent_bytes_per_sequence for layer in layers):
        reasons.append("recurrent_state_sticky")
    if any(layer.kv_bytes_per_token for layer in layers):
        reasons.append("kv_state_costly_to_move")
    return reasons


def _boundaries(instance: Instance, candidate: Candidate, evaluation: Evaluation) -> tuple[PlannedBoundary, ...]:
    return tuple(
        PlannedBoundary(
            layer=cut,
            decision="accepted",
            wire_bytes_per_token=instance.network.frame_bytes,
            reason_codes=(BASIS_REASONS[evaluation.hops[index].basis],),
        )
        for index, cut in enumerate(candidate.cuts[1:-1])
    )
