"""What must hold for every plan, whatever the mesh."""

from dataclasses import replace
from fractions import Fraction
from math import ceil
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coordinator.planner.memory import Shape, ShapeMemory, ceil_div
from coordinator.planner.plan import Plan
from coordinator.planner.planning import plan
from coordinator.planner.problem import Edge, LockedStage, LockedTopology, PlanningProblem
from coordinator.planner.transfer import transfer_us
from tests.property.planner.instances import small_problem
from tests.property.planner.meshes import mesh

SEEDS = st.integers(0, 10**9)


def any_problem(seed: int) -> PlanningProblem:
    return small_problem(Random(seed), most_nodes=4, most_layers=9)


def tpot(question: PlanningProblem) -> int | None:
    found = plan(question)
    return found.modeled.decode_tpot_us if isinstance(found, Plan) else None


@settings(max_examples=120, deadline=None)
@given(SEEDS)
def test_plans_are_contiguous_complete_within_memory_and_legal(seed: int) -> None:
    question = any_problem(seed)
    found = plan(question)
    if not isinstance(found, Plan):
        return
    model, request = question.model, question.request
    memory = ShapeMemory(model, Shape(found.context_length, found.parallel_lanes), request.kv_cache)
    forbidden = {cut.layer for cut in model.forbidden_boundaries}
    limits = {node.node_id: node.max_layers for node in question.participants}
    expected = 0
    for stage in found.stages:
        assert stage.layer_start == expected < stage.layer_end
        assert stage.required_bytes == memory.required(stage.layer_start, stage.layer_end) <= stage.usable_bytes
        limit = limits[stage.node_id]
        assert limit is None or stage.layer_end - stage.layer_start <= limit
        expected = stage.layer_end
        assert expected not in forbidden
    assert expected == model.layer_count
    ids = [stage.node_id for stage in found.stages]
    assert len(set(ids)) == len(ids) >= request.minimum_nodes
    assert not set(ids) & request.exclude_nodes
    assert request.require_nodes <= set(ids)
    assert request.pin_stage0 in {None, ids[0]}
    assert sum(stage.parameter_bytes for stage in found.stages) == model.weight_bytes
    assert [boundary.layer for boundary in found.boundaries] == [stage.layer_end for stage in found.stages[:-1]]


@settings(max_examples=60, deadline=None)
@given(SEEDS)
def test_adding_a_node_never_worsens_the_optimum(seed: int) -> None:
    question = any_problem(seed)
    request = replace(
        question.request, objective="interactive", objective_tolerance_milli=0, prefer="speed", minimum_nodes=1
    )
    question = replace(question, request=request)
    before = tpot(question)
    if before is None:
        return
    rng = Random(seed)
    newcomer = replace(
        question.participants[0], node_id="newcomer", memory_bandwidth_bytes_per_s=rng.choice([10**9, 10**12])
    )
    edges = [Edge("newcomer", node.node_id, 500) for node in question.participants]
    after = tpot(replace(question, participants=(*question.participants, newcomer), edges=(*question.edges, *edges)))
    assert after is not None
    assert after <= before


@settings(max_examples=60, deadline=None)
@given(SEEDS)
@example(
    9738638
)  # with its observed floor a halved node gets one layer more: its bytes then hide the floor's price of it
def test_halving_a_nodes_speed_never_gives_it_more_layers_in_the_same_order(seed: int) -> None:
    """Of what memory bandwidth alone decides: an observed time per layer is a floor that a slower memory hides."""
    question = any_problem(seed)
    question = replace(
        question,
        participants=tuple(replace(node, observed_decode_us_per_layer=None) for node in question.participants),
    )
    request = replace(question.request, objective="interactive", objective_tolerance_milli=0)
    found = plan(replace(question, request=request))
    if not isinstance(found, Plan) or found.modeled.decode_tpot_us is None or len(found.stages) < 2:
        return
    order = [stage.node_id for stage in found.stages]
    slowed = Random(seed).choice(order)
    held = {stage.node_id: stage.layer_end - stage.layer_start for stage in found.stages}
    participants = tuple(
        replace(node, memory_bandwidth_bytes_per_s=(node.memory_bandwidth_bytes_per_s or 2) // 2)
        if node.node_id == slowed
        else node
        for node in question.participants
    )
    shape = replace(request, context_length=found.context_length, parallel_lanes=found.parallel_lanes)
    again = plan(replace(question, participants=participants, request=shape))
    assert isinstance(again, Plan)
    if [stage.node_id for stage in again.stages] == order:
        assert {stage.node_id: stage.layer_end - stage.layer_start for stage in again.stages}[slowed] <= held[slowed]


@settings(max_examples=60, deadline=None)
@given(SEEDS)
@example(443546)  # only another order than the capacity rule's fitted, and its last node may not answer the first
def test_locking_a_plan_reproduces_its_price(seed: int) -> None:
    question = any_problem(seed)
    found = plan(question)
    if not isinstance(found, Plan):
        return
    stages = tuple(LockedStage(stage.node_id, stage.layer_start, stage.layer_end) for stage in found.stages)
    request = replace(
        question.request,
        locked=LockedTopology(stages),
        context_length=found.context_length,
        parallel_lanes=found.parallel_lanes,
    )
    locked = plan(replace(question, request=request))
    assert isinstance(locked, Plan)
    assert locked.placement == "locked"
    assert (locked.modeled, locked.hops, locked.plan_id) == (found.modeled, found.hops, found.plan_id)


@given(st.integers(0, 2**53), st.integers(1, 2**53))
def test_times_are_whole_microseconds_rounded_up(size: int, rate: int) -> None:
    time = transfer_us(size, rate)
    assert (time - 1) * rate < size * 10**6 <= time * rate
    assert ceil_div(size, rate) * rate >= size


@given(st.integers(1, 2**40), st.integers(1, 10**6))
def test_a_rate_in_mebibytes_is_never_read_as_megabytes(size: int, mebibytes_per_s: int) -> None:
    exact = ceil(Fraction(size * 10**6, mebibytes_per_s * 2**20))
    assert transfer_us(size, mebibytes_per_s * 1_048_576) == exact


@pytest.mark.parametrize("seed", range(6))
def test_a_proven_optimum_does_not_move_when_the_budget_grows(seed: int) -> None:
    question = mesh(seed, 12)
    small = plan(question)
    large = plan(replace(question, request=replace(question.request, search_budget_ms=4_000)))
    assert isinstance(small, Plan)
    assert isinstance(large, Plan)
    assert small.search.proven_optimal
    assert small.stages == large.stages


def test_a_tiny_budget_still_answers_and_admits_its_gap() -> None:
    question = mesh(5, 16, stages=6, layers=94)
    hurried = plan(replace(question, request=replace(question.request, search_budget_ms=1)))
    calm = plan(replace(question, request=replace(question.request, search_budget_ms=10_000)))
    assert isinstance(hurried, Plan)
    assert isinstance(calm, Plan)
    assert calm.search.proven_optimal
    assert calm.modeled.decode_tpot_us is not None
    assert hurried.modeled.decode_tpot_us is not None
    assert hurried.search.gap is not None
    assert calm.modeled.decode_tpot_us <= hurried.modeled.decode_tpot_us
    assert hurried.modeled.decode_tpot_us <= calm.modeled.decode_tpot_us * (1 + hurried.search.gap) + 1
