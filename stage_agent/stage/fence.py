"""The epoch check: one place, before any other logic (PROTOCOL §4).

Every rule looks only at the durable record and the message. A rule returns ``None`` (pass) or the reason of the ``Nack``.
A retransmission of the promised ballot passes ``prepare`` again: it grants nothing new, and the lost answer is repeated.
"""

from typing import Literal

from protocol.fencing import PlanEpoch
from stage_agent.stage.record import SlotRecord

Refusal = Literal["older_ballot", "sticky", "other_plan_accepted", "wrong_instance", "not_accepted"]


class BallotFence:
    """The rules of the table. Stateless."""

    def prepare(self, record: SlotRecord, ballot: PlanEpoch, *, sticky: bool) -> Refusal | None:
        """``ballot > promised`` and not sticky. ``sticky`` must already be false when the claim says ``force``."""
        if ballot < record.promised or ballot <= record.closed:
            return "older_ballot"
        if ballot == record.promised:
            return None
        return "sticky" if sticky else None

    def stage(self, record: SlotRecord, ballot: PlanEpoch, plan_hash: str) -> Refusal | None:
        """``ballot ≥ promised``, no other hash accepted at it, and it was not closed here."""
        if ballot < record.promised or ballot <= record.closed:
            return "older_ballot"
        for held in (record.accepted, record.active):
            if held is not None and held.ballot == ballot and held.plan_hash != plan_hash:
                return "other_plan_accepted"
        return None

    def activate(
        self, record: SlotRecord, ballot: PlanEpoch, plan_hash: str, *, instance_is_mine: bool
    ) -> Refusal | None:
        """``promised = ballot``, ``accepted = (ballot, hash)``, and the readiness was given by this process start."""
        if ballot < record.promised:
            return "older_ballot"
        if not instance_is_mine:
            return "wrong_instance"
        accepted = record.accepted
        if ballot != record.promised or accepted is None or accepted.ballot != ballot:
            return "not_accepted"
        if accepted.plan_hash != plan_hash:
            return "other_plan_accepted"
        return None

    def answers(self, record: SlotRecord, ballot: PlanEpoch) -> bool:
        """May ``Ready`` still be said at ``ballot``? Not after anything newer was promised."""
        return record.promised == ballot
