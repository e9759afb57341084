"""Keep or replace: is a better plan worth its migration (DESIGN §10)?

Asked only for a plan that works. The candidate and the running plan are priced by the same planner under the same
signals. The candidate wins when all of these hold:

* it is another plan, and better by at least ``min_improvement`` in the figure of the objective: modelled TPOT
  (``interactive``), time per token at the stated concurrency (``throughput``), context × lanes (``capacity``, and
  whenever one of the two is not modelled);
* the running plan has been active for ``min_dwell``;
* gain per token × tokens expected in ``amortisation_window`` exceeds the migration cost. The expectation is the observed
  traffic; with none observed yet, one stream that never pauses.

When only measured decode timings changed, a cut moves at most half-way to where the candidate wants it: the timing of a
range is only known for the range that was measured. A plan that turned out more than ``rollback_loss`` slower than what
it replaced is rolled back, and its hash is not tried again for as long as the participant set stays the same.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from config.settings import AssignmentSettings, ReplanSettings
from coordinator.planner.plan import Plan
from coordinator.planner.problem import LockedStage, LockedTopology
from protocol.fencing import PlanEpoch
from protocol.ids import NodeId

ROLLBACK_MIN_TOKENS = 64
"""A roll-back needs at least this many tokens measured under the new plan."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What stage 0 measured since the plan became active. ``tokens_per_hour`` is over the last hour at most.

    ``ballot`` says under which plan; ``None`` = the one that runs.
    """

    tpot_us: int
    tokens: int
    tokens_per_hour: int | None = None
    ballot: PlanEpoch | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """``gain_us`` per token (0 when not modelled) and ``cost_us`` of the migration."""

    replace: bool
    reason: Literal[
        "same_plan",
        "not_better",
        "below_min_improvement",
        "dwell",
        "not_amortised",
        "rejected_before",
        "better",
    ]
    gain_us: int = 0
    cost_us: int = 0


def judge(
    settings: ReplanSettings,
    assignment: AssignmentSettings,
    *,
    current: Plan,
    candidate: Plan,
    active_for_us: int,
    observed: Observation | None = None,
    missing_bytes: Mapping[NodeId, int] | None = None,
    break_first: bool = False,
    rejected: frozenset[str] = frozenset(),
    reloads: frozenset[NodeId] = frozenset(),
) -> Verdict:
    """The verdict, checked in the order of the theory above; ties keep the running plan."""
    if candidate.plan_hash == current.plan_hash:
        return Verdict(replace=False, reason="same_plan")
    if candidate.plan_hash in rejected:
        return Verdict(replace=False, reason="rejected_before")
    before, after = figures(current, candidate)
    if after >= before:
        return Verdict(replace=False, reason="not_better")
    cost_us = migration_cost_us(
        assignment,
        current=current,
        candidate=candidate,
        missing_bytes=missing_bytes or {},
        break_first=break_first,
        reloads=reloads,
    )
    gain_us = _tpot_gain_us(current, candidate)
    if (before - after) * 1000 < before * settings.min_improvement_milli:
        return Verdict(False, "below_min_improvement", gain_us, cost_us)
    if active_for_us < settings.min_dwell_us:
        return Verdict(False, "dwell", gain_us, cost_us)
    if gain_us and gain_us * _expected_tokens(settings, current, observed) <= cost_us:
        return Verdict(False, "not_amortised", gain_us, cost_us)
    return Verdict(True, "better", gain_us, cost_us)


def figures(current: Plan, candidate: Plan) -> tuple[int, int]:
    """Comparable costs of both plans, smaller is better; falls back to capacity when either is not modelled."""
    objective = candidate.objective
    if objective == "throughput":
        speeds = current.modeled.tokens_per_s, candidate.modeled.tokens_per_s
        if speeds[0] and speeds[1]:
            return int(1e9 / speeds[0]), int(1e9 / speeds[1])
    if objective == "interactive":
        times = current.modeled.decode_tpot_us, candidate.modeled.decode_tpot_us
        if times[0] is not None and times[1] is not None:
            return times[0], times[1]
    sizes = [max(1, plan.context_length * plan.parallel_lanes) for plan in (current, candidate)]
    return 2**53 // sizes[0], 2**53 // sizes[1]


def migration_cost_us(
    assignment: AssignmentSettings,
    *,
    current: Plan | None,
    candidate: Plan,
    missing_bytes: Mapping[NodeId, int],
    break_first: bool,
    reloads: frozenset[NodeId] = frozenset(),
) -> int:
    """Bytes to fetch and load on the slowest node, the caches to rebuild, and the stall while nothing serves.

    ``reloads``: nodes whose engines load even an unchanged range anew. Without a ``current`` plan everything is loaded.
    """
    kept = frozenset[str]() if current is None else kept_stages(current, candidate, reloads)
    load_us = 0
    for stage in candidate.stages:
        if stage.node_id in kept:
            continue
        fetch = min(missing_bytes.get(NodeId(stage.node_id), 0), stage.parameter_bytes)
        bytes_to_move = stage.parameter_bytes + fetch
        load_us = max(load_us, -(-bytes_to_move * 1_000_000 // assignment.load_bytes_per_s_floor))
    rebuild_us = (candidate.modeled.ttft_us or 0) * candidate.parallel_lanes
    return load_us + rebuild_us + (load_us if break_first else assignment.reply_timeout_us)


def kept_stages(current: Plan, candidate: Plan, reloads: frozenset[NodeId]) -> frozenset[str]:
    """Nodes that serve the candidate with what they have loaded: same range, context and lanes, and an engine that can."""
    same_cache = (current.context_length, current.parallel_lanes) == (
        candidate.context_length,
        candidate.parallel_lanes,
    )
    old = {(stage.node_id, stage.layer_start, stage.layer_end) for stage in current.stages} if same_cache else set()
    return frozenset(
        stage.node_id
        for stage in candidate.stages
        if stage.node_id not in reloads and (stage.node_id, stage.layer_start, stage.layer_end) in old
    )


def damped(current: Plan, candidate: Plan) -> LockedTopology | None:
    """The candidate's cuts, each moved at most half-way from the running plan's; ``None`` if the nodes differ.

    Half-way is rounded towards the candidate, so that repeated steps arrive. Cuts stay ordered because both ends are.
    """
    if [stage.node_id for stage in current.stages] != [stage.node_id for stage in candidate.stages]:
        return None
    cuts = [0]
    for old, new in zip(current.stages[:-1], candidate.stages[:-1], strict=True):
        distance = new.layer_end - old.layer_end
        step = (abs(distance) + 1) // 2
        cuts.append(old.layer_end + (step if distance > 0 else -step))
    cuts.append(candidate.layer_count)
    if any(start >= end for start, end in itertools.pairwise(cuts)):
        return None
    return LockedTopology(
        tuple(
            LockedStage(stage.node_id, start, end)
            for stage, (start, end) in zip(candidate.stages, itertools.pairwise(cuts), strict=True)
        )
    )


def must_roll_back(settings: ReplanSettings, *, before_tpot_us: int, observed: Observation) -> bool:
    """The throughput fell by more than ``rollback_loss`` after the move, measured over enough tokens."""
    if observed.tokens < ROLLBACK_MIN_TOKENS:
        return False
    # throughput = 1/tpot: after < before·(1 − loss)  ⇔  tpot_after·(1000 − loss) > tpot_before·1000
    return observed.tpot_us * (1000 - settings.rollback_loss_milli) > before_tpot_us * 1000


def _tpot_gain_us(current: Plan, candidate: Plan) -> int:
    before, after = current.modeled.decode_tpot_us, candidate.modeled.decode_tpot_us
    return 0 if before is None or after is None else max(0, before - after)


def _expected_tokens(settings: ReplanSettings, current: Plan, observed: Observation | None) -> int:
    if observed is not None and observed.tokens_per_hour is not None:
        return observed.tokens_per_hour * settings.amortisation_window_us // 3_600_000_000
    return settings.amortisation_window_us // max(1, current.modeled.decode_tpot_us or 1)
