"""Nodes that failed a stage are left out, longer each time, and never for ever."""

from config.settings import AssignmentSettings
from coordinator.assignment.culprits import Culprits
from protocol.ids import NodeId
from tests.unit.coordination.builders import MINUTE, SECOND, member, view

A, B = NodeId("a"), NodeId("b")


def left_out_for_us(culprits: Culprits, now_us: int) -> int:
    """Blame ``a`` at ``now_us``; how long it is left out."""
    culprits.blame(A, "load_failed", now_us)
    due_us = culprits.next_deadline(now_us)
    assert culprits.current(due_us - 1) == {A: "load_failed"}
    assert culprits.current(due_us) == {}
    return due_us - now_us


def test_the_back_off_doubles_up_to_ten_minutes():
    culprits, now_us, waits = Culprits(AssignmentSettings()), 0, []
    for _ in range(6):
        waits.append(left_out_for_us(culprits, now_us) // MINUTE)
        now_us += 20 * MINUTE
    assert waits == [1, 2, 4, 8, 10, 10]


def test_taking_part_in_a_plan_forgives_everything():
    culprits = Culprits(AssignmentSettings())
    left_out_for_us(culprits, 0)
    left_out_for_us(culprits, 10 * MINUTE)
    culprits.absolve(A)
    assert culprits.current(10 * MINUTE + 1) == {}
    assert left_out_for_us(culprits, 20 * MINUTE) == MINUTE


def test_the_next_deadline_is_the_first_that_may_be_tried_again():
    culprits = Culprits(AssignmentSettings())
    culprits.blame(A, "x", 0)
    culprits.blame(B, "y", 10 * SECOND)
    assert culprits.next_deadline(0) == MINUTE
    assert culprits.next_deadline(MINUTE) == MINUTE + 10 * SECOND
    assert culprits.next_deadline(5 * MINUTE) is None


def test_a_node_that_is_gone_for_good_needs_no_memory():
    culprits = Culprits(AssignmentSettings())
    culprits.blame(A, "x", 0)
    culprits.forget_absent(view(member("a")))
    assert culprits.current(1) == {A: "x"}
    culprits.forget_absent(view(member("b")))
    assert culprits.current(1) == {}


def test_where_nothing_can_be_placed_without_it_a_node_may_be_asked_after_an_eighth_of_the_wait():
    culprits, barred_s = Culprits(AssignmentSettings()), []
    for number in range(6):
        begun_us = number * 20 * MINUTE
        culprits.blame(A, "load_failed", begun_us)
        barred_s.append(next(each for each in range(601) if not culprits.barred(begun_us + each * SECOND)))
        assert culprits.current(begun_us + barred_s[-1] * SECOND) == {A: "load_failed"}
    assert barred_s == [8, 15, 30, 60, 75, 75]
