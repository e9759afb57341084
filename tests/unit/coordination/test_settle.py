"""The settle barrier: who may be planned, and when the view is calm."""

import pytest

from config.settings import ElectionSettings
from coordinator.election.settle import SettleBarrier, flaps_left
from protocol.ids import NodeId
from tests.unit.coordination.builders import MINUTE, SECOND, link, member, view

B = NodeId("b")


def barrier(**settings):
    return SettleBarrier(ElectionSettings(**settings), 0)


def test_a_view_settles_eight_seconds_after_its_last_change():
    made = barrier()
    made.observe(view(member("a")), 0)
    made.observe(view(member("a"), member("b")), 5 * SECOND)
    assert not made.settled(12 * SECOND)
    assert made.settled(13 * SECOND)


def test_fewer_nodes_than_wanted_never_settle():
    made = barrier(minimum_nodes=2)
    made.observe(view(member("a")), 0)
    assert not made.settled(MINUTE)


@pytest.mark.parametrize(
    "noise",
    [
        {"links": (link("a", 900),)},
        {"bandwidth": 7 * 10**9},
        {"seq": 99},
        {"settled": False},
        {"state": "suspect"},
        {"flaps": ()},
    ],
)
def test_noise_does_not_restart_the_wait(noise):
    made = barrier()
    made.observe(view(member("a"), member("b")), 0)
    made.observe(view(member("a"), member("b", **noise)), 7 * SECOND)
    assert made.settled(8 * SECOND)


@pytest.mark.parametrize(
    "change",
    [{"gib": 16}, {"memory_cap_bytes": 5}, {"status": "draining"}, {"conflict": True}, {"state": "dead"}],
)
def test_capacity_and_membership_restart_the_wait(change):
    made = barrier()
    made.observe(view(member("a"), member("b")), 0)
    made.observe(view(member("a"), member("b", **change)), 7 * SECOND)
    assert not made.settled(14 * SECOND)
    assert made.settled(15 * SECOND)


def test_a_node_that_came_back_waits_twice_as_long_each_time_but_holds_nobody_up():
    made = barrier()
    there, gone = view(member("a"), member("b")), view(member("a"), member("b", state="dead"))
    made.observe(there, 0)
    for flap in range(3):
        made.observe(gone, (10 + flap) * SECOND)
        made.observe(there, (10 + flap) * SECOND + 1)
    back = 12 * SECOND + 1
    assert made.flaps(B, back) == 3
    made.observe(there, back + 9 * SECOND)
    assert made.settled(back + 9 * SECOND), "the others are settled without it"
    assert not made.node_settled(B, back + 63 * SECOND)
    assert made.node_settled(B, back + 64 * SECOND)


def test_a_restart_is_a_flap_and_a_clean_leave_is_none():
    restarted, left = barrier(), barrier()
    for made in (restarted, left):
        made.observe(view(member("a"), member("b")), 0)
    restarted.observe(view(member("a"), member("b", instance="2" * 32)), SECOND)
    left.observe(view(member("a"), member("b", state="left")), SECOND)
    left.observe(view(member("a"), member("b", instance="2" * 32)), 2 * SECOND)
    assert restarted.flaps(B, 2 * SECOND) == 1
    assert left.flaps(B, 3 * SECOND) == 0


def test_one_flap_is_forgiven_every_half_hour_and_the_wait_is_capped_at_ten_minutes():
    made = barrier()
    there, gone = view(member("b")), view(member("b", state="dead"))
    made.observe(there, 0)
    for flap in range(12):
        made.observe(gone, flap * SECOND + 1)
        made.observe(there, flap * SECOND + 2)
    back = 11 * SECOND + 2
    assert not made.node_settled(B, back + 10 * MINUTE - 1)
    assert made.node_settled(B, back + 10 * MINUTE)
    assert made.flaps(B, back + 30 * MINUTE) == 11
    assert made.flaps(B, back + 12 * 30 * MINUTE) == 0


def test_flaps_that_membership_saw_count_too():
    half_hour = 30 * MINUTE
    assert flaps_left((0, 1, 2), half_hour, 3) == 3
    assert flaps_left((0, 1, 2), half_hour, 2 + 2 * half_hour) == 1
    assert flaps_left((0, half_hour + 1), half_hour, half_hour + 2) == 1
    made = barrier()
    made.observe(view(member("b", flaps=(0, 1))), 2)
    assert not made.node_settled(B, 32 * SECOND)
    assert made.node_settled(B, 32 * SECOND + 2)


def test_the_next_deadline_is_when_something_settles():
    made = barrier()
    made.observe(view(member("a")), SECOND)
    assert made.next_deadline(SECOND) == 9 * SECOND
    assert made.next_deadline(9 * SECOND) is None


def test_a_node_that_flapped_is_in_reserve_after_an_eighth_of_its_wait_but_not_before_eight_seconds():
    made, now_us, waits = barrier(), 0, []
    for _ in range(8):
        made.observe(view(member("a"), member("b", state="dead")), now_us)
        made.observe(view(member("a"), member("b")), now_us)
        waits.append(next(each for each in range(601) if made.in_reserve(B, now_us + each * SECOND)))
        assert not made.node_settled(B, now_us + waits[-1] * SECOND)
        now_us += 100 * SECOND
    assert waits == [8, 8, 8, 16, 32, 64, 75, 75]
    made.observe(view(member("a"), member("b", state="dead")), now_us)
    assert not made.in_reserve(B, now_us + 10 * MINUTE)
