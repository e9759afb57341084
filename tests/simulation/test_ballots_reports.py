"""What people reported of systems like this one, and what must happen instead. Default settings, calm network."""

from dataclasses import replace

import pytest

from config.settings import AssignmentSettings, ElectionSettings, PlannerSettings, ReplanSettings
from coordinator.assignment.moment import ServedModelSpec
from coordinator.model.package import Layer, ModelPackage
from coordinator.planner.problem import LockedStage, LockedTopology
from coordinator.replan import Observation
from protocol.ballots import Retire
from protocol.fencing import epoch_to_wire
from protocol.ids import NodeId, Slot
from protocol.orders import OperatorOrder
from tests.simulation.ballot_mesh import SECOND, BallotMesh, Variant
from tests.simulation.ballot_orders import lock
from tests.simulation.ballot_world import GIB

A, B, C, D = (NodeId(f"n0{number}") for number in range(4))
SLOT = Slot("s0")


def model(gib: float, layers: int = 8, name: str = "m") -> ModelPackage:
    each = int(gib * GIB) // layers
    digest = f"{sum(name.encode()):064x}"
    return ModelPackage(name, digest, tuple(Layer(each, each, 64) for _ in range(layers)), 0, 0, 4096, 8192)


def mesh(
    memory: dict[str, float],
    gib: float,
    *,
    bandwidth: dict[str, float] | None = None,
    election: ElectionSettings | None = None,
    replan: ReplanSettings | None = None,
    noise: int = 30,
) -> BallotMesh:
    """Nodes with so many GiB each and one model of ``gib``; bandwidth in GB/s, 20 unless said otherwise."""
    variant = Variant(
        election=election or ElectionSettings(),
        assignment=AssignmentSettings(),
        replan=replan or ReplanSettings(),
        planner=PlannerSettings(context_length=4096, parallel_lanes=1, search_budget_ms=5),
        noise_milli=noise,
    )
    made = BallotMesh(1, variant, nodes=len(memory))
    for name, size in memory.items():
        made.memory[NodeId(name)] = int(size * GIB)
        made.bandwidth[NodeId(name)] = int((bandwidth or {}).get(name, 20) * 10**9)
    made.specs = (ServedModelSpec(SLOT, "/m", model(gib)),)
    return made


def leader(made: BallotMesh):
    (process,) = [each for each in made.live() if each.coordinator.snapshot(made.now_us).role == "coordinator"]
    return process


def slot(made: BallotMesh, name: str = SLOT):
    return next(item for item in leader(made).coordinator.snapshot(made.now_us).slots if item.slot == name)


def kill(made: BallotMesh, name: str) -> None:
    made.crash(made.processes[NodeId(name)][0])


def operate(made: BallotMesh, *orders: OperatorOrder) -> None:
    chief = leader(made)
    made.run_in(chief, lambda: chief.say(*orders))


def run(made: BallotMesh, seconds: float) -> None:
    made.run_until(made.now_us + int(seconds * SECOND))


def decided(made: BallotMesh, kind: str) -> list[str]:
    return [line for line in made.history if f" {kind}: " in line]


def test_a_restarted_coordinator_that_forgot_its_term_learns_it_and_wins():
    made = mesh({A: 12, B: 4, C: 4}, 13)
    run(made, 30)
    before = slot(made).ballot
    assert before.node_id == A
    made.disks[A].term = 0
    kill(made, A)
    made.at(made.now_us + SECOND, lambda: made.start(A))
    run(made, 60)
    assert made.checkers.converged() == ""
    assert slot(made).ballot > before


def test_a_new_coordinator_adopts_the_running_plan_instead_of_tearing_it_down():
    made = mesh({A: 16, B: 8, C: 4}, 6, bandwidth={A: 1, B: 80})
    run(made, 30)
    assert (leader(made).node_id, slot(made).nodes) == (A, (B,))
    before, served = slot(made).ballot, made.checkers.completed_requests
    kill(made, A)
    run(made, 60)
    assert leader(made).node_id == B
    assert slot(made).ballot == before
    assert slot(made).routable
    assert slot(made).plan is not None, "the adopted plan was evaluated"
    assert made.checkers.completed_requests > served


def test_a_coordinator_that_comes_back_finds_its_plan_still_serving():
    made = mesh({A: 16, B: 8, C: 4}, 6, bandwidth={A: 1, B: 80})
    run(made, 30)
    before = slot(made).ballot
    kill(made, A)
    made.at(made.now_us + 2 * SECOND, lambda: made.start(A))
    run(made, 40)
    assert leader(made).node_id == A
    assert slot(made).ballot == before


def test_a_replacement_plan_never_uses_the_dead_node_and_serves_within_twenty_seconds():
    made = mesh({A: 8, B: 8, C: 8}, 10)
    run(made, 30)
    victim = next(node_id for node_id in slot(made).nodes if node_id != leader(made).node_id)
    kill(made, victim)
    run(made, 20)
    assert slot(made).routable
    assert victim not in slot(made).nodes


