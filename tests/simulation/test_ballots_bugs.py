"""The checkers bite: every planted mistake is found within 200 seeds, and its absence is not."""

import pytest

from tests.simulation.ballot_bugs import BUGS
from tests.simulation.ballot_chaos import SeedFailedError, run_seed
from tests.simulation.ballot_mesh import Variant

SEEDS = 200
LIKELY = {
    "a fence that is off by one": 145,
    "a ballot without the instance and a cloned id": 57,
    "frames accepted without the epoch": 28,
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


def test_a_cloned_identity_alone_breaks_nothing():
    for seed in range(20, 26):
        run_seed(seed, Variant(clones=True), short=True, storms=2)
