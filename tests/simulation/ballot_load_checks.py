"""Invariant 4, second half: a stage serves the layers of one epoch, those that were loaded for it.

A load is named by its slot and ballot; two names may share weights only for the same layers of the same model. A node may
hold two loads of a slot while one replaces the other (make before break), but serves from one, and lets go of the former
in the same breath in which the new one serves. The engine is judged by what it was told: ``Load``, ``ActivateRuntime``,
``Unload``, and by which loads it has.
"""

from typing import TYPE_CHECKING, Any

from protocol.ballots import StageAssignment
from protocol.fencing import PlanEpoch
from protocol.ids import Slot
from stage_agent.stage import effects as stage

if TYPE_CHECKING:
    from tests.simulation.ballot_process import Process

Label = tuple[Slot, PlanEpoch]


def layers_of(assignment: StageAssignment) -> tuple[Any, ...]:
    """What weights and caches are made of."""
    return (
        assignment.model_digest,
        assignment.layer_start,
        assignment.layer_end,
        assignment.context_length,
        assignment.lanes,
    )


class LoadChecks:
    """The loads of one process; each method returns what is wrong, or nothing."""

    def __init__(self) -> None:
        self._assigned: dict[Label, StageAssignment] = {}
        self._loaded: set[Label] = set()
        self._leaving: set[Label] = set()
        self._serving: dict[Slot, PlanEpoch] = {}

    def told(self, effect: Any) -> str:
        """An order to the engine."""
        match effect:
            case stage.Load(slot, ballot, assignment, reuse):
                self._assigned[slot, ballot] = assignment
                self._leaving.discard((slot, ballot))
                shared = None if reuse is None else self._assigned.get((slot, reuse))
                if shared is not None and layers_of(shared) != layers_of(assignment):
                    return f"{slot} {ballot} is to share weights that hold other layers"
            case stage.ActivateRuntime(slot, ballot, assignment):
                if (slot, ballot) not in self._loaded:
                    return f"{slot} {ballot} is to serve but is not loaded"
                if layers_of(self._assigned[slot, ballot]) != layers_of(assignment):
                    return f"{slot} {ballot} is to serve other layers than it loaded"
                self._serving[slot] = ballot
            case stage.Unload(slot, ballot):
                self._leaving.add((slot, ballot))
                if self._serving.get(slot) == ballot:
                    del self._serving[slot]
        return ""

    def loaded(self, slot: Slot, ballot: PlanEpoch) -> None:
        """The engine said so."""
        self._loaded.add((slot, ballot))

    def after(self, process: "Process") -> str:
        """One that serves, one that is staged, and none that was replaced."""
        gone = [label for label in self._assigned if label not in process.loads]
        for label in gone:
            del self._assigned[label]
            self._loaded.discard(label)
            self._leaving.discard(label)
            if self._serving.get(label[0]) == label[1]:
                del self._serving[label[0]]
        stays: dict[Slot, list[PlanEpoch]] = {}
        for label in self._assigned.keys() - self._leaving:
            stays.setdefault(label[0], []).append(label[1])
        for slot, ballots in stays.items():
            served = self._serving.get(slot)
            idle = [ballot for ballot in ballots if ballot != served]
            if len(idle) > 1 or any(served is not None and ballot < served for ballot in idle):
                return f"holds layers of {slot} for {sorted(map(str, ballots))} and serves {served}"
        return ""

    def frame(self, slot: Slot, epoch: PlanEpoch, start: int, end: int) -> str:
        """An accepted frame of ``epoch`` is to run through layers ``start`` to ``end``."""
        if self._serving.get(slot) != epoch:
            return f"a frame of {slot} at {epoch} meets a load that serves {self._serving.get(slot)}"
        held = self._assigned[slot, epoch]
        if (held.layer_start, held.layer_end) != (start, end):
            return f"a frame of {slot} at {epoch} meets other layers"
        return ""