def test_a_lost_workers_stage_is_not_shown_as_ready():
    made = mesh({A: 8, B: 8}, 10)
    run(made, 30)
    kill(made, next(node_id for node_id in slot(made).nodes if node_id != leader(made).node_id))
    run(made, 8)
    seen = slot(made)
    assert (seen.state, seen.routable) == ("degraded", False)
    assert list(seen.lost.values()) == ["node_lost"]
    assert SLOT not in leader(made).routes


def test_a_worker_that_is_not_serving_is_noticed_at_once_and_the_plan_is_placed_again():
    made = mesh({A: 8, B: 8, C: 8}, 10)
    run(made, 30)
    before = slot(made)
    victim = made.processes[before.nodes[-1]][0]
    made.run_in(victim, lambda: victim.die(*next(iter(victim.loads))))
    run(made, 2)
    assert not slot(made).routable
    run(made, 10)
    assert slot(made).routable
    assert slot(made).ballot > before.ballot
    assert victim.node_id not in slot(made).nodes, "it just failed"


def test_a_second_worker_that_only_stands_by_is_noticed_within_seconds_and_replaced_or_asked_again():
    made = mesh({A: 8, B: 8}, 10)
    run(made, 30)
    before = slot(made)
    worker = made.processes[next(node_id for node_id in before.nodes if node_id != leader(made).node_id)][0]
    newer = before.ballot._replace(term=before.ballot.term + 1)
    stray = Retire(ballot=epoch_to_wire(before.ballot), slot=SLOT, superseded_by=epoch_to_wire(newer))
    made.run_in(worker, lambda: worker.carry(worker.agent.on_message(leader(made).node_id, stray, made.now_us)))
    assert worker.agent.facts(made.now_us)[0].state != "serving"
    run(made, 2)
    assert (slot(made).state, slot(made).routable) == ("degraded", False)
    assert list(slot(made).lost) == [worker.node_id]
    run(made, 90)
    assert slot(made).routable, "asked again once its back-off is over: nobody stands by for an hour"
    assert slot(made).ballot > before.ballot


def test_of_two_candidates_with_one_term_exactly_one_wins_and_the_other_gives_way():
    made = mesh({A: 8, B: 8}, 6)
    made.weather.blocked = {(A, B), (B, A)}
    run(made, 40)
    served = {process.node_id: process.agent.record(SLOT).active.ballot for process in made.live()}
    assert {ballot.term for ballot in served.values()} == {1}
    assert served[A] < served[B]
    made.weather.blocked = set()
    run(made, 60)
    assert made.checkers.converged() == ""
    assert slot(made).ballot == served[B]
    assert made.processes[A][0].agent.record(SLOT).active is None


def test_a_healthy_plan_survives_while_eligibility_is_refreshed():
    made = mesh({A: 8, B: 8, C: 8}, 10)
    run(made, 30)
    before, rounds = slot(made).ballot, made.checkers.rounds
    made.unsettled = set(slot(made).nodes)
    run(made, 60)
    made.unsettled = set()
    run(made, 30)
    assert slot(made).ballot == before
    assert made.checkers.rounds == rounds


def test_a_broken_plan_waits_for_a_survivor_that_is_connected_but_not_eligible_yet():
    made = mesh({A: 8, B: 8, C: 8, D: 8}, 16)
    run(made, 30)
    victim, survivor = [node_id for node_id in slot(made).nodes if node_id != leader(made).node_id][:2]
    made.unsettled = {survivor}
    kill(made, victim)
    run(made, 20)
    assert decided(made, "deferred")
    assert not slot(made).routable
    made.unsettled = set()
    run(made, 10)
    assert slot(made).routable
    assert victim not in slot(made).nodes


def test_a_broken_plan_without_replacement_is_withdrawn_after_the_grace():
    made = mesh({A: 8, B: 8}, 10)
    run(made, 30)
    kill(made, next(node_id for node_id in slot(made).nodes if node_id != leader(made).node_id))
    run(made, 70)
    assert slot(made).state == "degraded"
    run(made, 20)
    assert slot(made).state == "withdrawn"
    assert leader(made).agent.record(SLOT).active is None
    assert slot(made).refused is not None


def test_fewer_nodes_than_wanted_fall_back_to_one_that_fits():
    made = mesh({A: 16, B: 16}, 10, election=ElectionSettings(minimum_nodes=2))
    run(made, 30)
    assert slot(made).routable
    nodes = slot(made).nodes
    kill(made, next(node_id for node_id in (A, B) if node_id in nodes))
    run(made, 30)
    assert slot(made).routable
    assert len(slot(made).nodes) == 1


def test_a_draining_node_serves_until_the_plan_without_it_is_active():
    made = mesh({A: 8, B: 8, C: 8}, 3, bandwidth={B: 80})
    run(made, 30)
    assert slot(made).nodes == (B,)
    leaving = made.processes[B][0]
    leaving.status = "draining"
    leaving.agent.drain()
    for _ in range(20):
        run(made, 0.5)
        assert slot(made).routable
    assert leaving.node_id not in slot(made).nodes
    run(made, 10)
    assert leaving.agent.record(SLOT).active is None, "it was told to unload"


