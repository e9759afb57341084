"""When a running plan is replaced, as a function of one situation: the rules of DESIGN §10 that matter to one run.

A *broken* plan (a stage's node is gone) is replaced as soon as membership has settled and the new plan is loaded. A
healthy one that has become slower is replaced only when the new plan is better by ``min_improvement``, the current one
has been active for ``min_dwell``, and what the better plan saves over ``amortisation_window`` exceeds what the change
costs. The function is a parameter of the simulation: another policy can be put in its place.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from config.settings import ReplanSettings


@dataclass(frozen=True, slots=True)
class Situation:
    """What a policy may look at. Times in µs."""

    now_us: int
    active_since_us: int
    broken: bool
    locked: bool
    current_tpot_us: int | None
    """The running plan under the present conditions; ``None`` when broken."""
    candidate_tpot_us: int | None
    """The planner's best under the present conditions; ``None`` when it has none."""
    same_plan: bool
    migration_us: int
    """Loading the candidate plus rebuilding the caches of the running requests."""
    demand_milli: int
    """Share of time that requests are in service, in thousandths: traffic that a better plan would speed up."""


@dataclass(frozen=True, slots=True)
class Decision:
    """``review_at_us`` asks to be called again; ``reason`` is shown."""

    kind: Literal["keep", "replace", "withdraw"]
    reason: str
    review_at_us: int | None = None


ReplanPolicy = Callable[[Situation], Decision]


def hysteresis(settings: ReplanSettings | None = None) -> ReplanPolicy:
    """The default policy under ``settings``."""
    knobs = settings or ReplanSettings()

    def decide(situation: Situation) -> Decision:
        if situation.broken:
            if situation.locked:
                return Decision("withdraw", "a locked plan is never replaced")
            if situation.candidate_tpot_us is None:
                return Decision("withdraw", "no other node can hold the model")
            return Decision("replace", "the plan is broken")
        return _degraded(situation, knobs)

    return decide


def _degraded(situation: Situation, knobs: ReplanSettings) -> Decision:
    current, candidate = situation.current_tpot_us, situation.candidate_tpot_us
    if situation.locked:
        return Decision("keep", "locked")
    if situation.same_plan or candidate is None or current is None:
        return Decision("keep", "still the best plan")
    gain_milli = (current - candidate) * 1_000 // current
    if gain_milli < knobs.min_improvement_milli:
        return Decision(
            "keep", f"another plan gains {gain_milli / 10:.1f} %, below {knobs.min_improvement_milli / 10:g} %"
        )
    dwell_ends = situation.active_since_us + knobs.min_dwell_us
    if situation.now_us < dwell_ends:
        waits = f"another plan gains {gain_milli / 10:.1f} %; the running one must be active for {knobs.min_dwell_us / 1e6:g} s"
        return Decision("keep", waits, review_at_us=dwell_ends)
    saved_us = knobs.amortisation_window_us * gain_milli * situation.demand_milli // 1_000_000
    if saved_us <= situation.migration_us:
        return Decision(
            "keep", f"gains {saved_us / 1e6:.0f} s in an hour, moving costs {situation.migration_us / 1e6:.0f} s"
        )
    return Decision("replace", f"gains {gain_milli / 10:.1f} %")
