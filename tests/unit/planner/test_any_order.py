"""Capacity order is the legacy rule, not the only one: what fits in another order is not refused."""

from coordinator.model.package import Layer, ModelPackage
from coordinator.planner.plan import Plan, PlanRefused
from coordinator.planner.planning import plan
from coordinator.planner.problem import Participant, PlanningProblem


def problem(big_bytes: int) -> PlanningProblem:
    layers = tuple(
        Layer(size, size, kv_bytes_per_token=0, recurrent_bytes_per_sequence=1) for size in (1_000, 2_900, 2_900)
    )
    nodes = (
        Participant("big", big_bytes, runtime_headroom_bytes=0),
        Participant("small", 2_000, runtime_headroom_bytes=0),
    )
    return PlanningProblem(ModelPackage("m", "0" * 64, layers, 0, 0, 4_096, 64), nodes)


def test_an_order_that_capacity_order_misses_is_found() -> None:
    found = plan(problem(6_750))
    assert isinstance(found, Plan)
    assert [(stage.node_id, stage.layer_start, stage.layer_end) for stage in found.stages] == [
        ("small", 0, 1),
        ("big", 1, 3),
    ]
    assert found.placement == "capacity_only"
    assert found.modeled.decode_tpot_us is None


def test_what_fits_in_no_order_is_still_refused() -> None:
    refused = plan(problem(5_750))
    assert isinstance(refused, PlanRefused)
    assert refused.code == "no_valid_topology"
