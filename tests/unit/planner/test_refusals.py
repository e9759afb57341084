"""Every way of saying no: refusal codes, their explanations, and input that is simply wrong."""

from dataclasses import replace

import pytest

from coordinator.model.package import ForbiddenBoundary, Layer
from coordinator.planner.document import refusal_document
from coordinator.planner.planning import plan
from coordinator.planner.problem import Calibration, PlanningProblem
from coordinator.planner.validate import InvalidProblem
from tests.unit.planner.builders import GB, link, model, node, placed, problem, refused


@pytest.mark.parametrize(
    ("package", "code"),
    [
        (replace(model(), layers=()), "missing_layers"),
        (model(weight=0), "missing_weights"),
        (model(kv=0), "missing_kv"),
        (model(native=0), "missing_native_context"),
    ],
)
def test_missing_memory_facts_fail_closed(package, code: str) -> None:
    assert refused(problem([node("a")], package=package)).code == code


def test_no_nodes_at_all() -> None:
    assert refused(problem([])).code == "missing_nodes"


def test_recurrent_models_need_no_cache_per_token() -> None:
    package = replace(model(), layers=tuple(Layer(GB, GB, 0, None, 1_000) for _ in range(10)))
    found = placed(problem([node("a")], package=package))
    assert "recurrent_state_sticky" in found.stages[0].reason_codes


def test_a_capacity_failure_explains_itself() -> None:
    nodes = [node("a", 4 * GB), node("b", 3 * GB), node("spare", 9 * GB), node("empty", 0)]
    package = model(kv=1_000, native=262_144)
    found = refused(problem(nodes, package=package, exclude_nodes=frozenset({"spare"})))
    assert found.code == "no_valid_topology"
    details = found.details
    assert details["contexts_tried"] == [262_144, 131_072, 65_536]
    assert details["total_usable_bytes"] == 7 * GB
    assert details["layers_placeable"] == {"a": 3, "b": 2}
    assert details["excluded"] == {"empty": "no usable memory after headroom", "spare": "excluded by the operator"}
    assert details["bytes_per_layer"] == GB + -(-1_000 * 65_536 * 100 // 85)
    assert "more usable bytes are needed" in str(details["nearest_fit"])
    assert refusal_document(found)["error"]["code"] == "no_valid_topology"


def test_the_nearest_fit_names_a_smaller_context() -> None:
    package = model(kv=100_000, native=65_536)
    found = refused(problem([node("a", 11 * GB)], package=package))
    assert found.details["nearest_fit"] == "context 512 would fit"


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"pin_stage0": "ghost"}, "ghost is pinned as stage 0"),
        ({"require_nodes": frozenset({"b"}), "exclude_nodes": frozenset({"b"})}, "b is required"),
        ({"minimum_nodes": 3}, "3 nodes are asked for"),
    ],
)
def test_wishes_that_cannot_be_met_are_named(request_: dict, words: str) -> None:
    found = refused(problem([node("a"), node("b")], **request_))
    assert found.code == "no_valid_topology"
    assert words in found.message


def test_a_single_token_context_is_taken_and_more_than_native_is_not() -> None:
    assert placed(problem([node("a")], context_length=1)).context_length == 1
    assert refused(problem([node("a")], context_length=10**6)).code == "context_exceeds_native"
    assert refused(problem([node("a")], parallel_lanes=0)).code == "zero_parallel_lanes"


def broken(**changes: object) -> PlanningProblem:
    return replace(problem([node("a"), node("b")], [link("a", "b")]), **changes)


@pytest.mark.parametrize(
    ("question", "field"),
    [
        (broken(participants=(node("a"), node("a"))), "participants[a]"),
        (broken(participants=(node("a", bandwidth=0), node("b"))), "participants[a].memory_bandwidth_bytes_per_s"),
        (broken(participants=(node("a", 10**18), node("b"))), "participants[a].detected_memory_bytes"),
        (broken(participants=(node("a", -1), node("b"))), "participants[a].detected_memory_bytes"),
        (broken(participants=(node("a", float("nan")), node("b"))), "participants[a].detected_memory_bytes"),
        (broken(participants=(node("a", compute_flops_per_s=1.5), node("b"))), "participants[a].compute_flops_per_s"),
        (broken(participants=(node("a", max_layers=0), node("b"))), "participants[a].max_layers"),
        (broken(edges=(link("a", "ghost"),)), "edges[a -> ghost]"),
        (broken(edges=(link("a", "a"),)), "edges[a -> a]"),
        (broken(edges=(link("a", "b"), link("a", "b", 7))), "edges[a -> b]"),
        (broken(edges=(link("a", "b", large_frame_bytes_per_s=0),)), "edges[a -> b].large_frame_bytes_per_s"),
        (broken(edges=(link("a", "b", -3),)), "edges[a -> b].rtt_us"),
        (broken(model=model(weight=2**53 + 1)), "model.layers[0].weight_bytes"),
        (broken(model=model(first=-1)), "model.shared_first_bytes"),
        (
            broken(model=replace(model(), forbidden_boundaries=(ForbiddenBoundary(10, "x"),))),
            "model.forbidden_boundaries",
        ),
        (broken(model=replace(model(), layers=model().layers * 60)), "model.layers"),
        (broken(calibration=Calibration(bandwidth_efficiency_milli=0)), "calibration.bandwidth_efficiency_milli"),
        (broken(calibration=Calibration(per_hop_us=-1)), "calibration.per_hop_us"),
        (problem([node("a")], concurrency=0), "request.concurrency"),
        (problem([node("a")], target_decode_tpot_us=0), "request.target_decode_tpot_us"),
        (problem([node("a")], context_length=True), "request.context_length"),
        (problem([node("a")], search_budget_ms=0), "request.search_budget_ms"),
    ],
)
def test_absurd_input_is_an_error_that_names_the_field(question: PlanningProblem, field: str) -> None:
    with pytest.raises(InvalidProblem) as caught:
        plan(question)
    assert caught.value.field == field
    assert str(caught.value).startswith(field)


def test_extreme_but_valid_sizes_neither_overflow_nor_crash() -> None:
    most = 2**53
    package = model(weight=most, kv=most, native=most)
    assert refused(problem([node("a", most)], package=package)).code == "no_valid_topology"
    slow = problem([node("a", most, 1)], package=model(weight=10**14))
    assert placed(slow).placement == "capacity_only"
