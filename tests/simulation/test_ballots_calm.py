"""Each side of a cut that stays comes to rest by itself, and who does not is found."""

import pytest

from coordinator.coordinator import Coordinator
from coordinator.election.follower import Follower
from tests.simulation.ballot_calm import await_rest, components, must_serve, two_sides
from tests.simulation.ballot_chaos import SeedFailedError, run_scenario
from tests.simulation.ballot_checkers import ViolationError
from tests.simulation.ballot_mesh import Variant
from tests.simulation.ballot_scenario import make_scenario
from tests.simulation.test_ballots_reports import SLOT, A, B, C, D, mesh, run

SEEDS = 200


class MajorityFollower(Follower):
    """Follows somebody only where most of the nodes that it knows are connected, as if a quorum were needed."""

    def look(self, view, pin, now_us):
        if 2 * len(view.connected) > len(view.members):
            super().look(view, pin, now_us)
        else:
            self.node_id = None


class HopefulFollower(Follower):
    """Keeps a coordinator that is gone: it may come back."""

    def look(self, view, pin, now_us):
        if self.node_id is None or self.node_id in view.connected:
            super().look(view, pin, now_us)


class MajorityCoordinator(Coordinator):
    follower_type = MajorityFollower


class HopefulCoordinator(Coordinator):
    follower_type = HopefulFollower


@pytest.mark.parametrize("broken", [MajorityCoordinator, HopefulCoordinator])
def test_a_side_that_waits_for_the_other_one_is_found(broken):
    """After healing nothing is wrong with it: only the calm behind the cut shows it."""
    for seed in range(SEEDS):
        scenario = make_scenario(seed, short=True, storms=1)
        if not scenario.standing:
            continue
        try:
            run_scenario(scenario, Variant(coordinator=broken))
        except SeedFailedError as error:
            if error.problem.startswith("invariant 5:"):
                return
    pytest.fail(f"{broken.__name__} was not found")


def cut_in_the_middle(gib: float):
    """Two nodes on each side, a model of ``gib``, and what the sides amount to when they are at rest."""
    made = mesh({A: 8, B: 8, C: 8, D: 8}, gib)
    run(made, 30)
    made.weather.blocked = two_sides(made.node_ids, (1, 1, 0, 0))
    return made, await_rest(made)


def test_both_sides_serve_where_the_model_fits_with_room_to_spare():
    made, sides = cut_in_the_middle(9)
    assert [side.must for side in sides] == [{SLOT}, {SLOT}]
    assert made.counts["a side served a model"] == 2


def test_both_sides_say_why_they_do_not_serve_what_does_not_fit():
    made, sides = cut_in_the_middle(16)
    assert [side.must for side in sides] == [set(), set()]
    assert made.counts["a side explained why it does not serve"] == 2


def test_a_side_without_a_plan_that_says_nothing_is_not_at_rest():
    made = mesh({A: 8, B: 8}, 10)
    run(made, 30)
    made.weather.blocked = two_sides(made.node_ids, (1, 0))
    for process in made.live():
        process.coordinator.on_planned = lambda *_: []
    with pytest.raises(ViolationError, match=r"invariant 5: .* s0 is degraded"):
        await_rest(made)


def test_ample_room_is_half_as_much_again_in_whole_layers():
    made = mesh({A: 8, B: 8, C: 1, D: 1}, 9)
    assert must_serve(made, frozenset({A, B})) == {SLOT}
    assert must_serve(made, frozenset({A, B, C, D})) == {SLOT}
    assert must_serve(made, frozenset({A, C, D})) == set(), "a gigabyte holds no layer"


def test_who_hears_without_being_heard_belongs_to_another_component():
    assert components((A, B, C), {(A, B)}) == [{A, B, C}], "over the third"
    assert components((A, B, C), {(A, B), (C, B)}) == [{A, C}, {B}]
    assert components((A, B), set()) == [{A, B}]


def test_a_cut_has_two_sides_whatever_the_numbers():
    for numbers in ((1, 1, 1), (2, 2, 2), (1, 2, 2)):
        assert len(components((A, B, C), two_sides((A, B, C), numbers))) == 2
