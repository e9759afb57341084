"""Every kind of decision, taken by the real core, is told in events, API and metrics: why, from what to what, at what price."""

from collections.abc import Callable
from typing import NamedTuple, get_args

import pytest

from config.settings import ElectionSettings
from coordinator.assignment.effects import Decision, DecisionKind
from protocol.quic.interface import TransportCounters
from stage_agent.api.app import build_app
from stage_agent.journal import Journal
from stage_agent.narrator import OUTCOMES, Narrator
from tests.simulation.ballot_mesh import SECOND, BallotMesh
from tests.simulation.ballot_orders import exclude
from tests.simulation.test_ballots_moves import faster_elsewhere, measured, moved
from tests.simulation.test_ballots_reports import (
    A,
    B,
    C,
    D,
    kill,
    leader,
    mesh,
    run,
    slot,
)
from tests.unit.api.pictures import Remembering, ShownMesh, ask, picture


def placed() -> BallotMesh:
    made = mesh({A: 8, B: 8}, 10)
    run(made, 30)
    return made


def adopted() -> BallotMesh:
    made = mesh({A: 16, B: 8, C: 4}, 6, bandwidth={A: 1, B: 80})
    run(made, 30)
    kill(made, A)
    run(made, 60)
    return made


def better_after_the_dwell() -> BallotMesh:
    made = mesh({A: 8, B: 8}, 6)
    run(made, 30)
    (before,) = slot(made).nodes
    made.bandwidth[B if before == A else A] = 90 * 10**9
    run(made, 400)
    return made


def rolled_back() -> BallotMesh:
    made, _, tpot = moved()
    measured(made, tpot * 2, tokens_per_hour=100_000)
    run(made, 60)
    return made


def not_worth_it() -> BallotMesh:
    made, _ = faster_elsewhere()
    run(made, 400)
    return made


def broken(gib: float = 10, nodes: tuple = (A, B, C), **fields) -> BallotMesh:
    made = mesh(dict.fromkeys(nodes, 8), gib, **fields)
    run(made, 30)
    return made


def lost() -> BallotMesh:
    made = broken()
    kill(made, next(node_id for node_id in slot(made).nodes if node_id != leader(made).node_id))
    run(made, 30)
    return made


def deferred() -> BallotMesh:
    made = broken(16, (A, B, C, D))
    victim, survivor = [node_id for node_id in slot(made).nodes if node_id != leader(made).node_id][:2]
    made.unsettled = {survivor}
    kill(made, victim)
    run(made, 20)
    return made


def withdrawn() -> BallotMesh:
    made = broken(nodes=(A, B))
    kill(made, next(node_id for node_id in slot(made).nodes if node_id != leader(made).node_id))
    run(made, 90)
    return made


def too_large() -> BallotMesh:
    made = mesh({A: 8, B: 8}, 40)
    run(made, 30)
    return made


def fewer_than_wanted() -> BallotMesh:
    made = mesh({A: 16, B: 16}, 10, election=ElectionSettings(minimum_nodes=2))
    run(made, 30)
    kill(made, next(node_id for node_id in (A, B) if node_id != leader(made).node_id))
    run(made, 30)
    return made


def ordered() -> BallotMesh:
    made = broken()
    chief = leader(made)
    made.run_in(chief, lambda: chief.say(exclude(C)))
    return made


def load_fails() -> BallotMesh:
    made = mesh({A: 8, B: 8}, 10)
    made.weather.load_failure_milli = 1000
    run(made, 30)
    return made


def far_slower_than_promised() -> BallotMesh:
    made = placed()
    measured(made, slot(made).plan.modeled.decode_tpot_us * 3)
    return made


def left_over() -> BallotMesh:
    """A stage that serves an older plan, which its node did not hear the end of."""
    made = mesh({A: 8, B: 8, C: 8}, 3, bandwidth={B: 80})
    run(made, 30)
    assert slot(made).nodes == (B,)
    made.weather.blocked = {(B, A), (A, B), (B, C), (C, B)}
    run(made, 60)
    made.weather.blocked = set()
    run(made, 60)
    return made


class Case(NamedTuple):
    made: Callable[[], BallotMesh]
    kind: DecisionKind
    words: str
    old: bool = False
    new: bool = False
    gain: bool = False
    cost: bool = False


