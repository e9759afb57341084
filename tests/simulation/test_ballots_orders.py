"""Operators' orders outlive the node where they were said. Default settings, calm network but for what the test does."""

from protocol.ids import NodeId
from tests.simulation.ballot_mesh import SECOND, BallotMesh
from tests.simulation.ballot_orders import exclude, lock, pin_coordinator, pin_stage0
from tests.simulation.test_ballots_reports import A, B, C, D, decided, kill, leader, mesh, operate, run, slot

SLOT = "s0"


def say(made: BallotMesh, node_id: NodeId, *orders) -> None:
    (process,) = made.processes[node_id]
    made.run_in(process, lambda: process.say(*orders))


def known(made: BallotMesh) -> dict[str, list[tuple]]:
    """What each living node would obey: kind, subject, value, taken back, author."""
    return {
        process.node_id: [
            (order.kind, order.subject, order.value, order.removed, order.author)
            for order in process.orders.known(made.now_us)
        ]
        for process in made.live()
    }


def test_an_excluded_node_is_replaced_and_not_planned_again():
    made = mesh({A: 8, B: 8, C: 8}, 10)
    run(made, 30)
    unwanted = slot(made).nodes[0]
    operate(made, exclude(unwanted))
    run(made, 15)
    assert unwanted not in slot(made).nodes
    assert slot(made).routable


def test_an_operators_lock_moves_the_running_plan():
    made = mesh({A: 8, B: 8, C: 8}, 10)
    run(made, 30)
    operate(made, lock(SLOT, (C, 0, 4), (B, 4, 8)))
    run(made, 20)
    assert slot(made).nodes == (C, B)


def test_a_pinned_coordinator_takes_over_the_running_plan():
    made = mesh({A: 16, B: 8, C: 8}, 10)
    run(made, 30)
    before = slot(made).ballot
    operate(made, pin_coordinator(C))
    run(made, 10)
    assert leader(made).node_id == C
    assert slot(made).ballot == before


def test_an_exclusion_said_at_a_coordinator_that_dies_is_obeyed_by_the_next():
    made = mesh({A: 16, B: 8, C: 8, D: 8}, 10)
    run(made, 30)
    assert leader(made).node_id == A
    say(made, A, exclude(B))
    run(made, 20)
    kill(made, A)
    run(made, 60)
    assert leader(made).node_id != A
    assert slot(made).routable
    assert B not in slot(made).nodes, "with three nodes left, B and one other would be a plan, too"
    assert all(line == [("exclude", B, "", False, A)] for line in known(made).values())


def test_an_order_said_at_any_node_is_obeyed_by_the_coordinator_within_seconds():
    made = mesh({A: 8, B: 8, C: 8}, 10)
    run(made, 30)
    chief = leader(made).node_id
    unwanted = next(node_id for node_id in slot(made).nodes if node_id != chief)
    say(made, unwanted, exclude(unwanted))
    run(made, 15)
    assert leader(made).node_id == chief
    assert slot(made).routable
    assert unwanted not in slot(made).nodes


def test_a_lock_outlives_the_node_where_it_was_said_and_every_restart():
    made = mesh({A: 16, B: 8, C: 8, D: 16}, 10)
    run(made, 30)
    say(made, A, lock(SLOT, (C, 0, 4), (B, 4, 8)))
    run(made, 20)
    assert slot(made).nodes == (C, B)
    kill(made, A)
    run(made, 60)
    assert (slot(made).nodes, slot(made).routable) == ((C, B), True)
    for node_id in (B, C, D):
        kill(made, node_id)
        made.at(made.now_us + 5 * SECOND, lambda node_id=node_id: made.start(node_id))
    run(made, 60)
    assert (slot(made).nodes, slot(made).routable) == ((C, B), True), "alone on D would be the faster plan"


def test_a_pin_of_stage_0_is_kept_by_the_next_coordinator():
    made = mesh({A: 16, B: 8, C: 8, D: 8}, 10, bandwidth={D: 10})
    run(made, 30)
    say(made, A, pin_stage0(D))
    run(made, 340)
    kill(made, A)
    run(made, 60)
    assert slot(made).nodes[0] == D


def test_a_pinned_coordinator_keeps_the_role_when_a_larger_node_comes_back():
    made = mesh({A: 16, B: 8, C: 8}, 6)
    run(made, 30)
    say(made, A, pin_coordinator(C))
    run(made, 10)
    assert leader(made).node_id == C
    kill(made, A)
    run(made, 5)
    made.start(A)
    run(made, 60)
    assert leader(made).node_id == C
    say(made, B, pin_coordinator(""))
    kill(made, C)
    run(made, 60)
    assert leader(made).node_id == A


def test_two_conflicting_orders_on_both_sides_of_a_partition_heal_to_one_everywhere():
    made = mesh({A: 16, B: 8, C: 8, D: 16}, 6)
    run(made, 30)
    islands = ({A, B}, {C, D})
    made.weather.blocked = {(one, other) for one in islands[0] for other in islands[1]}
    made.weather.blocked |= {(other, one) for one, other in made.weather.blocked}
    run(made, 30)
    say(made, A, pin_stage0(B), exclude(C))
    say(made, D, pin_stage0(C), exclude(B))
    run(made, 20)
    assert len(set(map(str, known(made).values()))) == 2
    made.weather.blocked = set()
    run(made, 90)
    agreed = set(map(str, known(made).values()))
    assert agreed == {
        str(
            [
                ("exclude", B, "", False, D),
                ("exclude", C, "", False, A),
                ("pin_stage0", "", C, False, D),
            ]
        )
    }
    assert slot(made).refused is not None, "stage 0 is pinned to a node that is excluded: nothing can be placed"
    say(made, B, exclude(C, removed=True))
    run(made, 90)
    assert made.checkers.converged() == ""
    assert slot(made).nodes[0] == C


def test_a_node_that_was_down_learns_what_was_said_and_its_older_word_does_not_return():
    made = mesh({A: 16, B: 8, C: 8}, 6)
    run(made, 30)
    say(made, B, exclude(C))
    run(made, 5)
    kill(made, B)
    run(made, 10)
    say(made, A, exclude(C, removed=True))
    run(made, 5)
    made.start(B)
    run(made, 30)
    assert set(map(str, known(made).values())) == {str([("exclude", C, "", True, A)])}


def test_an_order_of_a_node_whose_disk_is_full_is_not_half_taken():
    made = mesh({A: 16, B: 8, C: 8}, 6)
    run(made, 30)
    made.disks[B].full = True
    say(made, A, exclude(C))
    run(made, 10)
    assert known(made)[B] == []
    made.disks[B].full = False
    run(made, 10)
    assert known(made)[B] == [("exclude", C, "", False, A)]


def test_repeating_an_order_starts_no_round_and_each_is_recorded_once_per_node():
    made = mesh({A: 16, B: 8, C: 8}, 6)
    run(made, 30)
    say(made, A, exclude(C))
    run(made, 60)
    rounds = made.checkers.rounds
    run(made, 300)
    assert made.checkers.rounds == rounds
    assert len(decided(made, "operator")) == 3
