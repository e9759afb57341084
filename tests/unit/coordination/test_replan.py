"""Keep or replace."""

from dataclasses import replace

import pytest

from config.settings import AssignmentSettings, ReplanSettings
from coordinator.planner.plan import Modeled
from coordinator.replan import Observation, damped, judge, migration_cost_us, must_roll_back
from protocol.ids import NodeId
from tests.unit.coordination.builders import MINUTE, SECOND, plan

FAST_DISK = AssignmentSettings(load_bytes_per_s_floor=1000)


def verdict(before, after, *, active_for=10 * MINUTE, **arguments):
    current = plan(("a", 0, 4), ("b", 4, 8), tpot_us=before)
    candidate = plan(("a", 0, 5), ("b", 5, 8), tpot_us=after)
    return judge(
        ReplanSettings(), FAST_DISK, current=current, candidate=candidate, active_for_us=active_for, **arguments
    )


def test_the_same_plan_is_kept():
    same = plan(("a", 0, 8))
    assert judge(ReplanSettings(), FAST_DISK, current=same, candidate=same, active_for_us=MINUTE).reason == "same_plan"


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (1000, 1000, "not_better"),
        (1000, 1100, "not_better"),
        (1000, 901, "below_min_improvement"),
        (1000, 900, "better"),
    ],
)
def test_ten_per_cent_is_the_least_that_moves_a_healthy_plan(before, after, reason):
    assert verdict(before, after).reason == reason


def test_five_minutes_must_have_passed():
    assert verdict(1000, 500, active_for=5 * MINUTE - 1).reason == "dwell"
    assert verdict(1000, 500, active_for=5 * MINUTE).replace


def test_the_gain_must_exceed_the_cost_of_moving():
    cost = verdict(1000, 500).cost_us
    assert cost == 3 * SECOND + 50_000, "fifty bytes at a thousand a second, and one reply time-out of stall"
    few = Observation(1000, 100, tokens_per_hour=cost // 500)
    enough = Observation(1000, 100, tokens_per_hour=cost // 500 + 1)
    assert verdict(1000, 500, observed=few).reason == "not_amortised"
    assert verdict(1000, 500, observed=enough).replace


def test_the_verdict_carries_gain_and_cost():
    made = verdict(1000, 600)
    assert (made.gain_us, made.replace) == (400, True)


def test_a_plan_that_was_rolled_back_is_not_tried_again():
    candidate = plan(("a", 0, 5), ("b", 5, 8), tpot_us=1)
    assert verdict(1000, 1, rejected=frozenset({candidate.plan_hash})).reason == "rejected_before"


def test_unmodelled_plans_are_compared_by_capacity():
    current, candidate = plan(("a", 0, 8), tpot_us=None), plan(("b", 0, 8), tpot_us=None)
    settings = ReplanSettings()
    same = judge(settings, FAST_DISK, current=current, candidate=candidate, active_for_us=10 * MINUTE)
    larger = judge(
        settings,
        FAST_DISK,
        current=current,
        candidate=replace(candidate, context_length=1024),
        active_for_us=10 * MINUTE,
    )
    assert (same.reason, larger.reason) == ("not_better", "better")


def test_throughput_is_compared_by_tokens_per_second():
    current = replace(plan(("a", 0, 8), tpot_us=100), modeled=Modeled(100, tokens_per_s=10.0))
    candidate = replace(plan(("b", 0, 8), tpot_us=200), modeled=Modeled(200, tokens_per_s=20.0), objective="throughput")
    assert judge(ReplanSettings(), FAST_DISK, current=current, candidate=candidate, active_for_us=10 * MINUTE).replace


def test_stages_that_stay_cost_nothing_and_missing_bytes_are_fetched_too():
    current, candidate = plan(("a", 0, 4), ("b", 4, 8)), plan(("a", 0, 4), ("c", 4, 8))
    cost = {"current": current, "candidate": candidate, "break_first": False}
    loaded = migration_cost_us(FAST_DISK, missing_bytes={}, **cost)
    fetched = migration_cost_us(FAST_DISK, missing_bytes={NodeId("c"): 40}, **cost)
    assert (loaded, fetched) == (3_040_000, 3_080_000)


def test_breaking_first_stalls_for_the_whole_load():
    current, candidate = plan(("a", 0, 4), ("b", 4, 8)), plan(("a", 0, 4), ("c", 4, 8))
    both = {"current": current, "candidate": candidate, "missing_bytes": {}}
    slow = AssignmentSettings(load_bytes_per_s_floor=1)
    assert migration_cost_us(slow, break_first=True, **both) == 2 * 40 * SECOND


def spans(topology):
    return [(stage.node_id, stage.layer_start, stage.layer_end) for stage in topology.stages]


def test_a_cut_moves_half_way_and_arrives_after_a_few_steps():
    here, there = plan(("a", 0, 2), ("b", 2, 20)), plan(("a", 0, 13), ("b", 13, 20))
    cuts = []
    while here.stages[0].layer_end != 13:
        here = plan(*spans(damped(here, there)))
        cuts.append(here.stages[0].layer_end)
    assert cuts == [8, 11, 12, 13]


def test_other_nodes_are_not_a_cut_that_moves():
    assert damped(plan(("a", 0, 4), ("b", 4, 8)), plan(("b", 0, 4), ("a", 4, 8))) is None
    assert damped(plan(("a", 0, 8)), plan(("a", 0, 4), ("b", 4, 8))) is None


@pytest.mark.parametrize(("after", "tokens", "back"), [(1111, 64, False), (1112, 64, True), (9999, 63, False)])
def test_a_loss_of_more_than_ten_per_cent_is_rolled_back_once_it_is_well_measured(after, tokens, back):
    assert must_roll_back(ReplanSettings(), before_tpot_us=1000, observed=Observation(after, tokens)) == back
