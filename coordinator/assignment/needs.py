"""Does a slot need a planning round now, and why?"""

from typing import Literal

from config.settings import AssignmentSettings, ReplanSettings
from coordinator.assignment.moment import Moment
from coordinator.assignment.rounds import Need
from coordinator.assignment.running import RunningPlan
from coordinator.assignment.watch import PlanWatch
from coordinator.planner.problem import LockedTopology
from coordinator.replan import Observation, Verdict, must_roll_back
from protocol.ids import NodeId

TRAFFIC_RECHECK_US = 300_000_000
"""Traffic is no participant: a migration that would not pay for itself is priced again this often."""


def rollback_due(settings: ReplanSettings, running: RunningPlan | None, observed: Observation | None) -> bool:
    """The last move was by measured timings and made things worse, whoever made it."""
    if running is None or running.former is None or observed is None or running.former_topology() is None:
        return False
    return must_roll_back(settings, before_tpot_us=running.former.tpot_us, observed=observed)


def recheck_at_us(verdict: Verdict, running: RunningPlan, settings: ReplanSettings, now_us: int) -> int | None:
    """When a verdict may be another although no participant has changed: the dwell ends, or traffic has grown."""
    if verdict.reason == "dwell":
        return max(now_us + 1, running.active_since_us + settings.min_dwell_us)
    if verdict.reason == "not_amortised":
        return now_us + TRAFFIC_RECHECK_US
    return None


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
    able = moment.plannable | moment.reserve
    if locked is not None and any(NodeId(stage.node_id) not in able for stage in locked.stages):
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
        return "deferred" if not moment.reserve.issuperset(unsure) and not waited else "broken"
    if locked is not None:
        return None
    if roll_back:
        return "rollback"
    if unsure or not moment.settled or now_us < round_not_before_us:
        return None
    return "changed"
