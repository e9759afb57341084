"""Whom a node takes for the coordinator, and when it changes its mind.

It follows the canonical choice of a *settled* view, at once where the choice already serves or is pinned. Before the view has
settled it stays with the incumbent; one that is gone is replaced after a short delay. An incumbent that was restarted and has
nothing left that serves is gone too: it waits to be chosen, and the others would wait for it.
"""

from typing import TYPE_CHECKING, Final

from coordinator.election.canonical import canonical_coordinator, serving_ballot
from coordinator.election.settle import SettleBarrier
from coordinator.view import ClusterView

if TYPE_CHECKING:
    from protocol.ids import NodeId


class Follower:
    """``node_id`` is who should coordinate; ``None`` before anybody was chosen, and where nobody can."""

    def __init__(self, barrier: SettleBarrier, gone_delay_us: int) -> None:
        self.node_id: NodeId | None = None
        self._instance = ""
        """The incumbent's process."""
        self._barrier: Final = barrier
        self._gone_delay_us: Final = gone_delay_us
        self._gone_since_us: int | None = None

    def look(self, view: ClusterView, pin: str, now_us: int) -> None:
        """The view, the pin or the time has changed."""
        choice = canonical_coordinator(view, counts=lambda node_id: self._barrier.counts(node_id, now_us), pin=pin)
        ballot = serving_ballot(view)
        choice_serves = ballot is not None and choice == ballot.node_id
        if (
            choice == self.node_id
            or self._barrier.settled(now_us)
            or choice_serves
            or (pin and choice == pin)
            or self._is_gone_for_good(view, now_us)
        ):
            self.node_id, self._gone_since_us = choice, None
            self._instance = "" if choice is None else view.members[choice].row.instance

    def next_deadline(self) -> int | None:
        """When an incumbent that is gone is replaced, monotonic µs."""
        return None if self._gone_since_us is None else self._gone_since_us + self._gone_delay_us

    def _is_gone_for_good(self, view: ClusterView, now_us: int) -> bool:
        """Missed for the whole delay."""
        if self.node_id is None:
            return False
        incumbent = view.connected.get(self.node_id)
        if incumbent is not None and incumbent.row.instance == self._instance:
            self._gone_since_us = None
            return False
        if self._gone_since_us is None:
            self._gone_since_us = now_us
        return now_us >= self._gone_since_us + self._gone_delay_us
