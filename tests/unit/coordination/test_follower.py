"""Whom a node follows while its view has not settled."""

import pytest

from config.settings import ElectionSettings
from coordinator.election.follower import Follower
from coordinator.election.settle import SettleBarrier
from tests.unit.coordination.builders import SECOND, ballot, member, serving, view

DELAY_US = 2 * SECOND
LONG_AGO = member("a", gib=64, instance="1" * 32)
AGAIN = member("a", gib=8, instance="2" * 32)
"""Another process, and no longer the largest."""


class World:
    """A node that followed ``a`` in a settled view, and now sees another view every half second."""

    def __init__(self, *members):
        self.barrier = SettleBarrier(ElectionSettings(), 0)
        self.follower = Follower(self.barrier, DELAY_US)
        self.now_us = 0
        self.sees(*members, for_us=60 * SECOND)

    def sees(self, *members, for_us, pin=""):
        """Who was followed at the end; the first look is at once."""
        seen, until_us = view(*members, me="b"), self.now_us + for_us
        while True:
            self.barrier.observe(seen, self.now_us)
            self.follower.look(seen, pin, self.now_us)
            if self.now_us >= until_us:
                return self.follower.node_id
            self.now_us += SECOND // 2


@pytest.fixture
def world():
    made = World(LONG_AGO, member("b", gib=32))
    assert made.follower.node_id == "a"
    return made


def test_an_incumbent_that_is_there_stays_until_the_view_has_settled(world):
    smaller = member("a", gib=8, instance="1" * 32)
    assert world.sees(smaller, member("b", gib=32), for_us=4 * SECOND) == "a"
    assert world.sees(smaller, member("b", gib=32), for_us=60 * SECOND) == "b"


def test_an_incumbent_that_is_gone_is_replaced_after_the_delay(world):
    gone = member("a", gib=64, instance="1" * 32, state="dead")
    assert world.sees(gone, member("b", gib=32), for_us=DELAY_US - SECOND // 2) == "a"
    assert world.follower.next_deadline() == 62 * SECOND
    assert world.sees(gone, member("b", gib=32), for_us=SECOND // 2) == "b"


def test_an_absence_that_ended_does_not_shorten_the_next(world):
    gone, back = (member("a", gib=8, instance="1" * 32, **state) for state in ({"state": "dead"}, {}))
    world.sees(gone, member("b", gib=32), for_us=DELAY_US - SECOND // 2)
    world.sees(back, member("b", gib=32), for_us=SECOND)
    assert world.sees(gone, member("b", gib=32), for_us=DELAY_US - SECOND) == "a"


def test_an_incumbent_that_was_restarted_and_serves_nothing_is_gone_too(world):
    """It waits to be chosen. Before, the others waited for it until all flaps were forgiven."""
    assert world.sees(AGAIN, member("b", gib=32), for_us=DELAY_US) == "b"


def test_a_restarted_incumbent_whose_plan_still_serves_is_followed(world):
    stage = serving(ballot(3, "a"), 0, 8)
    assert world.sees(AGAIN, member("b", gib=32, stages=(stage,)), for_us=60 * SECOND) == "a"


def test_a_restarted_incumbent_that_is_still_the_choice_is_missed_no_later_than_another():
    world = World(LONG_AGO, member("b", gib=32))
    again = member("a", gib=64, instance="2" * 32)
    world.sees(again, member("b", gib=32), for_us=60 * SECOND)
    assert world.sees(AGAIN, member("b", gib=32), for_us=4 * SECOND) == "a", "it is the process that was chosen"


def test_a_pin_is_followed_at_once(world):
    assert world.sees(LONG_AGO, member("b", gib=32), for_us=0, pin="b") == "b"
