"""The stage fence of frames (PROTOCOL §4 and §6): which frames a serving stage may apply.

Per slot: the active plan epoch, the first request id of that plan, and for each open flow the newest request epoch seen.
A frame passes only if its plan epoch *is* the active one, its request is not older than the plan, and it is not stale
within its own flow. Flows are remembered up to ``MAX_FLOWS``; the least recently used is forgotten first, which can
only let a stale frame of an idle flow through to the engine's own sequence check.
"""

from dataclasses import dataclass
from typing import Literal, Protocol, Self

from protocol.fencing import PlanEpoch

MAX_FLOWS = 4_096


class FlowEpoch(Protocol):
    """A request epoch: ``(request, session)`` names the flow; order exists only within a flow."""

    @property
    def request_id(self) -> int:
        """First half of the flow's name."""
        ...

    @property
    def session_id(self) -> int:
        """Second half of the flow's name."""
        ...

    def is_stale_for(self, newest: Self) -> bool:
        """Same flow and strictly smaller than ``newest``."""
        ...


FrameOutcome = Literal["accept", "stale_epoch", "not_serving", "stale_request", "old_request"]


@dataclass(frozen=True, slots=True)
class FrameVerdict:
    """``stale_epoch`` is retriable: the sender learns ``active`` and asks again."""

    outcome: FrameOutcome
    active: PlanEpoch | None = None

    @property
    def accepted(self) -> bool:
        """May the frame be applied?"""
        return self.outcome == "accept"


class FrameFence:
    """One slot's fence while it serves ``active``; a new one is made at every activation."""

    def __init__(self, active: PlanEpoch, first_request_id: int) -> None:
        self._active = active
        self._first_request_id = first_request_id
        self._newest: dict[tuple[int, int], FlowEpoch] = {}

    def judge(self, epoch: PlanEpoch, request_id: int, flow: FlowEpoch | None) -> FrameVerdict:
        """Accepting remembers ``flow`` as the newest of its flow; refusing changes nothing."""
        if epoch != self._active:
            return FrameVerdict("stale_epoch", self._active)
        if request_id < self._first_request_id:
            return FrameVerdict("old_request", self._active)
        if flow is not None:
            key = (flow.request_id, flow.session_id)
            newest = self._newest.pop(key, None)
            if newest is not None and flow.is_stale_for(newest):
                self._newest[key] = newest
                return FrameVerdict("stale_request", self._active)
            self._newest[key] = flow
            if len(self._newest) > MAX_FLOWS:
                del self._newest[next(iter(self._newest))]
        return FrameVerdict("accept", self._active)
