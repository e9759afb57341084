"""Engine profiles: an engine's overheads, each value with where it comes from (files in ``config/calibrations``)."""

import json
from collections.abc import Mapping
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
    fit: tuple[str, ...] = ()
    """The parameters that measured runs may move."""


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
    fit = tuple(root.texts("fit") or ())
    if strange := [key for key in fit if key not in PARAMETERS]:
        root.fail("fit", f'"{strange[0]}" is not a parameter of a profile')
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
    return Profile(name, engine, about, replace(calibration, name=name), derivations, fit)


def profile_text(profile: Profile, values: Mapping[str, float], derivation: str, source: str) -> str:
    """A profile file with ``values`` in place of the profile's own; what was not fitted keeps its value and origin."""
    lines = [
        f"engine = {_quoted(profile.engine)}",
        f"about = {_quoted(profile.about)}",
        f"fit = {json.dumps(list(profile.fit))}",
    ]
    for key in PARAMETERS:
        origin = Derivation(derivation, source) if key in values else profile.derivations.get(key)
        if origin is not None:
            value = round(values[key], 4) if key in values else _stated(profile.calibration, key)
            lines += [
                "",
                f"[{key}]",
                f"value = {json.dumps(value)}",
                f"derivation = {_quoted(origin.derivation)}",
                f"source = {_quoted(origin.source)}",
            ]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """A TOML basic string: JSON's escapes are a subset of TOML's."""
    return json.dumps(text, ensure_ascii=False)


def _stated(calibration: Calibration, key: str) -> float | int | str | None:
    match key:
        case "per_layer_overhead_us":
            return calibration.per_layer_us
        case "per_stage_overhead_ms":
            return calibration.per_stage_us / 1_000
        case "per_hop_overhead_ms":
            return calibration.per_hop_us / 1_000
        case "rtt_multiplier":
            return calibration.rtt_multiplier_milli / 1_000
        case "return_bytes":
            return calibration.return_bytes
        case "bandwidth_efficiency":
            return calibration.bandwidth_efficiency_milli / 1_000
        case "kv_touch_us":
            return calibration.kv_touch_us
        case _:
            return calibration.topology
