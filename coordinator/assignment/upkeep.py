"""What a coordinator says to keep a plan alive and to clear away what is not part of it.

A coordinator that slept through its own replacement must not harm what came after it: what is newer than its own plan it
leaves alone until its rows have shown for a while that it is no plan.
"""

from coordinator.assignment.effects import Decided, Decision, Effect, Send
from coordinator.assignment.running import RunningPlan
from coordinator.view import ClusterView
from protocol.ballots import Keepalive, Retire
from protocol.fencing import PlanEpoch, epoch_from_wire, epoch_to_wire
from protocol.ids import NodeId, Slot

STRAY_GRACE_US = 10_000_000
"""How long a stage outside the plan is left alone before it counts as forgotten."""


def keepalives(running: RunningPlan) -> list[Effect]:
    """To every stage; resets the orphan timer, also of a plan that another coordinator placed."""
    message = Keepalive(ballot=epoch_to_wire(running.ballot), slot=running.slot)
    return [Send(node_id, message) for node_id in running.nodes]


def retire_all(running: RunningPlan, claim: PlanEpoch, reason: str) -> list[Effect]:
    """Stop the plan everywhere. ``claim`` is newer than the plan's ballot and entitles a coordinator that adopted it."""
    return [_retire(running.slot, running.ballot, node_id, claim, reason) for node_id in running.nodes]


def retire_left_out(old: RunningPlan, new: RunningPlan) -> list[Effect]:
    """After ``new`` is active: agents that are not in it unload ``old``."""
    return [
        _retire(old.slot, old.ballot, node_id, new.ballot, "not in the new plan")
        for node_id in old.nodes
        if node_id not in new.nodes
    ]


class Strays:
    """Whatever rows show of a slot outside the running plan: left over from a partition or a failed attempt.

    What is older than the running plan goes at once. What is newer, or stands alone, may be somebody's plan in the making:
    it goes after ``STRAY_GRACE_US``, under a claim above every ballot seen.
    """

    def __init__(self) -> None:
        self._told: set[tuple[NodeId, PlanEpoch]] = set()
        """Retirements are repeated until rows show them, recorded once."""
        self._seen_us: dict[tuple[NodeId, PlanEpoch], int] = {}

    def note(self, slot: Slot, running: RunningPlan | None, view: ClusterView, now_us: int) -> None:
        """See what there is and since when; also while it is no time to clear anything away."""
        seen_us: dict[tuple[NodeId, PlanEpoch], int] = {}
        for node_id, member in view.connected.items():
            fact = member.fact(slot)
            if fact is not None and fact.active is not None and (running is None or node_id not in running.nodes):
                key = node_id, epoch_from_wire(fact.active)
                seen_us[key] = self._seen_us.get(key, now_us)
        self._seen_us = seen_us
        self._told &= seen_us.keys()

    def clear(
        self, slot: Slot, running: RunningPlan | None, view: ClusterView, claim: PlanEpoch, now_us: int
    ) -> list[Effect]:
        """Retire what is due, served or only accepted; remembers the rest."""
        self.note(slot, running, view, now_us)
        effects: list[Effect] = []
        for node_id, member in view.connected.items():
            fact = member.fact(slot)
            if fact is None:
                continue
            active = None if fact.active is None else epoch_from_wire(fact.active)
            since_us = None if active is None else self._seen_us.get((node_id, active))
            if active is not None and since_us is not None:
                older = running is not None and active < running.ballot
                if older or now_us - since_us >= STRAY_GRACE_US:
                    effects.append(_retire(slot, active, node_id, claim, "not part of the plan"))
                    if (node_id, active) not in self._told:
                        self._told.add((node_id, active))
                        effects.append(_foreign(slot, node_id, active, fact.plan_hash, now_us))
            accepted = None if fact.accepted is None else epoch_from_wire(fact.accepted)
            if running is not None and accepted is not None and accepted < running.ballot:
                effects.append(_retire(slot, accepted, node_id, running.ballot, "a newer plan serves"))
        return effects


def _foreign(slot: Slot, node_id: NodeId, ballot: PlanEpoch, plan_hash: str | None, now_us: int) -> Decided:
    text = f"{node_id} serves {ballot}, which is not part of the plan"
    return Decided(Decision(now_us, slot, "retired_foreign", text, plan_hash or ""))


def _retire(slot: Slot, ballot: PlanEpoch, node_id: NodeId, claim: PlanEpoch, reason: str) -> Effect:
    message = Retire(ballot=epoch_to_wire(ballot), slot=slot, superseded_by=epoch_to_wire(claim), reason=reason)
    return Send(node_id, message)
