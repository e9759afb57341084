"""What calibration from live runs says reaches the plans of the mesh, whoever coordinates. Default settings, calm network."""

from coordinator.assignment.moment import ServedModelSpec
from coordinator.calibrated import NodeSpeed, fingerprint, speed_text
from coordinator.replan import Observation
from protocol.ids import NodeId
from protocol.orders import NODE_SPEED, OperatorOrder
from tests.simulation.ballot_mesh import BallotMesh
from tests.simulation.test_ballots_orders import say
from tests.simulation.test_ballots_reports import SLOT, A, B, C, D, kill, leader, mesh, model, run, slot


def found(made: BallotMesh, node_id: NodeId, bytes_per_s: int, *, removed: bool = False) -> OperatorOrder:
    (process,) = made.processes[node_id]
    row = process.row()
    value = speed_text(NodeSpeed(bytes_per_s, fingerprint(row)))
    return OperatorOrder(kind=NODE_SPEED, subject=node_id, value=value, removed=removed, author="here")


def layers(made: BallotMesh) -> dict[str, int]:
    return {stage.node_id: stage.layer_end - stage.layer_start for stage in slot(made).plan.stages}


def busy(made: BallotMesh, seconds: int) -> None:
    chief, seen = leader(made), Observation(100_000, 1_000, tokens_per_hour=1_000_000)
    made.run_in(chief, lambda: chief.carry(chief.coordinator.on_observed(SLOT, seen, made.now_us)))
    run(made, seconds)


def test_a_calibrated_speed_moves_the_running_plan_half_way_and_is_taken_back() -> None:
    made = mesh({A: 8, B: 8}, 10, noise=0)
    made.specs = (ServedModelSpec(SLOT, "/m", model(10, layers=64)),)
    run(made, 330)
    before, slow = layers(made), slot(made).nodes[0]
    say(made, B, found(made, slow, 5 * 10**9))
    busy(made, 60)
    moved = layers(made)
    stage = next(each for each in slot(made).plan.stages if each.node_id == slow)
    assert moved[slow] < before[slow]
    assert stage.slowness_milli == 4_000
    assert "speed_calibrated" in stage.reason_codes
    run(made, 330)
    say(made, A, found(made, slow, 4 * 10**9))
    busy(made, 60)
    last = layers(made)
    assert 0 < moved[slow] - last[slow] < before[slow] - moved[slow], "each step is at most half of what is left"
    say(made, A, found(made, slow, 4 * 10**9, removed=True))
    run(made, 10)
    assert all(process.coordinator.orders.speeds == {} for process in made.live())


def test_a_successor_plans_by_what_was_calibrated_under_its_predecessor() -> None:
    made = mesh({A: 16, B: 8, C: 8, D: 8}, 10, noise=0)
    run(made, 30)
    assert leader(made).node_id == A
    say(made, A, found(made, B, 10**9))
    run(made, 20)
    kill(made, A)
    run(made, 60)
    assert leader(made).node_id != A
    assert slot(made).routable
    assert B not in slot(made).nodes, "C and D do without the slow one"


def test_a_speed_that_was_found_with_another_engine_changes_nothing() -> None:
    made = mesh({A: 8, B: 8}, 10, noise=0)
    made.specs = (ServedModelSpec(SLOT, "/m", model(10, layers=64)),)
    run(made, 330)
    before, slow = layers(made), slot(made).nodes[0]
    value = speed_text(NodeSpeed(5 * 10**9, "other engine"))
    say(made, B, OperatorOrder(kind=NODE_SPEED, subject=slow, value=value, author="here"))
    busy(made, 60)
    assert layers(made) == before
