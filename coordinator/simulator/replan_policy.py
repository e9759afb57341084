"""When a running plan is replaced in a simulation: the coordinator's own judgement, seen from one situation.

A *broken* plan (a stage's node is gone) is replaced as soon as membership has settled and the new plan has loaded. A
healthy one is judged by ``coordinator.replan``, the function the elected coordinator uses: better by
``min_improvement``, active for ``min_dwell``, and worth its migration. The policy is a parameter of the simulation:
another function of a ``Situation`` can be put in its place.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from config.settings import AssignmentSettings, ReplanSettings
from coordinator.planner.plan import Plan
from coordinator.replan import Observation, Verdict, judge

US_PER_HOUR = 3_600_000_000


@dataclass(frozen=True, slots=True)
class Situation:
    """What a policy may look at. Both plans are priced under the present conditions."""

    now_us: int
    active_since_us: int
    broken: bool
    locked: bool
    current: Plan
    candidate: Plan | None
    """The planner's best over the nodes that are up; ``None`` when it has none."""
    tokens: int
    """Delivered since the start of the run."""
    load_bytes_per_s: int


@dataclass(frozen=True, slots=True)
class Decision:
    """``review_at_us`` asks to be called again; ``reason`` is shown."""

    kind: Literal["keep", "replace", "withdraw"]
    reason: str
    review_at_us: int | None = None


ReplanPolicy = Callable[[Situation], Decision]


def production_policy(settings: ReplanSettings | None = None) -> ReplanPolicy:
    """The policy of the daemon under ``settings``."""
    knobs = settings or ReplanSettings()

    def decide(situation: Situation) -> Decision:
        if situation.locked:
            return Decision("withdraw" if situation.broken else "keep", "a locked plan is never replaced")
        if situation.broken:
            if situation.candidate is None:
                return Decision("withdraw", "no other node can hold the model")
            return Decision("replace", "the plan is broken")
        return _degraded(situation, knobs)

    return decide


def _degraded(situation: Situation, knobs: ReplanSettings) -> Decision:
    if situation.candidate is None:
        return Decision("keep", "there is no other plan")
    active_for_us = situation.now_us - situation.active_since_us
    verdict = judge(
        knobs,
        AssignmentSettings(load_bytes_per_s_floor=situation.load_bytes_per_s),
        current=situation.current,
        candidate=situation.candidate,
        active_for_us=active_for_us,
        observed=_observed(situation),
    )
    review = situation.active_since_us + knobs.min_dwell_us if verdict.reason == "dwell" else None
    kind: Literal["replace", "keep"] = "replace" if verdict.replace else "keep"
    return Decision(kind, _sentence(verdict, knobs), review)


def _observed(situation: Situation) -> Observation | None:
    tpot_us = situation.current.modeled.decode_tpot_us
    if tpot_us is None or situation.now_us == 0:
        return None
    return Observation(tpot_us, situation.tokens, situation.tokens * US_PER_HOUR // situation.now_us)


def _sentence(verdict: Verdict, knobs: ReplanSettings) -> str:
    gain, cost = f"{verdict.gain_us / 1e3:.1f} ms per token", f"{verdict.cost_us / 1e6:.1f} s"
    match verdict.reason:
        case "same_plan" | "not_better":
            return "still the best plan"
        case "below_min_improvement":
            return f"another plan gains {gain}, less than {knobs.min_improvement_milli / 10:g} %"
        case "dwell":
            return f"another plan gains {gain}; the running one must be active for {knobs.min_dwell_us / 1e6:g} s"
        case "not_amortised":
            return f"another plan gains {gain}, too little traffic for a move of {cost}"
        case "rejected_before":
            return "the other plan was tried and rolled back"
        case "better":
            return f"gains {gain} for a move of {cost}"


def repriced(plan: Plan, tpot_us: int, period_us: int, streams: int) -> Plan:
    """``plan`` with its modelled speed under other conditions; what was not modelled stays unknown."""
    if plan.modeled.decode_tpot_us is None:
        return plan
    modeled = replace(
        plan.modeled,
        decode_tpot_us=tpot_us,
        pipelined_period_us=period_us,
        tokens_per_s=streams * 1e6 / max(1, tpot_us, streams * period_us),
    )
    return replace(plan, modeled=modeled)