CASES = {
    "placed": Case(placed, "planned", "initial", new=True, cost=True),
    "serving": Case(placed, "activated", "every stage serves", new=True, cost=True),
    "adopted": Case(adopted, "adopted", "rows show it", new=True),
    "moved": Case(better_after_the_dwell, "planned", "changed", old=True, new=True, gain=True, cost=True),
    "serving after a move": Case(
        better_after_the_dwell, "activated", "every", old=True, new=True, gain=True, cost=True
    ),
    "cut moved": Case(lambda: moved()[0], "planned", "half-way", old=True, new=True, gain=True, cost=True),
    "rolled back": Case(rolled_back, "rolled_back", "slower than before", old=True, new=True, gain=True, cost=True),
    "kept": Case(not_worth_it, "kept", "not_amortised", old=True, new=True, gain=True, cost=True),
    "broken": Case(lost, "broken", "node_lost", old=True),
    "replaced": Case(lost, "planned", "broken", old=True, new=True, cost=True),
    "deferred": Case(deferred, "deferred", "not settled", old=True),
    "withdrawn": Case(withdrawn, "withdrawn", "within the grace", old=True),
    "refused": Case(too_large, "refused", "no_valid_topology"),
    "refused while broken": Case(withdrawn, "refused", "no_valid_topology", old=True),
    "fallback": Case(fewer_than_wanted, "planned", "fewer nodes than wanted", old=True, new=True, cost=True),
    "operator": Case(ordered, "operator", "exclude n02, said on n0"),
    "failed": Case(load_fails, "attempt_failed", "refused to stage: load_failed", new=True, cost=True),
    "far too slow": Case(far_slower_than_promised, "measured_far_below_predicted", "predicted", old=True),
    "left over": Case(left_over, "retired_foreign", "not part of the plan", old=True),
}


class Nobody:
    """A membership that knows no names."""

    def members(self) -> dict:
        return {}


def told(decision: Decision) -> tuple[dict, str]:
    """The decision as the API's event and as scraped metrics, by the real narrator, journal and API."""
    journal = Journal()
    Narrator(Nobody(), journal).decision(decision)
    shown = ShownMesh(now=picture(counters=journal.counters(TransportCounters())))
    shown.events = journal.events
    app = build_app(shown, Remembering())
    (event,) = ask(app, "GET", "/api/v1/events").json()["events"]
    return event, ask(app, "GET", "/metrics").text


@pytest.mark.parametrize("name", CASES)
def test_a_decision_is_told_with_reason_plans_gain_and_cost(name):
    case = CASES[name]
    made = case.made()
    found = [
        decision
        for process in made.live()
        for decision in process.coordinator.snapshot(made.now_us).decisions
        if decision.kind == case.kind and case.words in decision.reason
    ]
    assert found, made.history
    decision = found[-1]
    stakes = (bool(decision.old_plan), bool(decision.new_plan), bool(decision.gain_us), bool(decision.cost_us))
    assert stakes == (case.old, case.new, case.gain, case.cost)
    event, metrics = told(decision)
    assert event["kind"] == f"plan_{case.kind}"
    assert event["fields"] == {
        "slot": decision.slot,
        "old_plan": decision.old_plan,
        "new_plan": decision.new_plan,
        "gain_us": decision.gain_us,
        "cost_us": decision.cost_us,
    }
    assert event["text"].startswith(decision.reason)
    for known, text in ((case.gain, "gains "), (case.cost, "moving costs "), (case.old, decision.old_plan[:8] or "?")):
        assert (text in event["text"]) == known, event["text"]
    assert f'stagemesh_replan_total{{outcome="{OUTCOMES[case.kind]}",reason="{case.kind}"}} 1.0' in metrics


def test_the_table_has_every_kind():
    assert {case.kind for case in CASES.values()} == set(get_args(DecisionKind)) == set(OUTCOMES)


def test_a_plan_that_stays_is_not_reported_again_and_again():
    made = placed()
    before = len(made.history)
    run(made, 600)
    assert len(made.history) == before


def test_an_attempt_that_is_given_up_is_recorded_too():
    made = mesh({A: 8, B: 8}, 10)
    made.weather.load_us = 60 * SECOND
    run(made, 12)
    chief = leader(made)
    assert slot(made).state == "loading"
    made.run_in(chief, lambda: chief.carry(chief.coordinator.serve((), made.now_us)))
    (decision,) = [each for each in chief.coordinator.snapshot(made.now_us).decisions if each.kind == "attempt_failed"]
    assert (decision.reason, bool(decision.new_plan)) == ("not wanted any more", True)


def test_a_left_over_stage_is_reported_once_although_it_is_told_to_go_until_it_goes():
    made = left_over()
    decisions = leader(made).coordinator.snapshot(made.now_us).decisions
    assert [each.kind for each in decisions].count("retired_foreign") == 1
    assert made.processes[B][0].agent.record(slot(made).slot).active is None
