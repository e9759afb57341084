"""Does a slot need a planning round now, and why?"""

from typing import Literal

from config.settings import AssignmentSettings
from coordinator.assignment.moment import Moment
from coordinator.assignment.rounds import Need
from coordinator.assignment.watch import PlanWatch
from coordinator.planner.problem import LockedTopology
from protocol.ids import NodeId


def need_of(
    watch: PlanWatch,
    locked: LockedTopology | None,
    settings: AssignmentSettings,
    moment: Moment,
    *,
    rollback_due: bool,
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
    if rollback_due:
        return "rollback"
    if unsure or not moment.settled or now_us < round_not_before_us:
        return None
    return "changed"
