"""The ``[calibration]`` table: a profile by name, or single values over it. Profile files use the same keys."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, cast

from coordinator.planner.problem import Calibration
from coordinator.simulator.toml_table import Table
from coordinator.simulator.units import US_PER_MS, ceil_us, milli

OVERHEADS_MS = ("per_stage_overhead_ms", "per_hop_overhead_ms")


def read_calibration(table: Table | None, model: Table | None, profiles: Mapping[str, Calibration]) -> Calibration:
    """The calibration to plan with; the built-in defaults when nothing was said.

    ``per_stage_overhead_ms`` and ``per_hop_overhead_ms`` may also stand under ``[model]``; both places at once is an
    error. A profile with single values changed is named ``<profile>+custom``.
    """
    base = profiles.get("skippy", Calibration())
    if table is not None and (name := table.text("profile")) is not None:
        if name not in profiles:
            table.fail("profile", f'no engine profile "{name}"; there are: {", ".join(sorted(profiles)) or "none"}')
        base = profiles[name]
    result = base if table is None else overridden(table, base)
    if model is not None:
        for key in OVERHEADS_MS:
            if key in model and table is not None and key in table:
                model.fail(key, "also stands under [calibration]; say it once")
        result = _overheads(model, result)
    if table is not None:
        table.finish()
    return result if result == base else replace(result, name=f"{base.name}+custom")


def overridden(table: Table, base: Calibration) -> Calibration:
    """``base`` with the single values that ``table`` states."""
    multiplier = table.number("rtt_multiplier", high=1_000)
    efficiency = table.number("bandwidth_efficiency", high=4)
    if efficiency is not None and efficiency == 0:
        table.fail("bandwidth_efficiency", "is 0: no stage would ever finish")
    per_layer = table.number("per_layer_overhead_us", high=10**9)
    kv_touch = table.number("kv_touch_us", high=10**9)
    topology = cast("Literal['chain', 'star'] | None", table.choice("topology", ("chain", "star")))
    returned = table.whole("return_bytes", high=2**40)
    return replace(
        _overheads(table, base),
        per_layer_us=base.per_layer_us if per_layer is None else ceil_us(per_layer, 1),
        kv_touch_us=base.kv_touch_us if kv_touch is None else ceil_us(kv_touch, 1),
        rtt_multiplier_milli=base.rtt_multiplier_milli if multiplier is None else milli(multiplier),
        bandwidth_efficiency_milli=base.bandwidth_efficiency_milli if efficiency is None else milli(efficiency),
        return_bytes=base.return_bytes if returned is None else returned,
        topology=topology or base.topology,
    )


def _overheads(table: Table, base: Calibration) -> Calibration:
    stage = table.number("per_stage_overhead_ms", high=10**7)
    hop = table.number("per_hop_overhead_ms", high=10**7)
    return replace(
        base,
        per_stage_us=base.per_stage_us if stage is None else ceil_us(stage, US_PER_MS),
        per_hop_us=base.per_hop_us if hop is None else ceil_us(hop, US_PER_MS),
    )
