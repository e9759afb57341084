"""What the coordinator core asks its driver to do."""

from dataclasses import dataclass
from typing import Literal

from coordinator.planner.plan import Plan
from coordinator.planner.problem import PlanningProblem
from protocol.ballots import BallotMessage
from protocol.fencing import PlanEpoch
from protocol.ids import NodeId, Slot, Term

SlotPhase = Literal[
    "idle", "settling", "planning", "preparing", "loading", "activating", "serving", "degraded", "withdrawn"
]


@dataclass(frozen=True, slots=True)
class Send:
    """To an agent, which may be this node's own. Losing it is harmless: it is repeated or given up."""

    peer: NodeId
    message: BallotMessage


@dataclass(frozen=True, slots=True)
class PersistTerm:
    """Write ``term`` durably, then call ``on_term_persisted``; nothing is sent under it before."""

    term: Term


@dataclass(frozen=True, slots=True)
class ComputePlan:
    """Run the planner off the loop and call ``on_planned(request_id, result)``."""

    request_id: int
    slot: Slot
    problem: PlanningProblem


@dataclass(frozen=True, slots=True)
class Publish:
    """Tell people and metrics everywhere. ``plan`` is ``None`` for a withdrawn or not yet evaluated plan."""

    slot: Slot
    ballot: PlanEpoch
    generation: int
    state: SlotPhase
    plan: Plan | None


@dataclass(frozen=True, slots=True)
class Route:
    """Requests of ``slot`` go to stage 0 on ``node_id`` at ``ballot``; ``None`` = nowhere."""

    slot: Slot
    node_id: NodeId | None
    ballot: PlanEpoch


DecisionKind = Literal[
    "planned",
    "refused",
    "kept",
    "adopted",
    "activated",
    "attempt_failed",
    "broken",
    "deferred",
    "rolled_back",
    "withdrawn",
    "retired_foreign",
    "operator",
    "measured_far_below_predicted",
]


@dataclass(frozen=True, slots=True)
class Decision:
    """One line of the decision log. ``gain_us`` is per output token, ``cost_us`` in all; ``None`` = not modelled."""

    at_us: int
    slot: Slot
    kind: DecisionKind
    reason: str
    old_plan: str = ""
    new_plan: str = ""
    gain_us: int | None = None
    cost_us: int | None = None


@dataclass(frozen=True, slots=True)
class Decided:
    """A decision was taken; it is also in the snapshot's bounded log."""

    decision: Decision


Effect = Send | PersistTerm | ComputePlan | Publish | Route | Decided
