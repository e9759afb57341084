"""A cut that stays when the storms are over: each side must come to rest by itself (invariant 5 of the protocol).

A *component* is a set of nodes that hear each other, over others too. Within 30 s, moments aside in which it backs off for
its nodes' past, each must have one coordinator in the eyes of all its nodes, and per model

* one plan that serves and answers, where ``ROOM_MILLI`` of the memory that the model needs is there;
* with less, either such a plan or the coordinator's own word why there is none: the planner's refusal, or a withdrawal.

Memory is counted here, not by the planner: what fits is counted in whole layers per node, and with several models a
layer less per node and further model, which is what a poor split among them may waste.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from coordinator.assignment.snapshot import SlotSnapshot
from coordinator.planner.memory import Shape, layer_required_bytes
from protocol.ids import NodeId, Slot
from tests.simulation.ballot_mesh import SECOND, BallotMesh

if TYPE_CHECKING:
    from tests.simulation.ballot_process import Process

ROOM_MILLI = 1_500
REST_US = 30 * SECOND
BACK_OFF_MAX_US = 900 * SECOND
STAY_US = 6 * SECOND
ANSWERS_WHILE_STAYING = 10
"""Requests per model and component; 15 are sent."""


def two_sides(node_ids: tuple[NodeId, ...], numbers: tuple[int, ...]) -> set[tuple[str, str]]:
    """The directed pairs that a clean cut takes away. A node whose number is odd is on the left; nobody has no side."""
    left = {node_id for node_id, number in zip(node_ids, numbers, strict=False) if number % 2}
    if len(left) in {0, len(node_ids)}:
        left ^= {node_ids[0]}
    return {(a, b) for a in node_ids for b in node_ids if (a in left) != (b in left)}


def components(node_ids: Iterable[NodeId], blocked: set[tuple[str, str]]) -> list[frozenset[NodeId]]:
    """Who can talk to whom, in both directions and over others."""
    todo, found = set(node_ids), []
    while todo:
        reached, edge = set(), {min(todo)}
        while edge:
            reached |= edge
            edge = {
                other
                for other in todo - reached
                if any((other, node_id) not in blocked and (node_id, other) not in blocked for node_id in edge)
            }
        todo -= reached
        found.append(frozenset(reached))
    return found


def must_serve(mesh: BallotMesh, component: frozenset[NodeId]) -> set[Slot]:
    """Models that have ample room in these nodes, those of a higher priority included."""
    shape = Shape(mesh.variant.planner.context_length or 0, mesh.variant.planner.parallel_lanes or 1)
    needed, largest, slots = 0, 0, set()
    for number, spec in enumerate(sorted(mesh.specs, key=lambda spec: -spec.priority)):
        layers = [layer_required_bytes(layer, shape, "per_lane") for layer in spec.package.layers]
        needed += sum(layers) + spec.package.shared_first_bytes + spec.package.shared_last_bytes
        largest = max(largest, *layers)
        whole = (max(0, mesh.usable_bytes(node_id) // largest - number) for node_id in component)
        if sum(whole) * largest * 1_000 >= needed * ROOM_MILLI:
            slots.add(spec.slot)
    return slots


class Side:
    """One component while the cut stands, and how long it has not been at rest."""

    def __init__(self, mesh: BallotMesh, component: frozenset[NodeId]) -> None:
        self.mesh, self.component = mesh, component
        self.must = must_serve(mesh, component)
        self.served: set[Slot] = set()
        """Models that it served when it was last looked at and missed nothing."""
        self.waited_us = 0
        self.counted_us = 0
        """The same without moments in which it backs off."""

    def __str__(self) -> str:
        return f"{len(self.component)} nodes from {min(self.component)} on"

    @property
    def live(self) -> "list[Process]":
        return [process for process in self.mesh.live() if process.node_id in self.component]

    def _excused(self, item: SlotSnapshot) -> bool:
        explained = item.refused is not None or item.state == "withdrawn"
        self.served.discard(item.slot)
        return item.slot not in self.must and explained and not item.attempt

    def missing(self) -> str:
        """Empty when it is at rest."""
        self.served = {spec.slot for spec in self.mesh.specs}
        return self.mesh.checkers.converged(self.live, self._excused)

    def wait(self, for_us: int) -> None:
        self.waited_us += for_us
        self.counted_us += 0 if self.mesh.checkers.backs_off(self.live) else for_us

    def answers(self) -> dict[Slot, int]:
        """So far, by model, to requests that began here."""
        counted = self.mesh.checkers.completed_from
        return {spec.slot: sum(counted[spec.slot, node_id] for node_id in self.component) for spec in self.mesh.specs}


def await_rest(mesh: BallotMesh) -> tuple[Side, ...]:
    """Every component comes to rest, stays so, and answers where it serves. The cut stands already."""
    sides = tuple(Side(mesh, component) for component in components(mesh.node_ids, mesh.weather.blocked))
    _until_at_rest(mesh, sides)
    before = {side: side.answers() for side in sides}
    serving = {side: set(side.served) for side in sides}
    mesh.run_until(mesh.now_us + STAY_US)
    for side, slots in serving.items():
        for slot in sorted(slots):
            answered = side.answers()[slot] - before[side][slot]
            if answered < ANSWERS_WHILE_STAYING:
                mesh.checkers.fail(5, f"{side}: {slot} answered {answered} requests in {STAY_US // SECOND} s of calm")
        mesh.counts["a side at rest"] += 1
        mesh.counts["a side served a model"] += len(slots)
        mesh.counts["a side explained why it does not serve"] += len(mesh.specs) - len(slots)
    return sides


def _until_at_rest(mesh: BallotMesh, sides: tuple[Side, ...]) -> None:
    while missing := {side: text for side in sides if (text := side.missing())}:
        for side, text in missing.items():
            if side.counted_us >= REST_US or side.waited_us >= BACK_OFF_MAX_US:
                mesh.checkers.fail(5, f"{side}: not at rest within {REST_US // SECOND} s behind a cut: {text}")
            side.wait(SECOND // 2)
        mesh.run_until(mesh.now_us + SECOND // 2)
    mesh.log("every side is at rest")
