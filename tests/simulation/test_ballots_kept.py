"""Situations in which a seed found a mistake once, each built on purpose: seeds do not survive a change of the generator."""

import json
from dataclasses import replace

from coordinator.planner.problem import LockedStage, LockedTopology
from protocol.codec import decode
from stage_agent.stage.record import SlotRecord
from tests.simulation.ballot_mesh import SECOND, BallotMesh
from tests.simulation.test_ballots_reports import SLOT, A, B, C, D, kill, leader, mesh, run, slot


def wish(made: BallotMesh, *stages: LockedStage) -> None:
    """From now on the model is wanted with exactly this split, by every node."""
    made.specs = (replace(made.specs[0], locked=LockedTopology(stages)),)
    for process in made.live():
        made.run_in(
            process, lambda process=process: process.carry(process.coordinator.serve(made.specs, process.now_us))
        )


def test_a_node_is_not_blamed_for_a_retirement_that_its_coordinator_asked_for():
    made = mesh({A: 8, B: 8}, 6)
    run(made, 30)
    (before,) = slot(made).nodes
    other = B if before == A else A
    wish(made, LockedStage(before, 0, 7), LockedStage(other, 7, 8))
    retired = False
    for _ in range(80):
        run(made, 0.25)
        retired |= not slot(made).routable
        assert not slot(made).left_out, "the node that made room for the new plan is left out of it"
    assert retired, "both plans fitted side by side: the case was not met"
    assert slot(made).nodes == (before, other)


def test_a_stage_of_a_higher_ballot_that_never_became_a_plan_is_cleared_away():
    made = mesh({A: 16, B: 8, C: 8, D: 8}, 4)
    wish(made, LockedStage(B, 0, 4), LockedStage(C, 4, 8))
    run(made, 30)
    before = slot(made).ballot
    assert (leader(made).node_id, slot(made).nodes) == (A, (B, C))
    wish(made, LockedStage(C, 0, 4), LockedStage(D, 4, 8))
    while made.processes[D][0].agent.record(SLOT).active is None:
        run(made, 0.001)
    made.crash(made.processes[A][0])  # D serves its part already; C never will
    assert made.processes[D][0].agent.record(SLOT).active.ballot > before
    wish(made, LockedStage(B, 0, 4), LockedStage(C, 4, 8))
    run(made, 60)
    assert made.checkers.converged() == ""
    assert slot(made).ballot == before
    assert made.processes[D][0].agent.record(SLOT).active is None
    assert not made.processes[D][0].loads


def test_what_was_refused_before_a_plan_served_is_said_again_when_that_plan_breaks():
    made = mesh({A: 8, B: 8}, 10)
    run(made, 1.1)
    kill(made, B)
    run(made, 20)
    assert slot(made).refused is not None
    made.start(B)
    run(made, 30)
    assert slot(made).routable
    assert slot(made).refused is None
    kill(made, B)
    run(made, 20)
    assert slot(made).refused is not None, "a plan is broken, and nobody says why there is no other"
    assert [each.kind for each in leader(made).coordinator.snapshot(made.now_us).decisions][-1] == "refused"


def test_nodes_that_all_saw_each_other_come_and_go_do_not_each_coordinate():
    made = mesh(dict.fromkeys((A, B, C, D), 8), 22)
    everybody = {(one, other) for one in made.node_ids for other in made.node_ids if one != other}
    for _ in range(3):
        made.weather.blocked = set(everybody)
        run(made, 12)
        made.weather.blocked = set()
        run(made, 4)
    run(made, 12)
    views = {process.node_id: process.coordinator.snapshot(process.now_us) for process in made.live()}
    assert {view.canonical for view in views.values()} == {A}
    assert [node_id for node_id, view in views.items() if view.role == "coordinator"] == [A]
    run(made, 18)
    assert made.checkers.converged() == ""


def test_what_lay_about_while_a_plan_was_loaded_is_cleared_away_as_soon_as_it_serves():
    made = mesh({A: 12, B: 4, C: 4}, 6)
    made.load_time_us = lambda: 35 * SECOND
    run(made, 1.1)
    kill(made, C)
    while made.processes[A][0].agent.record(SLOT).accepted is None:
        run(made, 0.1)
    mine = made.processes[A][0].agent.record(SLOT).accepted
    higher = mine.ballot._replace(term=mine.ballot.term + 3, node_id=C)
    record = SlotRecord(higher, active=replace(mine, ballot=higher), last_active=higher)
    made.disks[C].slots[SLOT] = json.dumps(record.to_document())
    made.start(C)
    while not slot(made).routable:
        run(made, 0.1)
    assert slot(made).ballot < higher
    assert made.processes[C][0].agent.record(SLOT).active is not None
    run(made, 6)
    assert made.processes[C][0].agent.record(SLOT).active is None
    assert made.checkers.converged() == ""


def test_a_plan_serves_on_when_it_was_to_make_room_and_never_heard_of_it():
    made = mesh({A: 8, B: 8}, 6)
    run(made, 30)
    before, send = slot(made), made.send
    (holder,) = before.nodes
    lost: list[str] = []

    def lose_retirements(source, peer, payload):
        if isinstance(payload, bytes) and decode(payload).type == "retire":
            lost.append(peer)
        else:
            send(source, peer, payload)

    made.send = lose_retirements
    wish(made, LockedStage(holder, 0, 7), LockedStage(B if holder == A else A, 7, 8))
    while not made.counts["decided: attempt_failed"]:
        run(made, 0.1)
    assert lost
    wish(made, LockedStage(holder, 0, 8))
    run(made, 15)
    assert slot(made).routable
    assert slot(made).ballot == before.ballot
