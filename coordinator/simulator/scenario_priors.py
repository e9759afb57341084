"""Speeds of nodes that state no bandwidth: from a solo run of this very model, else from the prior of their device.

A *solo run* (``solo_tok_s``: the whole model decoded on that node alone) has paid everything a stage costs, so the
overhead that the engine profile adds back for one stage is taken off again. It also carries over to the other nodes that
name a device, scaled by the devices' peak bandwidths: a mixture of experts is far slower than its active bytes say, on
every device alike, and one measured run corrects that where a prior from dense models cannot.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, Decimal

from coordinator.model.package import ModelPackage
from coordinator.planner.problem import Calibration, Participant
from coordinator.simulator.hardware import Device
from coordinator.simulator.run_prediction import LEAST_SOLO_SHARE
from coordinator.simulator.units import US_PER_S


@dataclass(frozen=True, slots=True)
class Unmeasured:
    """What a node without a bandwidth says of its speed; at least one of the two."""

    device: Device | None
    solo_tok_s: Decimal | None


def with_speeds(
    nodes: Mapping[str, Participant],
    unmeasured: Mapping[str, Unmeasured],
    model: ModelPackage,
    calibration: Calibration,
) -> dict[str, Participant]:
    """``nodes`` with a bandwidth for each of ``unmeasured``; priors are marked ``spec``, solo runs ``measured``."""
    known = dict(nodes)
    reference: tuple[Device, int] | None = None
    for node_id in sorted(unmeasured):
        said = unmeasured[node_id]
        if said.solo_tok_s is None:
            continue
        rate = _solo_bytes_per_s(said.solo_tok_s, model, calibration)
        known[node_id] = replace(nodes[node_id], memory_bandwidth_bytes_per_s=rate, bandwidth_source="measured")
        if said.device is not None and reference is None:
            reference = said.device, rate
    for node_id, said in unmeasured.items():
        if said.solo_tok_s is not None or said.device is None:
            continue
        rate = said.device.bandwidth_for(model)
        if reference is not None:
            rate = max(1, reference[1] * said.device.peak_bytes_per_s // reference[0].peak_bytes_per_s)
        known[node_id] = replace(nodes[node_id], memory_bandwidth_bytes_per_s=rate, bandwidth_source="spec")
    return known


def _solo_bytes_per_s(tok_s: Decimal, model: ModelPackage, calibration: Calibration) -> int:
    """The bandwidth at which one stage with the whole model decodes ``tok_s`` under ``calibration``."""
    token_us = int((US_PER_S / tok_s).to_integral_value(rounding=ROUND_CEILING))
    overhead = calibration.per_stage_us + calibration.kv_touch_us + calibration.per_layer_us * model.layer_count
    work_us = max(token_us - overhead, int(LEAST_SOLO_SHARE * token_us), 1)
    streamed = model.streamed_bytes + model.shared_first_bytes + model.shared_last_bytes
    return max(1, streamed * US_PER_S * 1_000 // (work_us * calibration.bandwidth_efficiency_milli))
