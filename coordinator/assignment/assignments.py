"""A plan as each agent is told it."""

from collections.abc import Mapping

from config.settings import AssignmentSettings
from coordinator.assignment.running import Former, RunningPlan
from coordinator.planner.plan import Plan, PlannedStage
from protocol.ballots import CacheEpoch, FormerSplit, Promise, StageAssignment, StageShare
from protocol.fencing import PlanEpoch
from protocol.ids import NodeId, Slot
from protocol.wire import MAX_INTEGER

REQUESTS_PER_TERM_BITS = 28
"""Request ids are handed out from ``term << 28``: older terms' ids are below, and 2^25 terms fit the wire's integers."""
MAX_CACHE_EPOCH = 2**32 - 1


def load_deadline_us(parameter_bytes: int, settings: AssignmentSettings) -> int:
    """Without growth for this long a load has failed: grows with the bytes, never under the minimum."""
    return max(settings.load_deadline_min_us, -(-parameter_bytes * 1_000_000 // settings.load_bytes_per_s_floor))


def keeps_load(stage: PlannedStage, plan: Plan, running: RunningPlan | None) -> bool:
    """The node already serves this very range of this model with equal context, lanes and cache type.

    Whether its engine can go on with that under another plan is the agent's to say (``Promise.keeps_loads``).
    """
    if running is None or running.model_digest != plan.model_digest:
        return False
    held = (running.context_length, running.lanes, running.cache_type)
    same_cache = held == (plan.context_length, plan.parallel_lanes, plan.cache_type)
    return same_cache and any(
        (old.node_id, old.layer_start, old.layer_end) == (stage.node_id, stage.layer_start, stage.layer_end)
        for old in running.stages
    )


def assignments_of(
    plan: Plan,
    *,
    slot: Slot,
    source: str,
    ballot: PlanEpoch,
    promises: Mapping[NodeId, Promise],
    running: RunningPlan | None,
    settings: AssignmentSettings,
    former: Former | None = None,
) -> dict[NodeId, StageAssignment]:
    """One assignment per stage, in stage order, bound to the process starts that promised."""
    first_request_id = min(ballot.term << REQUESTS_PER_TERM_BITS, MAX_INTEGER)
    count = len(plan.stages)
    shares = tuple(
        StageShare(
            node_id=stage.node_id,
            layer_start=stage.layer_start,
            layer_end=stage.layer_end,
            parameter_bytes=stage.parameter_bytes,
        )
        for stage in plan.stages
    )
    result: dict[NodeId, StageAssignment] = {}
    for index, stage in enumerate(plan.stages):
        node_id = NodeId(stage.node_id)
        promise = promises[node_id]
        active_here = (
            promise.active_hash is not None and running is not None and promise.active_hash == running.plan_hash
        )
        warm = active_here and promise.keeps_loads and keeps_load(stage, plan, running)
        cache_epoch = promise.cache_epoch.value + (0 if warm else 1)
        result[node_id] = StageAssignment(
            slot=slot,
            stage_index=index,
            stage_count=count,
            node_id=stage.node_id,
            instance=promise.instance,
            model_digest=plan.model_digest,
            model_source=source,
            layer_start=stage.layer_start,
            layer_end=stage.layer_end,
            roles=stage.roles,
            required_bytes=stage.required_bytes,
            parameter_bytes=stage.parameter_bytes,
            context_length=plan.context_length,
            lanes=plan.parallel_lanes,
            cache_type=plan.cache_type,
            previous=plan.stages[index - 1].node_id if index > 0 else "",
            next=plan.stages[index + 1].node_id if index + 1 < count else "",
            driver=plan.stages[0].node_id,
            cache_epoch=CacheEpoch(value=min(cache_epoch, MAX_CACHE_EPOCH)),
            first_request_id=first_request_id,
            calibration=plan.calibration,
            load_deadline_us=load_deadline_us(stage.parameter_bytes, settings),
            stages=shares,
            former=FormerSplit(layer_ends=former.layer_ends, tpot_us=former.tpot_us) if former and index == 0 else None,
        )
    return result
