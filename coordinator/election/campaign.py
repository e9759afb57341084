"""Terms and back-off of one would-be coordinator.

``term = 1 + max(last used, every term seen)``. A refusal teaches a term and costs ``U(1, 2)·2^k`` seconds, at most
``backoff_max_us``; success forgets the failures.
"""

from random import Random
from typing import Final

from config.settings import ElectionSettings
from protocol.fencing import PlanEpoch, next_term
from protocol.ids import Instance, NodeId, Term

MAX_EXPONENT = 16


class Campaign:
    """The node's only source of ballots."""

    def __init__(
        self, *, node_id: NodeId, instance: Instance, last_term: Term, settings: ElectionSettings, random: Random
    ) -> None:
        self._node_id: Final = node_id
        self._instance: Final = instance
        self._settings: Final = settings
        self._random: Final = random
        self._last_term = last_term
        self._seen_term = last_term
        self._failures = 0
        self.not_before_us = 0
        """No new ballot before this."""

    @property
    def term(self) -> Term:
        """The highest term used or seen."""
        return max(self._last_term, self._seen_term)

    def learn(self, term: Term) -> None:
        """Somebody mentioned ``term``."""
        self._seen_term = max(self._seen_term, term)

    def next_ballot(self) -> PlanEpoch:
        """A ballot above everything seen. Its term must be persisted before the ballot is used."""
        self._last_term = next_term(self._last_term, self._seen_term)
        return PlanEpoch(self._last_term, self._node_id, self._instance)

    def claim(self) -> PlanEpoch:
        """A ballot above everything seen that is never prepared or staged: proof that a retirement is not an old one."""
        return PlanEpoch(next_term(self._last_term, self._seen_term), self._node_id, self._instance)

    def refused(self, now_us: int, retry_after_us: int = 0, *, contested: bool = True) -> int:
        """Back off; returns the moment of the next try, never before ``retry_after_us`` from now.

        Only contested ballots double the wait; after any other failure ``U(1, 2)`` s is enough.
        """
        spread = self._random.randint(1_000_000, 2_000_000)
        wait_us = min(spread << self._failures, self._settings.backoff_max_us) if contested else spread
        if contested:
            self._failures = min(MAX_EXPONENT, self._failures + 1)
        self.not_before_us = max(self.not_before_us, now_us + max(wait_us, retry_after_us))
        return self.not_before_us

    def succeeded(self) -> None:
        """A plan became active: failures are forgotten."""
        self._failures = 0
        self.not_before_us = 0
