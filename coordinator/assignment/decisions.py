"""What is recorded of a decision to place a plan: why, from which plan to which, what it gains and what it costs.

The gain is per output token: predicted by the planner for a better plan, measured for a roll-back, unknown where nothing
works that could be compared. The cost is what the migration takes (``replan.migration_cost_us``), for a first plan its
loading alone.
"""

from coordinator.assignment.effects import Decision
from coordinator.assignment.rounds import Conclusion, Judgement, PlanningRound
from coordinator.assignment.running import RunningPlan
from coordinator.planner.plan import Plan
from protocol.ids import Slot


def placing(
    slot: Slot,
    concluded: PlanningRound,
    answer: Conclusion,
    plan: Plan,
    *,
    running: RunningPlan | None,
    judgement: Judgement,
    now_us: int,
) -> Decision:
    """The decision to place ``plan`` instead of ``running``."""
    back = concluded.need == "rollback"
    reason: str = concluded.need
    if answer.fallback:
        reason += ": on fewer nodes than wanted, because the wanted number has no plan"
    elif answer.moved_by_timing:
        reason += ": a cut moves half-way, by measured timings"
    elif back:
        reason += ": slower than before the cut was moved"
    verdict = answer.verdict
    gain_us = None if verdict is None else verdict.gain_us
    if back and running is not None and running.former is not None and judgement.observed is not None:
        gain_us = max(0, judgement.observed.tpot_us - running.former.tpot_us)
    current = answer.current or (None if running is None else running.plan)
    return Decision(
        at_us=now_us,
        slot=slot,
        kind="rolled_back" if back else "planned",
        reason=reason,
        old_plan="" if running is None else running.plan_hash,
        new_plan=plan.plan_hash,
        gain_us=gain_us,
        cost_us=judgement.cost_us(current, plan),
    )
