"""A node whose state was lost: it may have promised what it does not know (PROTOCOL §7).

It listens first: for the settle time every ``Prepare`` is put off, so that rows can say which terms were used. Then a
ballot of a lower term than anybody shows is refused as if it had been promised to another; the first one that is not is
promised, written, and with it the slot remembers again. ``Stage`` and ``Activate`` need no rule of their own: they name the
process they were meant for, and that one is gone.
"""

from dataclasses import dataclass

from protocol.ballots import NackReason
from protocol.fencing import NO_EPOCH, PlanEpoch
from protocol.ids import Term


@dataclass(slots=True)
class Amnesia:
    """Until when to listen, and the highest term heard of."""

    until_us: int
    term: Term = 0

    def heard(self, term: Term) -> None:
        """Somebody's row mentions ``term``."""
        self.term = max(self.term, term)

    def refusal(self, ballot: PlanEpoch, now_us: int) -> tuple[NackReason, str, int] | None:
        """Reason, detail and the wait (µs) if ``ballot`` must not be promised now."""
        if now_us < self.until_us:
            return "state_unavailable", "the state was lost; listening to the mesh first", self.until_us - now_us
        if ballot.term < self.term:
            return "older_ballot", "the state was lost and newer terms are in use", 0
        return None

    @property
    def promised(self) -> PlanEpoch:
        """What to answer as promised: no ballot of this term or a later one is below it."""
        return PlanEpoch(self.term, NO_EPOCH.node_id, NO_EPOCH.instance)
