"""What is measured under a plan: traffic, a plan far slower than promised, and what to go back to."""

from dataclasses import replace

import pytest

from config.settings import ReplanSettings
from coordinator.assignment.measured import Measured
from coordinator.assignment.needs import rollback_due
from coordinator.assignment.running import Former, RunningPlan, RunningStage, adopt
from coordinator.planner.problem import LockedStage
from coordinator.replan import Observation
from protocol.ballots import FormerSplit
from protocol.ids import Instance, NodeId
from tests.unit.coordination.builders import DIGEST, MINUTE, SECOND, SLOT, ballot, member, plan, serving, view

HOUR = 60 * MINUTE


def running(term: int = 1, *, former: Former | None = None) -> RunningPlan:
    stages = (
        RunningStage(NodeId("a"), Instance("1" * 32), 0, 5, 10),
        RunningStage(NodeId("b"), Instance("1" * 32), 5, 8, 10),
    )
    split = plan(("a", 0, 5), ("b", 5, 8), tpot_us=1000)
    return RunningPlan(SLOT, ballot(term), split.plan_hash, DIGEST, stages, 512, 1, 0, split, former)


def seen(tpot_us: int = 900, tokens: int = 100, **fields) -> Observation:
    return Observation(tpot_us, tokens, **fields)


def test_traffic_is_what_was_decoded_while_somebody_watched():
    measured, one = Measured(), running()
    measured.take(one, seen(tokens=1_000), view(), 0)
    assert measured.of(one, 59 * SECOND).tokens_per_hour is None, "too short to be a rate"
    measured.take(one, seen(tokens=1_600), view(), 6 * MINUTE)
    assert measured.of(one, 6 * MINUTE).tokens_per_hour == 6_000
    assert measured.of(one, 12 * MINUTE).tokens_per_hour == 3_000, "silence counts"


def test_traffic_of_more_than_an_hour_ago_is_forgotten():
    measured, one = Measured(), running()
    for minute in range(0, 120, 5):
        tokens = 10_000 if minute >= 60 else minute * 166
        measured.take(one, seen(tokens=tokens), view(), minute * MINUTE)
    assert measured.of(one, 130 * MINUTE).tokens_per_hour == 0


def test_a_rate_that_was_given_is_taken_as_it_is():
    measured, one = Measured(), running()
    measured.take(one, seen(tokens_per_hour=7), view(), 0)
    assert measured.of(one, HOUR).tokens_per_hour == 7


def test_measurements_of_another_plan_are_not_handed_out():
    measured, one, next_one = Measured(), running(1), running(2)
    measured.take(one, seen(), view(), 0)
    assert measured.of(next_one, 0) is None
    measured.take(next_one, seen(tpot_us=9_000, tokens=999, ballot=ballot(1)), view(), 0)
    assert measured.of(next_one, 0) is None, "a row of the old plan that arrives late"
    measured.take(next_one, seen(ballot=ballot(2)), view(), 0)
    assert measured.of(next_one, 0).tpot_us == 900


def test_far_too_slow_is_said_once_a_plan():
    measured = Measured()
    assert measured.take(running(1), seen(tpot_us=3_000), view(), 0) is not None
    assert measured.take(running(1), seen(tpot_us=3_000, tokens=200), view(), 1) is None
    assert measured.take(running(2), seen(tpot_us=3_000), view(), 2) is not None


def test_what_to_go_back_to_is_the_split_and_its_measured_time():
    measured, one = Measured(), running()
    assert measured.former(one, 0) is None, "nothing to compare with"
    measured.take(one, seen(tpot_us=900), view(), 0)
    assert measured.former(one, 0) == Former((5, 8), 900)


def test_a_coordinator_that_finds_the_plan_in_rows_can_go_back_too():
    told = FormerSplit(layer_ends=(3, 8), tpot_us=1_000)
    rows = view(
        member("a", stages=(serving(ballot(1), 0, 5, 0, 2, former=told),)),
        member("b", stages=(serving(ballot(1), 5, 8, 1, 2),)),
    )
    adopted = adopt(rows, SLOT, model_digest=DIGEST, layer_count=8, now_us=0)
    assert adopted.former == Former((3, 8), 1_000)
    assert adopted.former_topology().stages == (LockedStage("a", 0, 3), LockedStage("b", 3, 8))
    settings = ReplanSettings()
    assert not rollback_due(settings, adopted, seen(tpot_us=1_100))
    assert rollback_due(settings, adopted, seen(tpot_us=1_200))
    assert not rollback_due(settings, replace(adopted, former=None), seen(tpot_us=9_999))
    assert not rollback_due(settings, adopted, None)


@pytest.mark.parametrize("ends", [(8,), (3, 5, 8), (0, 8), (8, 8), (3, 9), (5, 3)])
def test_a_former_split_that_is_none_of_these_nodes_is_not_gone_back_to(ends):
    told = running(former=Former(ends, 1))
    assert told.former_topology() is None
    assert not rollback_due(ReplanSettings(), told, seen(tpot_us=9_999))
