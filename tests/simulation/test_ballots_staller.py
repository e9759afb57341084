"""A node that stalls again and again, under the real membership and the real coordinators: how often it costs a plan."""

import pytest

from coordinator.assignment.moment import ServedModelSpec
from coordinator.model.package import Layer, ModelPackage
from protocol.ids import Slot
from tests.simulation.ballot_whole_mesh import WholeMesh

GIB = 2**30
SECOND = 1_000_000
STALLS = 6


def model_of(gib: int) -> ModelPackage:
    each = gib * GIB // 8
    return ModelPackage("m", "d" * 64, tuple(Layer(each, each, 64) for _ in range(8)), 0, 0, 4096, 8192)


def routed_while_stalling(nodes: int, gib: int, seed: int, *, tempting: bool = False) -> list[tuple[int, object]]:
    """(time, ballot) of every plan that a coordinator routed to while one of its nodes stalled once a minute.

    ``tempting``: the staller has memory for the whole model, and the others only together.
    """
    mesh = WholeMesh(nodes, seed, 8 * GIB, (ServedModelSpec(Slot("default"), "/m", model_of(gib)),))
    if tempting:
        mesh.memory[nodes - 1] = 64 * GIB
    mesh.start_all()
    assert mesh.run_until(lambda: bool(mesh.serving()), 90) is not None
    mesh.run(15)
    chief = mesh.chiefs()[0].name
    staller = mesh.ids[-1] if tempting else next(node_id for node_id in mesh.serving() if node_id != chief)
    assert staller in mesh.serving()
    seen: list[tuple[int, object]] = []
    for _ in range(STALLS):
        mesh.network.stall(staller, mesh.network.random.randint(6, 10) * SECOND)
        for _ in range(60):
            mesh.run(1)
            for port in mesh.chiefs():
                (slot,) = port.coordinator.snapshot(port.now_us).slots
                if slot.routable and slot.ballot is not None and slot.ballot not in {ballot for _, ballot in seen}:
                    seen.append((mesh.network.now_us, slot.ballot))
    assert sum(change.change.node_id == staller for change in mesh.deaths()) >= STALLS, "the stalls were noticed"
    others = [change for change in mesh.deaths() if staller not in {change.change.node_id, change.observer}]
    assert others == [], "the staller got a healthy node removed"
    return seen


@pytest.mark.parametrize(
    ("nodes", "gib", "tempting", "plans"),
    [
        pytest.param(4, 10, False, 2, id="others can replace it: one replan for good"),
        pytest.param(3, 18, False, 1, id="nobody can replace it: its plan waits for it"),
        pytest.param(4, 10, True, 2, id="the best node of all: the plan does not run after it"),
    ],
)
def test_a_staller_costs_at_most_one_replan_per_damping_window(
    nodes: int, gib: int, tempting: bool, plans: int
) -> None:
    """Six stalls in six minutes, each of them a death: the windows (8 s, doubled by every return) allow four replans."""
    assert len(routed_while_stalling(nodes, gib, 31, tempting=tempting)) <= plans
