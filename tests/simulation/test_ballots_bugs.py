"""The checkers bite: every planted mistake is found within 200 seeds, and its absence is not."""

import pytest

from protocol.fencing import PlanEpoch
from protocol.ids import Instance, NodeId
from tests.simulation.ballot_bugs import BUGS
from tests.simulation.ballot_chaos import SeedFailedError, run_seed
from tests.simulation.ballot_checkers import ViolationError
from tests.simulation.ballot_mesh import Variant
from tests.simulation.test_ballots_reports import SLOT, A, B, mesh

SEEDS = 200
LIKELY = {
    "a fence that is off by one": 58,
    "a promise that is not persisted before the reply": 3,
    "a ballot without the instance and a cloned id": 86,
    "an exclusion that is not obeyed": 2,
    "frames accepted without the epoch": 33,
    "frames accepted without the request epoch": 5,
    "layers of the former plan that are kept": 10,
    "a stage of a plan for another participant hash": 3,
}
"""Where to look first: an earlier run found it soon after. All 200 are looked at before it counts as not found."""


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found_within_two_hundred_seeds(name):
    variant, invariant = BUGS[name]
    first = LIKELY.get(name, 0)
    for seed in [*range(first, SEEDS), *range(first)]:
        try:
            run_seed(seed, variant, short=True, storms=2)
        except SeedFailedError as error:
            if error.problem.startswith(f"invariant {invariant}:"):
                return
    pytest.fail(f"{name} was not found")


EPOCH = PlanEpoch(1, NodeId("n00"), Instance("0" * 32))


@pytest.mark.parametrize(
    ("trail", "invariant"),
    [
        (((EPOCH, "h", 0, 4), (EPOCH._replace(term=2), "h", 4, 8)), 3),
        (((EPOCH, "h", 0, 4), (EPOCH, "other", 4, 8)), 3),
        (((EPOCH, "h", 0, 4), (EPOCH, "h", 5, 8)), 9),
        (((EPOCH, "h", 0, 4), (EPOCH, "h", 4, 7)), 9),
        (((EPOCH, "h", 0, 4), (EPOCH, "h", 4, 9)), 9),
    ],
    ids=["two epochs", "two plans", "a gap", "a layer too few", "a layer too many"],
)
def test_a_request_that_did_not_run_through_one_whole_plan_is_found(trail, invariant):
    made = mesh({A: 8, B: 8}, 6)
    made.checkers.completed(SLOT, tuple(("n", EPOCH, "h", *span) for span in ((0, 4), (4, 8))))
    with pytest.raises(ViolationError, match=f"invariant {invariant}:"):
        made.checkers.completed(SLOT, tuple(("n", *part) for part in trail))


def test_a_cloned_identity_alone_breaks_nothing():
    for seed in range(20, 24):
        run_seed(seed, Variant(clones=True), short=True, storms=2)
