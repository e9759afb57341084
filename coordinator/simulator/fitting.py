"""Fit an engine profile to measured runs: bounded least squares on relative errors, with what the fit rests on.

Theory of operation. The residual of a run is ln(predicted / measured), so 10 % counts the same on a fast and a slow
mesh; beyond ``OUTLIER`` a run pulls linearly instead of quadratically (soft L1). Parameters start at physical values and
stay within bounds. A fit is *under-determined* when the runs cannot tell two parameter vectors apart (the Jacobian loses
rank): it is refused, naming the parameters, unless they are held. Leverage is the diagonal of the hat matrix
J (JᵀJ)⁻¹ Jᵀ: 1 means that the run alone decides some combination of parameters.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coordinator.planner.problem import Calibration
from coordinator.simulator.field_runs import FieldRun
from coordinator.simulator.hardware import Hardware
from coordinator.simulator.run_prediction import Prediction, Solo, predict, solo_runs

Vector = NDArray[np.float64]

OUTLIER = 0.10
RANK_TOLERANCE = 1e-3
"""Directions that move predictions less than this, relative to the strongest one, are not determined."""
WEAK_SHARE = 0.3


@dataclass(frozen=True, slots=True)
class Parameter:
    """A value that may be fitted. ``unit`` converts to the calibration's integer."""

    key: str
    field: str
    start: float
    low: float
    high: float
    unit: float


PARAMETERS: dict[str, Parameter] = {
    one.key: one
    for one in (
        Parameter("per_layer_overhead_us", "per_layer_us", 0.0, 0.0, 50_000.0, 1.0),
        Parameter("per_stage_overhead_ms", "per_stage_us", 0.0, 0.0, 1_000.0, 1_000.0),
        Parameter("per_hop_overhead_ms", "per_hop_us", 0.0, 0.0, 1_000.0, 1_000.0),
        Parameter("rtt_multiplier", "rtt_multiplier_milli", 0.5, 0.0, 5.0, 1_000.0),
        Parameter("bandwidth_efficiency", "bandwidth_efficiency_milli", 1.0, 0.05, 1.5, 1_000.0),
    )
}
"""Starts are physics: nothing costs anything but the wire, and a directed hop takes half a round trip."""


@dataclass(frozen=True, slots=True)
class RunError:
    """One run under a calibration. ``leverage`` is ``None`` for runs that were not fitted."""

    run: FieldRun
    prediction: Prediction
    relative: float
    """(predicted − measured) / measured."""
    leverage: float | None = None


@dataclass(frozen=True, slots=True)
class UnderDetermined:
    """The runs do not say enough: which parameters, and what to do."""

    parameters: tuple[str, ...]
    message: str


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted profile. ``values`` are the fitted parameters by key, in the profile file's units."""

    calibration: Calibration
    values: dict[str, float]
    at_bound: tuple[str, ...]
    errors: tuple[RunError, ...]


def apply_values(base: Calibration, values: dict[str, float]) -> Calibration:
    """``base`` with profile-file values, rounded to the integers that a calibration holds."""
    changes: dict[str, Any] = {
        PARAMETERS[key].field: round(value * PARAMETERS[key].unit) for key, value in values.items()
    }
    return replace(base, **changes)


def run_errors(
    runs: Sequence[FieldRun], calibration: Calibration, hardware: Hardware, known: Sequence[FieldRun]
) -> tuple[RunError, ...]:
    """Errors of ``runs`` with a result; solo figures come from ``known``."""
    errors: list[RunError] = []
    for run in runs:
        if run.measured_us is not None:
            prediction = predict(run, calibration, hardware, solo_runs(known, without=run))
            errors.append(RunError(run, prediction, prediction.token_us / run.measured_us - 1))
    return tuple(errors)


def fit_profile(
    runs: Sequence[FieldRun],
    base: Calibration,
    free: Sequence[str],
    hardware: Hardware,
    *,
    known: Sequence[FieldRun] = (),
) -> Fit | UnderDetermined:
    """Fit the ``free`` parameters of ``base`` to ``runs``; every other value of ``base`` is kept.

    ``known`` are further runs whose solo figures may be used. Runs that are bound by a disk are left out.
    """
    usable = [run for run in runs if run.measured_us is not None and not _from_disk(run, base, hardware)]
    keys = list(free)
    weak = undetermined(usable, base, keys, hardware, known=known)
    if weak:
        return UnderDetermined(
            weak,
            f"{len(usable)} runs do not determine {', '.join(weak)}: add runs that differ in what they cost "
            "(round trip, number of stages, layers), or hold a parameter at its value",
        )
    from scipy.optimize import least_squares  # a quarter of what `stagemesh --help` would wait for

    residuals = _residuals(usable, base, keys, hardware, known)
    bounds = ([PARAMETERS[key].low for key in keys], [PARAMETERS[key].high for key in keys])
    start = _start(keys)

    def slopes(at: Vector) -> Vector:
        return _jacobian(residuals, at, keys)

    solved = least_squares(
        residuals,
        start,
        jac=slopes,
        bounds=bounds,
        x_scale=np.array([_step(key) for key in keys]),
        loss="soft_l1",
        f_scale=OUTLIER,
    )
    values = {key: float(value) for key, value in zip(keys, solved.x, strict=True)}
    calibration = apply_values(base, values)
    leverage = _leverage(_jacobian(residuals, solved.x, keys))
    errors = tuple(
        replace(error, leverage=float(weight))
        for error, weight in zip(run_errors(usable, calibration, hardware, [*usable, *known]), leverage, strict=True)
    )
    at_bound = tuple(
        key for key in keys if values[key] <= PARAMETERS[key].low + 1e-9 or values[key] >= PARAMETERS[key].high * 0.999
    )
    return Fit(calibration, values, at_bound, errors)


