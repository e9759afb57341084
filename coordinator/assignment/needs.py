"""Does a slot need a planning round now, and why?"""

from typing import Literal

from config.settings import AssignmentSettings, ReplanSettings
from coordinator.assignment.moment import Moment
from coordinator.assignment.rounds import Need
from coordinator.assignment.running import RunningPlan
from coordinator.assignment.watch import PlanWatch
from coordinator.planner.problem import LockedTopology
from coordinator.replan import Observation, must_roll_back
from protocol.ids import NodeId


def rollback_due(
    settings: ReplanSettings, running: RunningPlan | None, observed: Observation | None, baseline_tpot_us: int | None
) -> bool:
    """The last move was by measured timings and made things worse. ``baseline_tpot_us``: measured before the move."""
    if running is None or running.rollback is None or observed is None or baseline_tpot_us is None:
        return False
    return must_roll_back(settings, before_tpot_us=baseline_tpot_us, observed=observed)


def need_of(
    watch: PlanWatch,
    locked: LockedTopology | None,
    settings: AssignmentSettings,
    moment: Moment,
    *,
    roll_back: bool,
    round_not_before_us: int,
) -> Need | Literal["deferred"] | None:
    """``None``: nothing to do now. ``deferred``: broken, but a survivor's node must settle first.

    A locked plan needs all of its nodes and is never replaced by another split. Whether a *changed* round really starts
    is then decided by the participant hash.
    """
    running, now_us = watch.running, moment.now_us
    if locked is not None and any(NodeId(stage.node_id) not in moment.plannable for stage in locked.stages):
        return None
    if running is None:
        return "initial" if moment.settled else None
    if locked is not None and running.topology().stages != locked.stages:
        return "broken" if moment.settled else None
    unsure = watch.unsure(moment)
    if watch.broken_since_us is not None:
        if now_us < watch.broken_since_us + settings.loss_replan_delay_us:
            return None
        waited = now_us >= watch.broken_since_us + settings.withdraw_grace_us
        return "deferred" if unsure and not waited else "broken"
    if locked is not None:
        return None
    if roll_back:
        return "rollback"
    if unsure or not moment.settled or now_us < round_not_before_us:
        return None
    return "changed"
