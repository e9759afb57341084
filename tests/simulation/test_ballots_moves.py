"""Moves of cuts and migrations across a change of coordinator, and by the traffic that there is. Default settings."""

from coordinator.assignment.moment import ServedModelSpec
from coordinator.replan import Observation
from tests.simulation.ballot_mesh import SECOND, BallotMesh
from tests.simulation.ballot_orders import pin_coordinator
from tests.simulation.test_ballots_reports import SLOT, A, B, C, decided, kill, leader, mesh, model, run, slot


def observe(made: BallotMesh, tpot_us: int) -> None:
    """A busy mesh."""
    chief, seen = leader(made), Observation(tpot_us, 1000, tokens_per_hour=100_000)
    made.run_in(chief, lambda: chief.carry(chief.coordinator.on_observed(SLOT, seen, made.now_us)))


def cut(made: BallotMesh) -> int:
    return slot(made).plan.stages[0].layer_end


def split_by_measurement() -> tuple[BallotMesh, int]:
    """Two equal nodes share 64 layers; then the first one's are measured to be slow, and only that changes."""
    made = mesh({A: 8, B: 8}, 10, noise=0)
    made.specs = (ServedModelSpec(SLOT, "/m", model(10, layers=64)),)
    run(made, 330)
    before = cut(made)
    observe(made, slot(made).plan.modeled.decode_tpot_us)
    made.timings = {slot(made).nodes[0]: 40_000}
    return made, before


def test_measured_timings_move_a_cut_half_way_and_then_the_rest():
    made, before = split_by_measurement()
    tpot = slot(made).plan.modeled.decode_tpot_us
    run(made, 60)
    first, slow = cut(made), made.timings
    for _ in range(3):
        observe(made, tpot)
        made.timings = {}  # a new range has no measurement at first
        run(made, 30)
        made.timings = slow
        run(made, 330)
    last = cut(made)
    assert before > first > last
    assert before - first > first - last, "each step is at most half of what is left"


def test_a_move_that_made_it_slower_is_rolled_back_and_not_tried_again():
    made, before = split_by_measurement()
    tpot = slot(made).plan.modeled.decode_tpot_us
    run(made, 60)
    moved = slot(made).plan.plan_hash
    assert cut(made) < before
    observe(made, tpot * 2)
    run(made, 60)
    assert cut(made) == before
    assert decided(made, "rolled_back")
    run(made, 900)
    assert slot(made).plan.plan_hash != moved


def measured(made: BallotMesh, tpot_us: int, tokens: int = 1_000, **fields) -> None:
    """What stage 0's row says reaches every node, whoever coordinates."""
    for process in made.live():
        seen = Observation(tpot_us, tokens, **fields)
        made.run_in(
            process,
            lambda process=process, seen=seen: process.carry(
                process.coordinator.on_observed(SLOT, seen, process.now_us)
            ),
        )


def moved() -> tuple[BallotMesh, int, int]:
    """C coordinates and holds no layers; A and B share 64 of them, and the cut has just been moved. Cut and time per token before."""
    made = mesh({A: 8, B: 8, C: 0.05}, 10, noise=0)
    made.specs = (ServedModelSpec(SLOT, "/m", model(10, layers=64)),)
    run(made, 30)
    chief = leader(made)
    made.run_in(chief, lambda: chief.say(pin_coordinator(C)))
    run(made, 330)
    assert leader(made).node_id == C
    assert set(slot(made).nodes) == {A, B}
    before = cut(made)
    tpot = slot(made).plan.modeled.decode_tpot_us
    measured(made, tpot, tokens_per_hour=100_000)
    made.timings = {slot(made).nodes[0]: 40_000}
    run(made, 60)
    assert cut(made) != before
    return made, before, tpot


def test_a_successor_rolls_back_the_move_that_its_predecessor_made():
    made, before, tpot = moved()
    worse = slot(made).plan.plan_hash
    kill(made, C)
    run(made, 40)
    assert leader(made).node_id != C
    assert slot(made).plan.plan_hash == worse, "adopted as it is"
    measured(made, tpot * 112 // 100, tokens_per_hour=100_000)
    run(made, 60)
    assert cut(made) == before
    assert decided(made, "rolled_back")


def test_a_successor_keeps_a_move_that_cost_less_than_ten_per_cent():
    made, _, tpot = moved()
    after = cut(made)
    kill(made, C)
    run(made, 40)
    measured(made, tpot * 109 // 100, tokens_per_hour=100_000)
    run(made, 60)
    assert cut(made) == after
    assert not decided(made, "rolled_back")


def test_what_was_measured_under_the_plan_before_does_not_roll_back_the_new_one():
    made, _, _ = moved()
    after = cut(made)
    old = slot(made).ballot._replace(term=slot(made).ballot.term - 1)
    measured(made, 10 * slot(made).plan.modeled.decode_tpot_us, ballot=old)
    run(made, 60)
    assert cut(made) == after
    assert not decided(made, "rolled_back")


def faster_elsewhere() -> tuple[BallotMesh, str]:
    """One node serves, has answered a little, and another one has become four times as fast."""
    made = mesh({A: 8, B: 8}, 6)
    run(made, 30)
    (before,) = slot(made).nodes
    measured(made, 300_000, tokens=100)
    run(made, 120)
    made.bandwidth[B if before == A else A] = 90 * 10**9
    return made, before


def test_an_idle_mesh_stays_and_a_busy_one_moves():
    made, before = faster_elsewhere()
    run(made, 400)
    assert slot(made).nodes == (before,)
    assert "not_amortised" in decided(made, "kept")[-1]
    said = len(decided(made, "kept"))
    run(made, 1_200)
    assert len(decided(made, "kept")) == said, "looked at again every five minutes, said once"
    for minute in range(20):
        measured(made, 300_000, tokens=100 + 600 * (minute + 1))
        run(made, 60)
    assert slot(made).nodes != (before,), "traffic has come, though no participant changed"


def test_traffic_that_only_a_rival_would_carry_moves_nothing_before_the_dwell():
    made, before = faster_elsewhere()
    for minute in range(2):
        measured(made, 300_000, tokens=100 + 10_000 * (minute + 1))
        made.run_until(made.now_us + 60 * SECOND)
    assert slot(made).nodes == (before,)