def test_a_locked_plan_is_withdrawn_but_never_replaced_and_comes_back_with_its_node():
    made = mesh({A: 8, B: 8, C: 8}, 10)
    split = LockedTopology((LockedStage(B, 0, 5), LockedStage(C, 5, 8)))
    made.specs = (replace(made.specs[0], locked=split),)
    run(made, 30)
    assert slot(made).nodes == (B, C)
    kill(made, C)
    run(made, 100)
    assert slot(made).state == "withdrawn"
    made.start(C)
    run(made, 60)
    assert slot(made).nodes == (B, C)
    assert slot(made).routable


def test_a_flapping_node_causes_at_most_one_replan_per_damping_window():
    made = mesh({A: 8, B: 8, C: 8}, 10)
    run(made, 30)
    flapping = next(node_id for node_id in slot(made).nodes if node_id != leader(made).node_id)
    planned = len(decided(made, "planned"))
    for _ in range(6):
        if made.processes[flapping]:
            kill(made, flapping)
        run(made, 12)
        made.start(flapping)
        run(made, 8)
    assert len(decided(made, "planned")) == planned + 1


def test_measurement_noise_never_starts_a_round():
    made = mesh({A: 8, B: 8, C: 8}, 10, noise=45)
    run(made, 30)
    rounds = made.checkers.rounds
    run(made, 900)
    assert made.checkers.rounds == rounds


def test_a_better_plan_waits_for_the_dwell_and_then_pays():
    made = mesh({A: 8, B: 8}, 6, bandwidth={A: 20, B: 20})
    run(made, 30)
    (before,) = slot(made).nodes
    other = B if before == A else A
    made.bandwidth[other] = 90 * 10**9
    run(made, 200)
    assert slot(made).nodes == (before,)
    run(made, 300)
    assert slot(made).nodes == (other,)


def test_an_idle_mesh_does_not_migrate_for_tokens_nobody_wants():
    made = mesh({A: 8, B: 8}, 6, bandwidth={A: 20, B: 20})
    run(made, 30)
    (before,) = slot(made).nodes
    chief = leader(made)
    chief.carry(chief.coordinator.on_observed(SLOT, Observation(300_000, 100, tokens_per_hour=10), made.now_us))
    made.bandwidth[B if before == A else A] = 90 * 10**9
    run(made, 500)
    assert slot(made).nodes == (before,)
    assert any("not_amortised" in line for line in decided(made, "kept"))


@pytest.mark.parametrize("gib", [3, 6])
def test_a_move_breaks_nothing_first_when_memory_allows_and_drains_first_when_not(gib):
    made = mesh({A: 8, B: 8}, gib)
    run(made, 30)
    assert slot(made).routable
    before = slot(made).nodes[0]
    layers = made.specs[0].package.layer_count
    operate(made, lock(SLOT, (before, 0, layers - 1), (B if before == A else A, layers - 1, layers)))
    gaps = 0
    for _ in range(60):
        run(made, 0.25)
        gaps += not slot(made).routable
    assert len(slot(made).nodes) == 2
    assert (gaps > 0) == (gib == 6)


def test_measured_far_below_predicted_names_the_hop():
    made = mesh({A: 8, B: 8}, 10)
    run(made, 30)
    chief, tpot = leader(made), slot(made).plan.modeled.decode_tpot_us
    chief.carry(chief.coordinator.on_observed(SLOT, Observation(tpot * 3, 100), made.now_us))
    chief.carry(chief.coordinator.on_observed(SLOT, Observation(tpot * 3, 200), made.now_us))
    (line,) = decided(made, "measured_far_below_predicted")
    assert "hop n0" in line


def test_a_model_that_is_not_wanted_any_more_is_unloaded_even_if_the_retirement_is_lost():
    made = mesh({A: 8, B: 8, C: 8}, 10)
    run(made, 30)
    nodes = slot(made).nodes
    made.weather.blocked = {(one, other) for one in (A, B, C) for other in (A, B, C)}
    for process in made.live():
        made.run_in(process, lambda process=process: process.carry(process.coordinator.serve((), made.now_us)))
    run(made, 1)
    made.weather.blocked = set()
    run(made, 40)
    assert all(made.processes[node_id][0].agent.record(SLOT).active is None for node_id in nodes)


def test_of_more_models_than_slots_those_with_the_highest_priority_are_heard():
    made = mesh({A: 8, B: 8}, 10)
    wishes = [
        ServedModelSpec(Slot(f"s{number}"), "/m", model(1, name=f"{number}"), priority=number) for number in range(20)
    ]
    made.specs = tuple(wishes)
    run(made, 12)
    names = {item.slot for item in leader(made).coordinator.snapshot(made.now_us).slots}
    assert names == {f"s{number}" for number in range(4, 20)}
