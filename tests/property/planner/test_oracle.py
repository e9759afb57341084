"""The planner against exhaustive enumeration. Instances are seeded, so a failure names the seed to replay."""

from dataclasses import replace
from fractions import Fraction
from random import Random

import pytest

from coordinator.planner.plan import Plan
from coordinator.planner.planning import plan
from coordinator.planner.problem import PlanningProblem
from tests.property.planner.instances import small_problem
from tests.property.planner.legacy import cheapest_order_cost, legacy_choice, order_cost
from tests.property.planner.oracle import Oracle

BLOCK = 10
QUICK_SEEDS, ALL_SEEDS = 250, 1_500
"""More than 500 of all have a modelled, feasible plan; most are left to the nightly run."""


def value_of(found: Plan, problem: PlanningProblem) -> Fraction:
    assert found.modeled.decode_tpot_us is not None
    assert found.modeled.pipelined_period_us is not None
    if problem.request.objective != "throughput":
        return Fraction(found.modeled.decode_tpot_us)
    streams = min(problem.request.concurrency, found.parallel_lanes)
    return Fraction(max(found.modeled.decode_tpot_us, streams * found.modeled.pipelined_period_us), streams)


def check_against_oracle(seed: int) -> bool:
    """Compare one instance; returns whether it was feasible."""
    problem = small_problem(Random(seed))
    oracle = Oracle(problem)
    best, found = oracle.best(), plan(problem)
    if best is None:
        assert not isinstance(found, Plan) or found.modeled.decode_tpot_us is None, seed
        return False
    assert isinstance(found, Plan), (seed, found)
    assert found.placement == "performance_aware"
    assert found.search.proven_optimal, seed
    mine = (value_of(found, problem), found.context_length, found.parallel_lanes, len(found.stages))
    assert mine == (oracle.value(best), best.context, best.lanes, best.stages), seed
    order = tuple(stage.node_id for stage in found.stages)
    cuts = (0, *(stage.layer_end for stage in found.stages))
    network = oracle.network(order)
    assert network is not None, seed
    stages = [oracle.stage_us(name, a, b) for name, a, b in zip(order, cuts, cuts[1:], strict=False)]
    assert found.modeled.decode_tpot_us == sum(stages) + network[0], seed
    left = [stage.usable_bytes - stage.required_bytes for stage in found.stages]
    assert min(left) >= 0, seed
    assert (min(left), sum(left), order) == (best.least_left, best.total_left, best.order), seed
    return True


@pytest.mark.parametrize("block", range(0, QUICK_SEEDS, BLOCK))
def test_every_choice_equals_exhaustive_enumeration(block: int) -> None:
    feasible = [check_against_oracle(seed) for seed in range(block, block + BLOCK)]
    assert any(feasible)


@pytest.mark.nightly
@pytest.mark.timeout(1_800)
def test_more_than_five_hundred_feasible_choices_equal_exhaustive_enumeration() -> None:
    assert sum(check_against_oracle(seed) for seed in range(QUICK_SEEDS, ALL_SEEDS)) > 500


def without_signals(problem: PlanningProblem) -> PlanningProblem:
    nodes = tuple(
        replace(
            node,
            memory_bandwidth_bytes_per_s=None,
            compute_flops_per_s=None,
            observed_decode_us_per_layer=None,
            coordinator_rtt_us=None,
        )
        for node in problem.participants
    )
    return replace(problem, participants=nodes, edges=())


@pytest.mark.parametrize("block", range(0, 200, 2 * BLOCK))
def test_without_signals_the_choice_is_the_legacy_one(block: int) -> None:
    for seed in range(block, block + BLOCK):
        problem = small_problem(Random(seed))
        problem = without_signals(problem) if seed % 2 else problem
        request = replace(problem.request, performance_aware=seed % 4 == 1)
        problem = replace(problem, request=request)
        if seed % 4 == 2:
            problem = replace(problem, request=replace(request, performance_aware=True, objective="capacity"), edges=())
        expected, found = legacy_choice(problem), plan(problem)
        if expected is None:
            assert not isinstance(found, Plan), seed
            continue
        assert isinstance(found, Plan), seed
        assert found.placement == "capacity_only"
        mine = (
            found.context_length,
            found.parallel_lanes,
            tuple(stage.node_id for stage in found.stages),
            (0, *(stage.layer_end for stage in found.stages)),
        )
        assert mine == expected, seed


@pytest.mark.parametrize("block", range(0, 150, BLOCK))
def test_with_links_alone_the_order_has_the_least_adjacent_cost(block: int) -> None:
    for seed in range(block, block + BLOCK):
        problem = small_problem(Random(seed), most_nodes=5)
        nodes = tuple(
            replace(node, memory_bandwidth_bytes_per_s=None, max_layers=None) for node in problem.participants
        )
        calibration = replace(problem.calibration, topology="chain")
        request = replace(problem.request, minimum_nodes=min(2, len(nodes)), direct_prediction_return="allow_fallback")
        problem = replace(problem, participants=nodes, calibration=calibration, request=request)
        found = plan(problem)
        if not isinstance(found, Plan) or not any(edge.rtt_us is not None for edge in problem.edges):
            continue
        assert found.modeled.decode_tpot_us is None
        order = tuple(stage.node_id for stage in found.stages)
        frame = problem.model.activation_frame_bytes + problem.model.required_sideband_bytes
        cost, least = order_cost(Oracle(problem), order, frame), cheapest_order_cost(problem, order)
        ranked = sorted(found.stages, key=lambda stage: (-stage.usable_bytes, stage.node_id))
        capacity_order = tuple(stage.node_id for stage in ranked)
        # where the cheapest order cannot hold the model, the capacity order stands in
        assert cost == least or order == capacity_order, seed
