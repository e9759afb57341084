"""Real coordinators, agents, fences and codec under chaos: safety after every event, convergence after healing.

A failing seed prints the command that replays it; add it to ``KEPT`` when the cause is fixed.
"""

import pytest

from tests.simulation.ballot_chaos import run_seed
from tests.simulation.ballot_mesh import SECOND, BallotMesh, Variant

KEPT = (
    5,  # a node was blamed for a retirement that the coordinator itself had asked for
    43,  # a stage of a higher, incomplete ballot was left serving for ever
    114,  # the same
    221,  # a late duplicate of Activate was confirmed after a newer promise
)


@pytest.mark.parametrize("first", range(0, 50, 5))
def test_no_invariant_breaks_and_every_mesh_converges_after_healing(first):
    requests = 0
    for seed in range(first, first + 5):
        requests += run_seed(seed, chaos_us=45 * SECOND).checkers.completed_requests
    assert requests > 50, "the meshes served hardly anything: the run proves little"


@pytest.mark.parametrize("seed", KEPT)
def test_seeds_that_failed_once_pass(seed):
    run_seed(seed)


def test_disks_that_are_full_for_a_while_break_nothing_either():
    for seed in range(10):
        run_seed(seed, Variant(full_disks=True), chaos_us=45 * SECOND)


def test_a_calm_mesh_plans_once_and_serves_every_request():
    mesh = BallotMesh(3, nodes=5)
    mesh.run_until(60 * SECOND)
    assert mesh.checkers.converged() == ""
    assert sum("planned" in line for line in mesh.history) == 1
    assert mesh.checkers.completed_requests > 100


def test_one_seed_is_one_history():
    first, second = (run_seed(7, chaos_us=30 * SECOND).history for _ in range(2))
    assert first == second


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_a_thousand_seeds_keep_every_invariant_and_converge():
    failures = []
    for seed in range(1000, 2000):
        try:
            run_seed(seed)
        except AssertionError as error:
            failures.append(str(error))
    assert not failures, failures[0]
