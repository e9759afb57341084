"""What a coordinator says to keep a plan alive and to clear away what is not part of it.

Only *lower* ballots than the running plan's are ever cleared: a coordinator that slept through its own replacement can
not harm what came after it.
"""

from coordinator.assignment.effects import Effect, Send
from coordinator.assignment.running import RunningPlan
from coordinator.view import ClusterView
from protocol.ballots import Abort, Keepalive, Retire
from protocol.fencing import PlanEpoch, epoch_from_wire, epoch_to_wire
from protocol.ids import NodeId


def keepalives(running: RunningPlan) -> list[Effect]:
    """To every stage; resets the orphan timer, also of a plan that another coordinator placed."""
    message = Keepalive(ballot=epoch_to_wire(running.ballot), slot=running.slot)
    return [Send(node_id, message) for node_id in running.nodes]


def retire_all(running: RunningPlan, claim: PlanEpoch, reason: str) -> list[Effect]:
    """Stop the plan everywhere. ``claim`` is newer than the plan's ballot and entitles a coordinator that adopted it."""
    return [_retire(running, node_id, claim, reason) for node_id in running.nodes]


def retire_left_out(old: RunningPlan, new: RunningPlan) -> list[Effect]:
    """After ``new`` is active: agents that are not in it unload ``old``."""
    return [
        _retire(old, node_id, new.ballot, "not in the new plan") for node_id in old.nodes if node_id not in new.nodes
    ]


def retire_foreign(running: RunningPlan, view: ClusterView) -> list[Effect]:
    """Whatever rows show at lower ballots outside the running plan: left over from a partition or a failed attempt."""
    effects: list[Effect] = []
    for node_id, member in view.connected.items():
        fact = member.fact(running.slot)
        if fact is None:
            continue
        mine = node_id in running.nodes
        if fact.active is not None and not mine and epoch_from_wire(fact.active) < running.ballot:
            retire = Retire(
                ballot=fact.active,
                slot=running.slot,
                superseded_by=epoch_to_wire(running.ballot),
                reason="a newer plan serves",
            )
            effects.append(Send(node_id, retire))
        if fact.accepted is not None and epoch_from_wire(fact.accepted) < running.ballot:
            abort = Abort(ballot=fact.accepted, slot=running.slot, reason="a newer plan serves")
            effects.append(Send(node_id, abort))
    return effects


def _retire(running: RunningPlan, node_id: NodeId, claim: PlanEpoch, reason: str) -> Effect:
    message = Retire(
        ballot=epoch_to_wire(running.ballot), slot=running.slot, superseded_by=epoch_to_wire(claim), reason=reason
    )
    return Send(node_id, message)