def _from_disk(run: FieldRun, base: Calibration, hardware: Hardware) -> bool:
    """A run that reads weights from disk says nothing about its engine."""
    return "disk_bound" in predict(run, base, hardware).flags


def undetermined(
    runs: Sequence[FieldRun],
    base: Calibration,
    keys: Sequence[str],
    hardware: Hardware,
    *,
    known: Sequence[FieldRun] = (),
) -> tuple[str, ...]:
    """Parameters that ``runs`` cannot tell apart or do not depend on; empty when the fit is determined."""
    if not keys:
        return ()
    if not runs:
        return tuple(keys)
    matrix = _jacobian(_residuals(runs, base, keys, hardware, known), _probe(keys), keys)
    scaled = matrix * np.array([_step(key) for key in keys])
    _, singular, rows = np.linalg.svd(scaled, full_matrices=True)
    strongest = float(singular[0]) if singular.size else 0.0
    weak: set[str] = set()
    for index in range(len(keys)):
        if index < len(singular) and strongest > 0 and singular[index] > RANK_TOLERANCE * strongest:
            continue
        weak |= {key for key, part in zip(keys, rows[index], strict=True) if abs(part) > WEAK_SHARE}
    return tuple(key for key in keys if key in weak)


def _step(key: str) -> float:
    """A natural amount of each parameter: what one engine differs from another by."""
    return {"per_layer_overhead_us": 50.0, "bandwidth_efficiency": 0.1}.get(key, 1.0)


def _start(keys: Sequence[str]) -> Vector:
    return np.array([max(PARAMETERS[key].start, 0.05 * _step(key)) for key in keys])


def _probe(keys: Sequence[str]) -> Vector:
    """A point inside the bounds at which every parameter has some effect."""
    return np.array([PARAMETERS[key].start + (0.0 if PARAMETERS[key].start else _step(key)) for key in keys])


def _residuals(
    runs: Sequence[FieldRun], base: Calibration, keys: Sequence[str], hardware: Hardware, known: Sequence[FieldRun]
) -> Callable[[Vector], Vector]:
    solos: dict[str, tuple[Solo, ...]] = {run.id: solo_runs([*runs, *known], without=run) for run in runs}

    def residuals(values: Vector) -> Vector:
        calibration = apply_values(base, dict(zip(keys, (float(value) for value in values), strict=True)))
        predicted = [predict(run, calibration, hardware, solos[run.id]).token_us for run in runs]
        measured = [run.measured_us or 1.0 for run in runs]
        ratios: Vector = np.log(np.array(predicted) / np.array(measured))
        return ratios

    return residuals


def _jacobian(function: Callable[[Vector], Vector], at: Vector, keys: Sequence[str]) -> Vector:
    """Central differences with steps wide enough for calibrations, which hold whole microseconds."""
    columns = []
    for index, key in enumerate(keys):
        step = max(abs(float(at[index])) * 0.05, 0.1 * _step(key))
        up, down = at.copy(), at.copy()
        up[index] += step
        down[index] = max(0.0, down[index] - step)
        columns.append((function(up) - function(down)) / (up[index] - down[index]))
    return np.stack(columns, axis=1)


def _leverage(matrix: Vector) -> Vector:
    hat: Vector = np.diag(matrix @ np.linalg.pinv(matrix))
    return hat.clip(0.0, 1.0)


def leave_one_out(
    runs: Sequence[FieldRun], base: Calibration, free: Sequence[str], hardware: Hardware
) -> tuple[RunError, ...]:
    """For every scored run its error under a fit to all others. What those others do not determine stays at its start."""
    errors: list[RunError] = []
    starts = apply_values(base, {key: PARAMETERS[key].start for key in free})
    for run in runs:
        if not run.scored:
            continue
        others = [other for other in runs if other is not run and other.measured_us is not None]
        determined = determined_parameters(others, starts, free, hardware)
        fit = fit_profile(others, starts, determined, hardware, known=[run]) if determined else None
        calibration = fit.calibration if isinstance(fit, Fit) else starts
        errors.extend(run_errors([run], calibration, hardware, runs))
    return tuple(errors)


def determined_parameters(
    runs: Sequence[FieldRun], base: Calibration, free: Sequence[str], hardware: Hardware
) -> tuple[str, ...]:
    """The longest prefix-closed choice from ``free`` (in its order) that ``runs`` determine: greedy, deterministic."""
    chosen: list[str] = []
    for key in free:
        if not undetermined(runs, base, [*chosen, key], hardware):
            chosen.append(key)
    return tuple(chosen)
