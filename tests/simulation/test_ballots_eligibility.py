"""Nodes that may be planned now and not a moment later, nodes that fail what they are given, models that compete. Calm network."""

import itertools

from coordinator.assignment.moment import ServedModelSpec
from protocol.ballots import Abort, Prepare, Retire
from protocol.codec import encode
from protocol.fencing import PlanEpoch, epoch_to_wire
from protocol.ids import NodeId, Slot
from stage_agent.stage import effects as stage
from tests.simulation.ballot_mesh import SECOND, BallotMesh
from tests.simulation.test_ballots_reports import SLOT, A, B, C, D, decided, kill, leader, mesh, model, run, slot


def blink(made: BallotMesh, nodes: set[NodeId], seconds: int, every_s: int = 7) -> None:
    """``nodes`` are eligible and not eligible in turn."""
    for number in range(seconds // every_s):
        made.unsettled = nodes if number % 2 == 0 else set()
        run(made, every_s)
    made.unsettled = set()


def test_eligibility_that_flaps_never_touches_a_healthy_plan():
    made = mesh({A: 8, B: 8, C: 8}, 10)
    run(made, 30)
    before, planned = slot(made).ballot, len(decided(made, "planned"))
    blink(made, {node_id for node_id in slot(made).nodes if node_id != leader(made).node_id}, 600)
    run(made, 60)
    assert slot(made).ballot == before
    assert slot(made).routable
    assert len(decided(made, "planned")) == planned


def test_a_spare_node_whose_eligibility_flaps_moves_nothing():
    made = mesh({A: 8, B: 8, C: 8}, 10)
    run(made, 30)
    before = slot(made).ballot
    spare = next(node_id for node_id in (A, B, C) if node_id not in slot(made).nodes)
    blink(made, {spare}, 900)
    run(made, 60)
    assert slot(made).ballot == before


def test_a_broken_plan_does_not_wait_for_ever_for_a_survivor_that_never_settles():
    made = mesh({A: 8, B: 8, C: 8, D: 8, NodeId("n04"): 8}, 16)
    run(made, 30)
    victim, survivor = [node_id for node_id in slot(made).nodes if node_id != leader(made).node_id][:2]
    made.unsettled = {survivor}
    kill(made, victim)
    run(made, 60)
    assert not slot(made).routable
    assert decided(made, "deferred")
    run(made, 60)
    assert slot(made).routable
    assert not {victim, survivor} & set(slot(made).nodes)


def broken_engine(made: BallotMesh, culprit: NodeId) -> None:
    """Every load on ``culprit`` fails, once it runs."""
    run(made, 2)
    (process,) = made.processes[culprit]

    def loaded(name: Slot, ballot: PlanEpoch) -> None:
        if process.loads.pop((name, ballot), None) is not None:
            failed = stage.LoadFailed(name, ballot, "load_failed", "out of luck")
            process.carry(process.agent.on_runtime(failed, process.now_us))

    process.loaded = loaded


def test_a_node_that_fails_its_load_is_left_out_at_once_when_others_can_do_it():
    made = mesh({A: 8, B: 8, C: 8}, 10)
    broken_engine(made, B)
    run(made, 300)
    assert slot(made).routable
    assert B not in slot(made).nodes
    (failed,) = decided(made, "attempt_failed")
    assert f"{B} refused to stage: load_failed (out of luck)" in failed


def test_a_node_that_fails_every_load_is_tried_again_after_longer_and_longer_waits_where_nothing_serves_without_it():
    made = mesh({A: 8, B: 8}, 10)
    broken_engine(made, B)
    run(made, 1_000)
    failures = [float(line.split()[0]) for line in decided(made, "attempt_failed")]
    waits = [later - earlier for earlier, later in itertools.pairwise(failures)]
    expected = [7.5, 15, 30, 60, 75, 75]
    assert all(least <= wait < least + 5 for least, wait in zip(expected, waits, strict=False)), waits
    assert len(waits) >= len(expected)
    assert slot(made).refused is not None, "meanwhile it is said that the model does not fit"


def test_a_coordinator_that_wakes_up_blames_a_failure_once_however_much_it_finds_waiting():
    made = mesh({A: 8, B: 8, C: 8}, 10)
    run(made, 30)
    chief, before = leader(made), slot(made)
    victim = made.processes[next(node_id for node_id in before.nodes if node_id != chief.node_id)][0]
    chief.frozen_until_us = made.now_us + 5 * SECOND
    made.run_in(victim, lambda: victim.die(*next(iter(victim.loads))))
    run(made, 20)
    assert slot(made).routable
    assert list(slot(made).left_out) == [victim.node_id]
    run(made, 60)
    assert not slot(made).left_out, "a first failure is over after a minute"


def test_a_node_is_not_blamed_for_what_another_coordinators_newer_ballot_took_from_it():
    made = mesh({A: 8, B: 8}, 10)
    run(made, 30)
    before, worker = slot(made), next(node_id for node_id in slot(made).nodes if node_id != leader(made).node_id)
    process, newer = made.processes[worker][0], before.ballot._replace(term=before.ballot.term + 1, node_id=worker)
    claim = epoch_to_wire(newer)
    for message in (
        Prepare(ballot=claim, slot=SLOT, participant_set_hash="0" * 64, force=True),
        Retire(ballot=epoch_to_wire(before.ballot), slot=SLOT, superseded_by=claim),
        Abort(ballot=claim, slot=SLOT, reason="thought better of it"),
    ):
        made.run_in(process, lambda message=message: process.receive(worker, encode(message)))
    run(made, 2)
    assert slot(made).lost == {worker: "not_serving"}
    assert not slot(made).left_out
    run(made, 15)
    assert slot(made).routable


def test_nodes_that_flapped_serve_soon_where_there_is_no_plan_without_them():
    made = mesh({A: 8, B: 8}, 10)
    run(made, 30)
    other = next(node_id for node_id in (A, B) if node_id != leader(made).node_id)
    for _ in range(4):
        kill(made, other)
        run(made, 8)
        made.start(other)
        run(made, 2)
    chief = leader(made)
    left_out = chief.coordinator.snapshot(chief.now_us).left_out
    assert left_out[other] == "settling", "128 s by the rule for those that are not needed"
    run(made, 22)
    assert slot(made).routable


def test_a_node_that_goes_on_flapping_is_placed_ever_more_rarely_even_where_nothing_serves_without_it():
    made = mesh({A: 8, B: 8}, 10)
    run(made, 30)
    other = next(node_id for node_id in (A, B) if node_id != leader(made).node_id)
    moments = []
    for _ in range(20):
        kill(made, other)
        run(made, 8)
        made.start(other)
        before = len(decided(made, "planned"))
        run(made, 20)
        moments.append(len(decided(made, "planned")) - before)
    assert moments[:3] == [1, 1, 1], "8 s after each return"
    assert sum(moments[5:]) == 0, "from the fifth on it would have to stay for 32 s"


def test_a_node_that_flapped_is_not_asked_while_others_serve():
    made = mesh({A: 8, B: 8, C: 8}, 10)
    run(made, 30)
    spare = next(node_id for node_id in (A, B, C) if node_id not in slot(made).nodes)
    for _ in range(4):
        kill(made, spare)
        run(made, 8)
        made.start(spare)
        run(made, 2)
    before, rounds = slot(made).ballot, made.checkers.rounds
    run(made, 60)
    assert (slot(made).ballot, made.checkers.rounds) == (before, rounds)


def three_models(made: BallotMesh) -> None:
    made.specs = tuple(
        ServedModelSpec(Slot(name), f"/{name}", model(gib, name=name), priority=priority)
        for name, gib, priority in (("first", 6, 3), ("second", 5, 2), ("third", 2, 1))
    )


def test_two_models_are_placed_by_priority_against_the_memory_that_is_left():
    made = mesh({A: 8, B: 8}, 10)
    made.specs = (
        ServedModelSpec(Slot("small"), "/s", model(6, name="small"), priority=1),
        ServedModelSpec(Slot("large"), "/l", model(9, name="large"), priority=0),
    )
    run(made, 40)
    assert slot(made, "small").routable
    assert slot(made, "large").refused.code == "no_valid_topology"
    assert not decided(made, "withdrawn"), "the important one comes first: nobody has to give way"
    chief = leader(made)
    made.run_in(chief, lambda: chief.carry(chief.coordinator.serve(made.specs[1:], made.now_us)))
    run(made, 30)
    assert slot(made, "large").routable
    assert all(process.agent.record(Slot("small")).active is None for process in made.live())


def test_several_models_are_placed_by_priority_and_a_smaller_one_takes_what_is_left():
    made = mesh({A: 8, B: 8}, 10)
    three_models(made)
    run(made, 60)
    assert all(slot(made, name).routable for name in ("first", "second"))
    assert not decided(made, "withdrawn"), "the important ones come first: nobody has to give way afterwards"
    third = slot(made, "third")
    assert third.routable == (not third.refused)
    for node_id in (A, B):
        held = sum(
            stage.required_bytes
            for name in ("first", "second", "third")
            if slot(made, name).plan is not None
            for stage in slot(made, name).plan.stages
            if stage.node_id == node_id
        )
        assert held <= made.usable_bytes(node_id)


def test_when_memory_is_lost_the_model_of_the_lower_priority_gives_way():
    made = mesh({A: 8, B: 8, C: 8}, 10)
    three_models(made)
    run(made, 60)
    assert slot(made, "second").routable
    for node_id in (A, B, C):
        if node_id != leader(made).node_id and len(made.live()) > 1:
            kill(made, node_id)
    run(made, 200)
    assert slot(made, "first").routable
    assert not slot(made, "second").routable
    assert slot(made, "second").state == "withdrawn"


def test_a_model_gives_way_only_when_that_helps_and_only_as_many_as_needed():
    made = mesh({A: 8, B: 8}, 10)
    three_models(made)
    small, large = made.specs[2], ServedModelSpec(Slot("huge"), "/huge", model(60, name="huge"), priority=9)
    made.specs = (*made.specs, large)
    run(made, 60)
    assert slot(made, "huge").refused is not None
    assert all(slot(made, name).routable for name in ("first", "second")), "nobody leaves for one that would not fit"
    assert not [line for line in decided(made, "withdrawn") if "priority" in line]
    late = ServedModelSpec(Slot("late"), "/late", model(5, name="late"), priority=8)
    chief = leader(made)
    wanted = (made.specs[0], made.specs[1], small, late)
    made.run_in(chief, lambda: chief.carry(chief.coordinator.serve(wanted, made.now_us)))
    run(made, 60)
    assert slot(made, "late").routable
    assert slot(made, "first").routable
    gave_way = [line for line in decided(made, "withdrawn") if "needed for late, which has a higher priority" in line]
    assert len(gave_way) <= 2
    rounds = made.checkers.rounds
    run(made, 300)
    assert made.checkers.rounds - rounds < 20, "who gave way does not ask all the time"
