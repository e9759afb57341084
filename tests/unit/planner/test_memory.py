import pytest

from coordinator.model.package import Layer
from coordinator.planner.memory import (
    Shape,
    ShapeMemory,
    candidate_shapes,
    context_candidates,
    layer_required_bytes,
    usable_bytes,
)
from coordinator.planner.plan import PlanRefused
from coordinator.planner.problem import Participant, PlanRequest
from tests.unit.planner.builders import model


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (Participant("a", 101), 101 - 11),
        (Participant("a", 101, operator_cap_bytes=50), 50 - 11),
        (Participant("a", 101, operator_cap_bytes=500, runtime_headroom_bytes=0), 101),
        (Participant("a", 101, operator_cap_bytes=5), 0),
    ],
)
def test_headroom_is_a_tenth_of_detected_memory_rounded_up_and_the_cap_comes_first(
    node: Participant, expected: int
) -> None:
    assert usable_bytes(node) == expected


def test_cache_is_charged_at_100_over_85_per_lane_and_rounded_up() -> None:
    layer = Layer(weight_bytes=1_000, streamed_bytes=1_000, kv_bytes_per_token=3, recurrent_bytes_per_sequence=7)
    # 3 · 512 · 2 · 100 / 85 = 3614.1…
    assert layer_required_bytes(layer, Shape(512, 2), "per_lane") == 1_000 + 3_615 + 14
    assert layer_required_bytes(layer, Shape(512, 2), "unified") == 1_000 + 1_808 + 14


def test_a_sliding_window_caps_the_tokens_that_are_cached() -> None:
    layer = Layer(0, 0, kv_bytes_per_token=85, kv_window_tokens=100)
    assert layer_required_bytes(layer, Shape(100_000, 1), "per_lane") == 10_000
    assert layer_required_bytes(layer, Shape(50, 1), "per_lane") == 5_000


def test_shared_parts_are_charged_to_the_stages_that_own_the_ends() -> None:
    memory = ShapeMemory(model(layers=4, weight=100, kv=0, first=7, last=11), Shape(512, 1), "per_lane")
    assert [memory.required(*span) for span in [(0, 2), (1, 3), (2, 4), (0, 4)]] == [207, 200, 211, 418]


@pytest.mark.parametrize(
    ("native", "expected"),
    [
        (262_144, (262_144, 131_072, 65_536)),
        (100_000, (100_000, 65_536)),
        (65_536, (65_536,)),
        (4_096, (4_096,)),
        (1_000_000, (1_000_000, 131_072, 65_536)),
    ],
)
def test_contexts_fall_from_native_to_the_floor(native: int, expected: tuple[int, ...]) -> None:
    assert context_candidates(native, None) == expected


def test_an_explicit_context_is_taken_as_it_is_even_below_the_floor() -> None:
    assert context_candidates(262_144, 777) == (777,)


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (PlanRequest(context_length=4_097), "context_exceeds_native"),
        (PlanRequest(context_length=0), "context_below_minimum"),
        (PlanRequest(parallel_lanes=0), "zero_parallel_lanes"),
    ],
)
def test_an_impossible_shape_is_refused_by_code(request_: PlanRequest, code: str) -> None:
    found = candidate_shapes(4_096, request_)
    assert isinstance(found, PlanRefused)
    assert found.code == code


def test_shapes_are_ordered_by_context_then_lanes() -> None:
    shapes = candidate_shapes(131_072, PlanRequest())
    assert isinstance(shapes, tuple)
    assert [(shape.context_length, shape.lanes) for shape in shapes] == [
        (context, lanes) for context in (131_072, 65_536) for lanes in (4, 3, 2, 1)
    ]
