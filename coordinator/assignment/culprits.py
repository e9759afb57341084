"""Nodes that refused or failed a stage are left out for a while, longer each time until they take part in a plan again.

Where a model has no plan without them, they may be asked after a ``NEED_SHARE``-th of that while.
"""

from typing import Final

from config.settings import AssignmentSettings
from coordinator.election.settle import NEED_SHARE
from coordinator.view import ClusterView
from protocol.ids import NodeId

MAX_FAILURES = 16


class Culprits:
    """One slot's memory of who failed it. Bounded by the members of the view."""

    def __init__(self, settings: AssignmentSettings) -> None:
        self._settings: Final = settings
        self._reserve_us: dict[NodeId, int] = {}
        self._until_us: dict[NodeId, int] = {}
        self._failures: dict[NodeId, int] = {}
        self._reasons: dict[NodeId, str] = {}

    def blame(self, node_id: NodeId, reason: str, now_us: int) -> None:
        """Leave ``node_id`` out from now on."""
        failures = self._failures.get(node_id, 0)
        wait_us = min(self._settings.culprit_backoff_us << failures, self._settings.culprit_backoff_max_us)
        self._reserve_us[node_id] = now_us + wait_us // NEED_SHARE
        self._until_us[node_id] = now_us + wait_us
        self._failures[node_id] = min(MAX_FAILURES, failures + 1)
        self._reasons[node_id] = reason

    def absolve(self, node_id: NodeId) -> None:
        """It took part in a plan that became active."""
        for memory in (self._reserve_us, self._until_us, self._failures, self._reasons):
            memory.pop(node_id, None)

    def current(self, now_us: int) -> dict[NodeId, str]:
        """Who is left out now, and why."""
        return {node_id: self._reasons[node_id] for node_id, until in self._until_us.items() if now_us < until}

    def barred(self, now_us: int) -> dict[NodeId, str]:
        """Those of ``current`` who are left out even where nothing can be placed without them."""
        return {node_id: why for node_id, why in self.current(now_us).items() if now_us < self._reserve_us[node_id]}

    def next_deadline(self, now_us: int) -> int | None:
        """When the next one may be tried again; what is sooner in need, the coordinator's own tick notices."""
        return min((until for until in self._until_us.values() if until > now_us), default=None)

    def forget_absent(self, view: ClusterView) -> None:
        """Members that no longer exist need no memory."""
        for node_id in [known for known in self._until_us if known not in view.members]:
            self.absolve(node_id)
