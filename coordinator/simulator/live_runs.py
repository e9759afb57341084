"""What a live mesh measured under its plans, and what that says of the engine and of each node's speed. Pure.

Theory of operation. An engine like llama.cpp over RPC times whole tokens only: nobody inside it can say what one stage
took. But every plan that served is one equation, linear in what is not known::

    tpot = Σ slowness_n · work_n + rtt_multiplier · Σ rtt_hop + per_hop · hops + per_stage · stages + transfers

where ``work_n`` is what the planner thinks node n's layers take; so a few plans with different cuts tell nodes and hops apart. Each unknown starts at what the planner believed (its
*prior*, with a relative doubt) and moves as far as the runs push it: the estimate with the highest posterior under normal
errors, which is a bounded linear least-squares problem. What the runs do not determine stays where it was, and says so:
``determined`` is the share of the doubt that the runs took away.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coordinator.planner.problem import Calibration
from coordinator.simulator.toml_table import ScenarioError

MAX_RUNS = 10_000
MIN_TOKENS = 64
"""Runs of fewer tokens are left out: warm-up and scheduling would count as speed."""
RUN_ERROR = 0.02
"""Relative error of one measured run, which is the mean over at least ``MIN_TOKENS`` tokens."""
SLOWNESS_DOUBT, MULTIPLIER_DOUBT, HOP_DOUBT_US = 2.0, 1.0, 5_000.0
"""Standard deviations of the unknowns before any run: nodes are up to a few times slower than benchmarks say, engines need
up to two round trips per hop, and milliseconds per hop are usual."""
HOP_DOUBT_SHARE = 0.1
"""… or, where tokens take long, so much of a token: on slow or busy machines a hop waits as everything else does."""
LEAST_SLOWNESS, MOST_ROUND_TRIPS = 0.5, 3.0
"""No node is more than twice as fast as its benchmark says, and no engine needs more than three round trips per hop: on a busy
machine, where every hop waits for a turn, nothing else keeps a fit from calling that waiting round trips and slow nodes fast."""
DETERMINED = 0.4

Vector = NDArray[np.float64]


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class LiveStage(_Row):
    """One stage as it served. ``work_us`` is what its layers should take, without the profile's overheads."""

    node: str = Field(min_length=1, max_length=200)
    layers: int = Field(gt=0, le=4_096)
    work_us: int = Field(ge=0, le=2**44)
    rtt_us: int | None = Field(default=None, ge=0, le=2**40)
    """Of the hop that leads here (star: between head and this node); ``None`` for stage 0."""


class LiveRun(_Row):
    """One plan and the time per token that stage 0 measured under it."""

    id: str = Field(min_length=1, max_length=200)
    profile: str = Field(max_length=200)
    engine: str = Field(default="", max_length=200)
    model: str = Field(default="", max_length=200)
    stages: tuple[LiveStage, ...] = Field(min_length=1, max_length=256)
    extra_us: int = Field(default=0, ge=0, le=2**44)
    """What the plan priced beside stages and hops' round trips: transfers, the reply of a chain."""
    predicted_us: int = Field(gt=0, le=2**44)
    measured_us: int = Field(gt=0, le=2**44)
    tokens: int = Field(ge=0, le=2**53)


@dataclass(frozen=True, slots=True)
class Estimate:
    """One unknown before and after the runs: microseconds, or a plain number."""

    before: float
    after: float
    determined: float
    """0 = the runs say nothing about it, 1 = they alone decide it."""


@dataclass(frozen=True, slots=True)
class LiveFit:
    """What the runs say. ``slowness``: by node, how many times as long its work takes as planned."""

    slowness: dict[str, Estimate]
    rtt_multiplier: Estimate
    per_hop_us: Estimate
    hop_us: Estimate
    """Both together, over the runs' mean round trip."""
    errors: tuple[tuple[LiveRun, float, float], ...]
    """(predicted − measured) / measured of every run, as it was planned and as it is fitted."""

    @property
    def values(self) -> dict[str, float]:
        """What a profile should be given: its parameters that the runs determine, in the profile file's units.

        Where all round trips are alike, nothing tells its share of a hop from the rest, but the hop as a whole may be known.
        """
        found = {"rtt_multiplier": self.rtt_multiplier.after, "per_hop_overhead_ms": self.per_hop_us.after / 1_000}
        known = {"rtt_multiplier": self.rtt_multiplier, "per_hop_overhead_ms": self.per_hop_us}
        return {
            key: round(value, 4)
            for key, value in found.items()
            if max(known[key].determined, self.hop_us.determined) >= DETERMINED
        }


