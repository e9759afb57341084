"""Engine profiles: an engine's overheads, each value with where it comes from (files in ``config/calibrations``)."""

from dataclasses import dataclass, field, replace

from coordinator.planner.problem import Calibration
from coordinator.simulator.scenario_calibration import overridden
from coordinator.simulator.toml_table import Table, parse_toml

PARAMETERS = (
    "per_layer_overhead_us",
    "per_stage_overhead_ms",
    "per_hop_overhead_ms",
    "rtt_multiplier",
    "return_bytes",
    "bandwidth_efficiency",
    "kv_touch_us",
    "topology",
)


@dataclass(frozen=True, slots=True)
class Derivation:
    """Why a parameter has its value, and where that can be read."""

    derivation: str
    source: str


@dataclass(frozen=True, slots=True)
class Profile:
    """A named engine profile. ``derivations`` has an entry for every parameter the file states."""

    name: str
    engine: str
    about: str
    calibration: Calibration
    derivations: dict[str, Derivation] = field(default_factory=dict)


def parse_profile(name: str, text: str) -> Profile:
    """Read one profile file.

    Every parameter is a table ``[per_hop_overhead_ms]`` with ``value``, ``derivation`` and ``source``; a parameter
    that is left out keeps the neutral value (no overhead, multiplier 1, chain).

    Raises:
        ScenarioError: unknown key, missing derivation, value out of range.
    """
    root = parse_toml(f"{name}.toml", text)
    engine, about = root.text("engine"), root.text("about")
    if engine is None or about is None:
        root.fail("engine" if engine is None else "about", "is required")
    values: dict[str, object] = {}
    derivations: dict[str, Derivation] = {}
    for key in PARAMETERS:
        row = root.table(key)
        if row is None:
            continue
        derivation, source = row.text("derivation"), row.text("source")
        if not derivation or not source:
            row.fail(
                "derivation" if not derivation else "source", "is required: a number without its origin is a rumour"
            )
        if "value" not in row:
            row.fail("value", "is required")
        values[key] = row.take("value")
        row.finish()
        derivations[key] = Derivation(derivation, source)
    root.finish()
    neutral = Calibration(name=name, per_stage_us=0, per_hop_us=0)
    calibration = overridden(Table(root.source, (), values), neutral)
    return Profile(name, engine, about, replace(calibration, name=name), derivations)
