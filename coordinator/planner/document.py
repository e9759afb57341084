"""A plan as the JSON document of INTERFACES, and strictly back. The only place that knows both."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from config.cache_types import DEFAULT_CACHE_TYPE, CacheType
from coordinator.planner.assemble import plan_hash_of
from coordinator.planner.instance import Candidate
from coordinator.planner.memory import Shape
from coordinator.planner.plan import (
    SCHEMA_VERSION,
    Diagnostic,
    Modeled,
    Placement,
    Plan,
    PlannedBoundary,
    PlannedHop,
    PlannedStage,
    PlanRefused,
    Role,
    SearchCertificate,
    Target,
)
from coordinator.planner.problem import EdgeBasis, Objective
from coordinator.planner.validate import MAX_EXACT
from protocol.errors import StagemeshError

MAX_LAYERS = 4_096
MAX_CONTEXT = 2**32
MAX_LANES = 65_536
"""Beyond these a document is a mistake; exporters write a value per layer and per lane."""


class PlanDocumentError(StagemeshError):
    """A plan file is not a plan document; nothing was done with it. Names the first bad field."""

    exit_code = 2


def plan_document(plan: Plan) -> dict[str, Any]:
    """``plan --json``, key for key; ``cache_type`` is there when it is not the default."""
    return {
        "plan_id": plan.plan_id,
        "schema_version": SCHEMA_VERSION,
        "model": {"name": plan.model_name, "digest": plan.model_digest, "layer_count": plan.layer_count},
        "participant_set_hash": plan.participant_set_hash,
        "context_length": plan.context_length,
        "parallel_lanes": plan.parallel_lanes,
        **({} if plan.cache_type == DEFAULT_CACHE_TYPE else {"cache_type": plan.cache_type}),
        "objective": plan.objective,
        "calibration": plan.calibration,
        "placement": plan.placement,
        "stages": [_stage(stage) for stage in plan.stages],
        "hops": [_hop(hop) for hop in plan.hops],
        "boundaries": [
            {
                "layer": boundary.layer,
                "decision": boundary.decision,
                "wire_bytes_per_token": boundary.wire_bytes_per_token,
                "reason_codes": list(boundary.reason_codes),
            }
            for boundary in plan.boundaries
        ],
        "modeled": {
            "decode_tpot_us": plan.modeled.decode_tpot_us,
            "network_us_per_token": plan.modeled.network_us_per_token,
            "pipelined_period_us": plan.modeled.pipelined_period_us,
            "ttft_us": plan.modeled.ttft_us,
            "tokens_per_s": plan.modeled.tokens_per_s,
        },
        "target": {"decode_tpot_ms": _milliseconds(plan.target.decode_tpot_us), "met": plan.target.met},
        "search": {
            "proven_optimal": plan.search.proven_optimal,
            "gap": plan.search.gap,
            "expanded": plan.search.expanded,
            "elapsed_ms": plan.search.elapsed_ms,
        },
        "diagnostics": [
            {"severity": line.severity, "code": line.code, "message": line.message} for line in plan.diagnostics
        ],
    }


def refusal_document(refused: PlanRefused) -> dict[str, Any]:
    """The error document of INTERFACES; for ``target_missed`` the plan that was refused is in the details."""
    details = dict(refused.details)
    if refused.best_effort is not None:
        details["best_effort"] = plan_document(refused.best_effort)
    return {"error": {"code": refused.code, "message": refused.message, "details": details}}


def plan_from_document(document: Mapping[str, Any]) -> Plan:
    """The plan that ``document`` describes. ``PlanDocumentError`` for anything that ``plan_document`` cannot have made.

    Checked beyond the types: stages are indexed in order, contiguous, non-empty and complete, each node once.
    """
    try:
        read = _PlanDocument.model_validate(dict(document))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "document"
        raise PlanDocumentError(f"not a plan document: {where}: {first['msg']}") from error
    _check_stages(read)
    candidate = Candidate(
        Shape(read.context_length, read.parallel_lanes),
        tuple(stage.node_id for stage in read.stages),
        (0, *(stage.layer_end for stage in read.stages)),
    )
    plan_hash = plan_hash_of(read.model.digest, candidate, read.cache_type)
    if read.plan_id != plan_hash[:16]:
        raise PlanDocumentError(f"not a plan document: plan_id: {read.plan_id} does not name these stages")
    return Plan(
        plan_id=read.plan_id,
        plan_hash=plan_hash,
        model_name=read.model.name,
        model_digest=read.model.digest,
        layer_count=read.model.layer_count,
        participant_set_hash=read.participant_set_hash,
        context_length=read.context_length,
        parallel_lanes=read.parallel_lanes,
        objective=read.objective,
        calibration=read.calibration,
        placement=read.placement,
        stages=tuple(PlannedStage(**stage.model_dump()) for stage in read.stages),
        hops=tuple(PlannedHop(**hop.model_dump()) for hop in read.hops),
        boundaries=tuple(PlannedBoundary(**boundary.model_dump()) for boundary in read.boundaries),
        modeled=Modeled(**read.modeled.model_dump()),
        target=Target(round(read.target.decode_tpot_ms * 1_000), read.target.met),
        search=SearchCertificate(**read.search.model_dump()),
        diagnostics=tuple(Diagnostic(**line.model_dump()) for line in read.diagnostics),
        cache_type=read.cache_type,
    )


def _stage(stage: PlannedStage) -> dict[str, Any]:
    return {
        "stage_index": stage.stage_index,
        "node_id": stage.node_id,
        "layer_start": stage.layer_start,
        "layer_end": stage.layer_end,
        "roles": list(stage.roles),
        "parameter_bytes": stage.parameter_bytes,
        "required_bytes": stage.required_bytes,
        "usable_bytes": stage.usable_bytes,
        "stage_us": stage.stage_us,
        "reason_codes": list(stage.reason_codes),
        **({} if stage.slowness_milli == 1_000 else {"slowness_milli": stage.slowness_milli}),
    }


def _hop(hop: PlannedHop) -> dict[str, Any]:
    return {
        "source": hop.source,
        "target": hop.target,
        "kind": hop.kind,
        "rtt_us": hop.rtt_us,
        "transfer_us": hop.transfer_us,
        "hop_us": hop.hop_us,
        "basis": hop.basis,
    }


def _milliseconds(value_us: int) -> int | float:
    return value_us // 1_000 if value_us % 1_000 == 0 else value_us / 1_000


def _check_stages(read: "_PlanDocument") -> None:
    seen: set[str] = set()
    expected = 0
    for index, stage in enumerate(read.stages):
        where = f"not a plan document: stages.{index}"
        if stage.stage_index != index:
            raise PlanDocumentError(f"{where}.stage_index: expected {index}, found {stage.stage_index}")
        if stage.layer_start != expected or stage.layer_end <= stage.layer_start:
            raise PlanDocumentError(
                f"{where}: layers [{stage.layer_start}, {stage.layer_end}) do not follow {expected}"
            )
        if stage.node_id in seen:
            raise PlanDocumentError(f"{where}.node_id: {stage.node_id} holds two stages")
        seen.add(stage.node_id)
        expected = stage.layer_end
    if expected != read.model.layer_count:
        raise PlanDocumentError(f"not a plan document: stages end at layer {expected} of {read.model.layer_count}")


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


_Count = Field(ge=0, le=MAX_EXACT)
_Known = Field(ge=0, le=MAX_EXACT)
"""``null`` stands for unknown; the key must be there."""
_Layer = Field(ge=0, le=MAX_LAYERS)
_Name = Field(min_length=1, max_length=256)


class _ModelName(_Strict):
    name: str
    digest: str
    layer_count: int = Field(ge=1, le=MAX_LAYERS)


class _StageRow(_Strict):
    stage_index: int = _Count
    node_id: str = _Name
    layer_start: int = _Layer
    layer_end: int = _Layer
    roles: tuple[Role, ...] = Field(strict=False)
    parameter_bytes: int = _Count
    required_bytes: int = _Count
    usable_bytes: int = _Count
    stage_us: int | None = _Known
    reason_codes: tuple[str, ...] = Field(default=(), strict=False)
    slowness_milli: int = Field(default=1_000, ge=1, le=MAX_EXACT)


class _HopRow(_Strict):
    source: str = _Name
    target: str = _Name
    kind: Literal["forward", "return"]
    rtt_us: int | None = _Known
    transfer_us: int = _Count
    hop_us: int | None = _Known
    basis: EdgeBasis


class _BoundaryRow(_Strict):
    layer: int = _Layer
    decision: Literal["accepted", "rejected"]
    wire_bytes_per_token: int = _Count
    reason_codes: tuple[str, ...] = Field(default=(), strict=False)


class _ModeledRow(_Strict):
    decode_tpot_us: int | None = _Known
    network_us_per_token: int | None = _Known
    pipelined_period_us: int | None = _Known
    ttft_us: int | None = _Known
    tokens_per_s: float | None = Field(ge=0, le=MAX_EXACT)


class _TargetRow(_Strict):
    decode_tpot_ms: float = Field(gt=0, le=MAX_EXACT / 1_000)
    met: bool | None


class _SearchRow(_Strict):
    proven_optimal: bool
    gap: float | None = Field(ge=0, le=MAX_EXACT)
    expanded: int = _Count
    elapsed_ms: int = _Count


class _DiagnosticRow(_Strict):
    severity: Literal["info", "warning", "error"]
    code: str
    message: str


class _PlanDocument(_Strict):
    plan_id: str
    schema_version: Literal[1]
    model: _ModelName
    participant_set_hash: str
    context_length: int = Field(ge=1, le=MAX_CONTEXT)
    parallel_lanes: int = Field(ge=1, le=MAX_LANES)
    cache_type: CacheType = DEFAULT_CACHE_TYPE
    objective: Objective
    calibration: str
    placement: Placement
    stages: tuple[_StageRow, ...] = Field(min_length=1, max_length=4_096, strict=False)
    hops: tuple[_HopRow, ...] = Field(max_length=16_384, strict=False)
    boundaries: tuple[_BoundaryRow, ...] = Field(max_length=16_384, strict=False)
    modeled: _ModeledRow
    target: _TargetRow
    search: _SearchRow
    diagnostics: tuple[_DiagnosticRow, ...] = Field(max_length=16_384, strict=False)