def parse_live_runs(name: str, text: str) -> tuple[LiveRun, ...]:
    """The runs of a JSON document ``{"live_runs": […]}``. Raises ``ScenarioError`` naming the row and the key."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ScenarioError(name, getattr(error, "lineno", 0), "", f"not a JSON document: {error}") from error
    rows = document.get("live_runs") if isinstance(document, dict) else None
    if not isinstance(rows, list) or not rows or len(rows) > MAX_RUNS:
        raise ScenarioError(name, 0, "live_runs", f"needs a list of 1 to {MAX_RUNS} runs")
    runs = []
    for index, row in enumerate(rows):
        try:
            runs.append(LiveRun.model_validate(row))
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join((f"live_runs[{index}]", *(str(part) for part in first["loc"])))
            raise ScenarioError(name, 0, key, first["msg"]) from error
    return tuple(runs)


def fit_live(runs: Sequence[LiveRun], calibration: Calibration) -> LiveFit:
    """The unknowns of ``runs`` (all of one profile, whose values ``calibration`` are), at least one of enough tokens."""
    from scipy.optimize import lsq_linear  # a quarter of what `stagemesh --help` would wait for

    used = [run for run in runs if run.tokens >= MIN_TOKENS]
    assert used, "the caller refuses runs without enough tokens"
    names = sorted({stage.node for run in used for stage in run.stages})
    before = np.array([*(1.0 for _ in names), calibration.rtt_multiplier_milli / 1_000, calibration.per_hop_us])
    hop_doubt = max(
        HOP_DOUBT_US, calibration.per_hop_us, HOP_DOUBT_SHARE * float(np.median([r.measured_us for r in used]))
    )
    doubt = np.array([*(SLOWNESS_DOUBT for _ in names), MULTIPLIER_DOUBT, hop_doubt])
    least = np.array([*(LEAST_SLOWNESS for _ in names), 0.0, 0.0])
    most = np.array([*(np.inf for _ in names), max(MOST_ROUND_TRIPS, before[-2] + 0.01), np.inf])
    rows = np.array([_row(run, names) for run in used], dtype=np.float64)
    constant = np.array([_constant_us(run, calibration) for run in used], dtype=np.float64)
    measured = np.array([run.measured_us for run in used], dtype=np.float64)
    weighted = rows / (RUN_ERROR * measured)[:, None]
    stacked = np.vstack([weighted * doubt, np.eye(len(before))])  # unknowns in units of their doubt, from the prior
    target = np.concatenate([(measured - constant - rows @ before) / (RUN_ERROR * measured), np.zeros(len(before))])
    moved = lsq_linear(stacked, target, bounds=((least - before) / doubt, (most - before) / doubt)).x
    after = before + doubt * moved
    covariance = np.linalg.inv(stacked.T @ stacked)
    found = [_estimate(unknown, before, after, doubt, covariance) for unknown in np.eye(len(before))]
    hop = np.array([*(0.0 for _ in names), rows[:, -2].sum() / max(1.0, rows[:, -1].sum()), 1.0])
    fitted = constant + rows @ after
    errors = tuple(
        (run, run.predicted_us / run.measured_us - 1, float(value) / run.measured_us - 1)
        for run, value in zip(used, fitted, strict=True)
    )
    whole = _estimate(hop, before, after, doubt, covariance)
    return LiveFit(dict(zip(names, found[:-2], strict=True)), found[-2], found[-1], whole, errors)


def _estimate(of: Vector, before: Vector, after: Vector, doubt: Vector, covariance: NDArray[np.float64]) -> Estimate:
    """Of the sum ``of · unknowns``; ``covariance`` is in units of their doubts."""
    weights = of * doubt
    left = np.sqrt(weights @ covariance @ weights / (weights @ weights))
    return Estimate(float(of @ before), float(of @ after), float(1 - left))


def _row(run: LiveRun, names: Sequence[str]) -> list[float]:
    work_us = dict.fromkeys(names, 0)
    for stage in run.stages:
        work_us[stage.node] += stage.work_us
    hops = [stage.rtt_us for stage in run.stages if stage.rtt_us is not None]
    return [*(float(work_us[name]) for name in names), float(sum(hops)), float(len(hops))]


def _constant_us(run: LiveRun, calibration: Calibration) -> float:
    """What is taken as known: the stages' overheads and transfers."""
    layers = sum(stage.layers for stage in run.stages)
    per_stage = (calibration.per_stage_us + calibration.kv_touch_us) * len(run.stages)
    return float(run.extra_us + per_stage + calibration.per_layer_us * layers)
