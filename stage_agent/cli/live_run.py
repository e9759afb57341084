"""One run for ``stagemesh calibrate``: a plan that served, and what stage 0 measured under it."""

from collections.abc import Mapping

from coordinator.planner.plan import Plan
from coordinator.planner.problem import Calibration
from coordinator.simulator.live_runs import LiveRun, LiveStage


def live_run(
    plan: Plan, calibration: Calibration, names: Mapping[str, str], *, measured_us: int, tokens: int, engine: str = ""
) -> LiveRun:
    """``calibration`` is the profile that priced ``plan``, which must be modelled; ``names`` shows nodes to people.

    Work is as the benchmarks say, also where an earlier calibration priced the plan: all kept runs start from one belief.
    """
    hops = {hop.target: hop for hop in plan.hops if hop.kind == "forward"}
    stages, priced_us = [], 0
    for stage in plan.stages:
        layers = stage.layer_end - stage.layer_start
        overhead_us = calibration.per_stage_us + calibration.kv_touch_us + calibration.per_layer_us * layers
        hop = hops.get(stage.node_id)
        stages.append(
            LiveStage(
                node=names.get(stage.node_id, stage.node_id),
                layers=layers,
                work_us=max(0, (stage.stage_us or 0) - overhead_us) * 1_000 // stage.slowness_milli,
                rtt_us=None if hop is None else hop.rtt_us or 0,
            )
        )
        if hop is not None:
            priced_us += max(0, (hop.hop_us or 0) - hop.transfer_us)
        priced_us += stage.stage_us or 0
    predicted_us = plan.modeled.decode_tpot_us
    assert predicted_us is not None, "the caller refuses plans without a modelled time per token"
    cuts = "-".join(str(stage.layers) for stage in stages)
    return LiveRun(
        id=f"{plan.plan_id[:12]}: {cuts}",
        profile=calibration.name,
        engine=engine,
        model=plan.model_name,
        stages=tuple(stages),
        extra_us=max(0, predicted_us - priced_us),
        predicted_us=predicted_us,
        measured_us=measured_us,
        tokens=tokens,
    )
