"""Says what the cores did in words for people, with names instead of ids, and counts it for metrics."""

from typing import Any

from coordinator.assignment.effects import Decision
from protocol.ballots import Active, BallotReply, Nack, Promise, Ready, StageAssignment, StageProgress
from protocol.ids import NodeId
from protocol.membership.core import Membership
from protocol.membership.effects import Conflict, MemberChanged
from stage_agent.journal import Journal

OUTCOMES = {
    "planned": "begun",
    "refused": "refused",
    "kept": "kept",
    "adopted": "adopted",
    "activated": "replaced",
    "attempt_failed": "failed",
    "broken": "begun",
    "deferred": "deferred",
    "rolled_back": "rolled_back",
    "withdrawn": "withdrawn",
    "retired_foreign": "withdrawn",
    "operator": "begun",
    "measured_far_below_predicted": "reported",
}
"""Decision kind → ``outcome`` of ``replan_total``."""


NAMES_KEPT = 4_096
"""Names of nodes that may be gone since; the one learnt first is forgotten first."""


class Narrator:
    """Reads the membership for names; writes the journal. Decides nothing."""

    def __init__(self, membership: Membership, journal: Journal) -> None:
        self._membership = membership
        self._journal = journal
        self._names: dict[str, str] = {}

    def name_of(self, node_id: str) -> str:
        """The node's name for people, also of one that is gone since, or the beginning of its id."""
        member = self._membership.members().get(NodeId(node_id))
        return member.row.name if member is not None else self._names.get(node_id, node_id[:8])

    def spoken(self, text: str) -> str:
        """``text`` with names for node ids."""
        for node_id, member in self._membership.members().items():
            text = text.replace(node_id, member.row.name)
        return text

    def member(self, change: MemberChanged) -> None:
        """A member came, went, or is in doubt."""
        if change.new is not None:
            self._names[change.node_id] = self.name_of(change.node_id)
            if len(self._names) > NAMES_KEPT:
                del self._names[next(iter(self._names))]
        state = change.new or "forgotten"
        was = f", was {change.old}" if change.old else ""
        text = f"{self.name_of(change.node_id)} is {state}{was} ({change.reason})"
        self._journal.tell("member_changed", text, node_id=change.node_id, state=state, reason=change.reason)

    def conflict(self, conflict: Conflict) -> None:
        """One identity, two processes."""
        text = f"two live processes use the identity of {self.name_of(conflict.node_id)}: stop one of them"
        self._journal.tell("identity_conflict", text, "error", node_id=conflict.node_id)

    def stage(self, kind: str, verb: str, epoch: str, assignment: StageAssignment) -> None:
        """This node's stage begins to load or to serve."""
        text = f"{verb} layers [{assignment.layer_start}, {assignment.layer_end}) of {assignment.slot}"
        self._journal.tell(kind, text, slot=assignment.slot, epoch=epoch)

    def decision(self, decision: Decision) -> None:
        """The coordinator decided something; counted by kind and outcome, both bounded."""
        self._journal.replans[decision.kind, OUTCOMES[decision.kind]] += 1
        fields: dict[str, Any] = {
            "slot": decision.slot,
            "old_plan": decision.old_plan,
            "new_plan": decision.new_plan,
            "gain_us": decision.gain_us,
            "cost_us": decision.cost_us,
        }
        self._journal.tell(f"plan_{decision.kind}", f"{self.spoken(decision.reason)}{_stakes(decision)}", **fields)

    def reply(self, message: BallotReply) -> None:
        """What this agent answered a coordinator."""
        match message:
            case Promise():
                self._journal.claims["promised"] += 1
            case Nack(claim="prepare"):
                self._journal.claims["refused"] += 1
            case Ready():
                self._journal.assignments["ready"] += 1
            case Active():
                self._journal.assignments["active"] += 1
            case Nack():
                self._journal.assignments["refused"] += 1
            case StageProgress():
                pass


def _stakes(decision: Decision) -> str:
    """From which plan to which, what it gains and what it costs, as far as that is known."""
    parts: list[str] = []
    old, new = decision.old_plan[:8], decision.new_plan[:8]
    if new and new != old:
        parts.append(f"plan {old} → {new}" if old else f"plan {new}")
    elif old:
        parts.append(f"plan {old}")
    if decision.gain_us:
        parts.append(f"gains {decision.gain_us / 1000:.1f} ms a token")
    if decision.cost_us:
        parts.append(f"moving costs {decision.cost_us / 1e6:.1f} s")
    return f" ({', '.join(parts)})" if parts else ""
