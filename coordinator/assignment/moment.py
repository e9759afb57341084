"""What one slot is told: the wish, the settings it reads, and what the coordinator knows at one step."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from config.settings import AssignmentSettings, ElectionSettings, PlannerSettings, ReplanSettings
from coordinator.assignment.running import RunningPlan
from coordinator.calibrated import NodeSpeed
from coordinator.model.package import ModelPackage
from coordinator.planner.problem import Calibration, LockedTopology
from coordinator.view import ClusterView, ProblemTerms
from protocol.ids import NodeId, Slot


@dataclass(frozen=True, slots=True)
class ServedModelSpec:
    """An operator's wish. Higher ``priority`` is placed first; ``locked`` is an exact split, never moved."""

    slot: Slot
    source: str
    package: ModelPackage
    priority: int = 0
    locked: LockedTopology | None = None


@dataclass(frozen=True, slots=True)
class SlotSettings:
    """The sections a slot reads."""

    election: ElectionSettings
    assignment: AssignmentSettings
    replan: ReplanSettings
    planner: PlannerSettings
    calibration: Calibration
    speeds: Mapping[NodeId, NodeSpeed] = field(default_factory=dict)
    """What calibration from live runs found, by standing orders."""


@dataclass(frozen=True, slots=True)
class Moment:
    """What the coordinator knows at one step."""

    now_us: int
    view: ClusterView
    coordinating: bool
    settled: bool
    plannable: frozenset[NodeId]
    left_out: Mapping[NodeId, str] = field(default_factory=dict)
    """Connected members that may not be planned now, and why."""
    reserve: frozenset[NodeId] = frozenset()
    """Of those, whoever only has to settle after flaps and may be planned where there is no plan without it."""
    excluded: frozenset[NodeId] = frozenset()
    held_bytes: Mapping[NodeId, int] = field(default_factory=dict)
    """What all other slots hold …"""
    firm_bytes: Mapping[NodeId, int] = field(default_factory=dict)
    """… and of that what this slot cannot have: held by slots of its own priority or a higher one."""
    may_start: bool = True
    """No other slot is planning or migrating."""
    force: bool = False


def problem_terms(
    spec: ServedModelSpec,
    settings: SlotSettings,
    moment: Moment,
    culprits: Mapping[NodeId, str],
    *,
    running: RunningPlan | None,
    reserve: frozenset[NodeId] = frozenset(),
) -> ProblemTerms:
    """What the planner is asked for one slot. ``reserve``: planned although it is left out."""
    left_out = {node_id: why for node_id, why in moment.left_out.items() if node_id not in reserve}
    excluded = {**left_out, **culprits, **dict.fromkeys(moment.excluded, "excluded")}
    return ProblemTerms(
        model=spec.package,
        planner=settings.planner,
        calibration=settings.calibration,
        minimum_nodes=settings.election.minimum_nodes,
        excluded=excluded,
        held_bytes=moment.held_bytes,
        locked=spec.locked,
        incumbent=() if running is None else running.nodes,
        speeds=settings.speeds,
    )
