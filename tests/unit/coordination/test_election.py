"""Who coordinates, and under which ballot."""

import itertools
from random import Random

import pytest

from config.settings import ElectionSettings
from coordinator.election.campaign import Campaign
from coordinator.election.canonical import canonical_coordinator, memory_class
from protocol.fencing import NO_EPOCH, epoch_to_wire
from protocol.ids import Instance, NodeId
from tests.unit.coordination.builders import GIB, SECOND, ballot, member, serving, view


def chosen(*members, pin="", flapping=()):
    return canonical_coordinator(view(*members), counts=lambda node_id: node_id not in flapping, pin=pin)


def test_the_largest_memory_class_wins_then_the_smallest_id():
    assert chosen(member("a", gib=8), member("b", gib=64), member("c", gib=64)) == "b"


@pytest.mark.parametrize(("detected", "installed"), [(62, 64), (63, 64), (15, 16), (65, 64)])
def test_what_firmware_reserves_does_not_change_the_class(detected, installed):
    assert memory_class(detected * GIB) == memory_class(installed * GIB)


def test_twice_the_memory_is_another_class():
    assert memory_class(32 * GIB) < memory_class(64 * GIB)


def test_the_incumbent_of_an_active_plan_keeps_the_role_from_a_larger_node():
    assert chosen(member("a", gib=64), member("b", stages=(serving(ballot(3, "b"), 0, 8),))) == "b"


@pytest.mark.parametrize("change", [{"state": "dead"}, {"state": "left"}, {"status": "draining"}, {"conflict": True}])
def test_an_incumbent_that_is_gone_or_going_loses_the_role(change):
    stage = serving(ballot(3, "b"), 0, 8)
    assert chosen(member("a"), member("b", **change), member("c", stages=(stage,))) == "a"


def test_of_two_incumbents_after_a_partition_the_higher_ballot_leads():
    low, high = serving(ballot(3, "a"), 0, 8), serving(ballot(4, "c"), 0, 8)
    assert chosen(member("a", gib=64, stages=(low,)), member("b"), member("c", stages=(high,))) == "c"


def test_a_pin_overrides_while_the_pinned_node_can():
    assert chosen(member("a"), member("b"), pin="b") == "b"
    assert chosen(member("a"), member("b", state="dead"), pin="b") == "a"


def test_a_node_that_may_not_coordinate_or_flaps_is_passed_over():
    assert chosen(member("a", can_coordinate=False), member("b")) == "b"
    assert chosen(member("a"), member("b"), member("c"), flapping=("a",)) == "b"
    assert chosen(member("a"), flapping=("a",)) == "a", "better than nobody"
    assert chosen(member("a", can_coordinate=False)) is None


def test_nodes_that_saw_each_other_flap_choose_the_same_one_and_not_each_itself():
    mesh = [member("a", gib=8), member("b", gib=64), member("c", gib=8), member("d", gib=8)]
    in_the_eyes_of = {node: tuple({"a", "b", "c", "d"} - {node}) for node in "abcd"}
    assert {chosen(*mesh, flapping=others) for others in in_the_eyes_of.values()} == {"b"}
    halves = [("a", "b"), ("c", "d")]
    assert {chosen(*mesh, flapping=half) for half in halves} == {"b"}, "as after a cut in the middle"


def campaign(last_term=0):
    return Campaign(
        node_id=NodeId("a"),
        instance=Instance("0" * 32),
        last_term=last_term,
        settings=ElectionSettings(),
        random=Random(1),
    )


def test_a_term_is_above_everything_used_and_seen():
    made = campaign(last_term=7)
    assert made.next_ballot().term == 8
    made.learn(41)
    assert made.next_ballot().term == 42
    made.learn(3)
    assert made.next_ballot().term == 43


def test_a_claim_uses_no_term():
    made = campaign()
    assert made.claim().term == made.claim().term == made.next_ballot().term == 1


def test_refusals_double_the_wait_up_to_a_minute_and_success_forgets_them():
    made = campaign()
    waits = [made.refused(0) and made.not_before_us for _ in range(10)]
    assert SECOND <= waits[0] <= 2 * SECOND
    assert waits == sorted(waits)
    assert waits[-1] == 60 * SECOND
    made.succeeded()
    assert made.not_before_us == 0
    assert made.refused(0) <= 2 * SECOND


def test_the_refusals_own_wait_is_respected():
    assert campaign().refused(0, retry_after_us=9 * SECOND) == 9 * SECOND


def test_failures_that_nobody_contested_do_not_double():
    made = campaign()
    for now in range(0, 100 * SECOND, 10 * SECOND):
        assert made.refused(now, contested=False) - now <= 2 * SECOND


def test_ballots_are_ordered_by_term_then_node_then_process_start():
    ordered = [NO_EPOCH, ballot(1, "a"), ballot(1, "b", "0" * 32), ballot(1, "b", "1" * 32), ballot(2, "a")]
    assert all(low < high for low, high in itertools.pairwise(ordered))
    assert max(ordered) == ordered[-1]
    assert epoch_to_wire(ordered[3]).instance == "1" * 32
