"""How far off predictions are, per engine: leave-one-out errors over the public runs, and the table of the README."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from coordinator.planner.problem import Calibration
from coordinator.simulator.field_runs import FieldRun
from coordinator.simulator.fitting import RunError, leave_one_out
from coordinator.simulator.hardware import Hardware
from coordinator.simulator.profiles import Profile

BEGIN, END = "<!-- calibration:begin -->", "<!-- calibration:end -->"


@dataclass(frozen=True, slots=True)
class EngineErrors:
    """Leave-one-out errors of one profile's scored runs."""

    profile: str
    errors: tuple[RunError, ...]

    @property
    def median(self) -> float:
        """Median absolute relative error."""
        return absolute_percentile(self.errors, 50)

    @property
    def p90(self) -> float:
        """90th percentile (linear interpolation) of the absolute relative error."""
        return absolute_percentile(self.errors, 90)

    @property
    def worst(self) -> RunError:
        """The run that is furthest off."""
        return max(self.errors, key=lambda error: (abs(error.relative), error.run.id))


def absolute_percentile(errors: Sequence[RunError], percent: int) -> float:
    """Percentile of |relative error|."""
    return float(np.percentile([abs(error.relative) for error in errors], percent))


def fitting_runs(runs: Sequence[FieldRun], profile: str) -> tuple[FieldRun, ...]:
    """Runs of one engine that a fit may use: split runs, and single-node ones that fix every input."""
    own = (run for run in runs if run.profile_name == profile and run.pipelined)
    return tuple(run for run in own if run.scored or len(run.nodes) > 1)


def engine_errors(
    runs: Sequence[FieldRun], profiles: Mapping[str, Profile], hardware: Hardware
) -> tuple[EngineErrors, ...]:
    """Per profile with scored runs, in the order of the profile names."""
    found: list[EngineErrors] = []
    for name in sorted(profiles):
        own = fitting_runs(runs, name)
        if any(run.scored for run in own):
            profile = profiles[name]
            errors = leave_one_out(own, unfitted(profile), profile.fit, hardware)
            found.append(EngineErrors(name, errors))
    return tuple(found)


def unfitted(profile: Profile) -> Calibration:
    """The profile without what runs decide: its topology and payloads only."""
    kept = profile.calibration
    return replace(kept, per_layer_us=0, per_stage_us=0, per_hop_us=0, kv_touch_us=0, rtt_multiplier_milli=1_000,
                   bandwidth_efficiency_milli=1_000)  # fmt: skip


def markdown_table(engines: Sequence[EngineErrors]) -> str:
    """The README's table between its markers."""
    lines = [
        BEGIN,
        "| engine profile | runs | median error | 90th percentile | worst run |",
        "|---|---:|---:|---:|---|",
    ]
    lines += [_row(engine.profile, engine) for engine in engines]
    together = EngineErrors("**all**", tuple(error for engine in engines for error in engine.errors))
    lines += [_row(together.profile, together), END]
    return "\n".join(lines)


def _row(name: str, engine: EngineErrors) -> str:
    worst = engine.worst
    return (
        f"| {name} | {len(engine.errors)} | {engine.median:.1%} | {engine.p90:.1%} "
        f"| {worst.run.id} ({worst.relative:+.0%}) |"
    )
