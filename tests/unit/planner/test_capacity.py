"""Capacity-only placement: the behaviour without signals."""

from dataclasses import replace

from coordinator.planner.problem import Calibration
from tests.unit.planner.builders import GB, GIB, both, layout, link, model, node, placed, problem


def bare(name: str, memory: int, rtt_us: int | None = None):
    return node(name, memory, None, coordinator_rtt_us=rtt_us)


def test_the_fewest_nodes_hold_the_model_at_the_most_lanes() -> None:
    nodes = [bare(name, 80 * GIB) for name in "abcdef"]
    found = placed(problem(nodes, package=model(40, GIB, kv=65_536 // 40, native=65_536)))
    assert (len(found.stages), found.context_length, found.parallel_lanes) == (1, 65_536, 4)
    assert found.placement == "capacity_only"


def test_each_node_in_memory_order_takes_as_many_layers_as_fit() -> None:
    found = placed(problem([bare("small", 4 * GB), bare("large", 9 * GB)]))
    assert layout(found) == [("large", 0, 8), ("small", 8, 10)]


def test_unequal_layers_are_fitted_exactly() -> None:
    package = model(4, GIB, kv=1)
    sizes = [GIB // 8, GIB // 8, 9 * GIB, 8 * GIB]
    layers = tuple(replace(layer, weight_bytes=size) for layer, size in zip(package.layers, sizes, strict=True))
    package = replace(package, layers=layers)
    found = placed(problem([bare("small", 9 * GIB), bare("large", 12 * GIB)], package=package, minimum_nodes=2))
    assert layout(found) == [("large", 0, 3), ("small", 3, 4)]
    assert [stage.parameter_bytes for stage in found.stages] == [9 * GIB + GIB // 4, 8 * GIB]


def test_latencies_prefer_fewer_stages_over_a_larger_context() -> None:
    nodes = [bare(name, 23 * GIB, 10_000) for name in "abcd"]
    package = model(40, GIB, kv=65_536 // 40, native=262_144)
    found = placed(problem(nodes, package=package, minimum_nodes=2, kv_cache="unified"))
    assert (found.context_length, len(found.stages)) == (65_536, 2)
    assert found.modeled.network_us_per_token == 20_000
    assert found.target.met is None


def test_more_stages_than_the_target_allows_are_reported_as_a_miss() -> None:
    nodes = [bare(name, 11 * GIB, 10_000) for name in "abcd"]
    found = placed(problem(nodes, package=model(40, GIB, kv=1, native=65_536)))
    assert len(found.stages) == 4
    assert found.modeled.network_us_per_token == 40_000
    assert found.target.met is False


def test_the_nodes_with_the_lower_latency_are_chosen() -> None:
    nodes = [bare("far", 30 * GB, 30_000), bare("near", 12 * GB, 1_000)]
    assert layout(placed(problem(nodes)))[0][0] == "near"


def test_the_capacity_objective_ignores_speed_but_still_reports_it() -> None:
    nodes = [node("slow", 30 * GB, 10 * GB), node("fast", 20 * GB, 900 * GB)]
    found = placed(problem(nodes, objective="capacity"))
    assert layout(found)[0][0] == "slow"
    assert found.placement == "capacity_only"
    assert found.modeled.decode_tpot_us is not None


def test_links_order_nodes_whose_speed_is_unknown() -> None:
    nodes = [bare(name, 9 * GB // 2) for name in "abc"]
    edges = [
        link("b", "a", 100),
        link("a", "c", 100),
        *both("b", "c", 9_000),
        link("a", "b", 9_000),
        link("c", "a", 9_000),
    ]
    found = placed(problem(nodes, edges))
    assert [name for name, _, _ in layout(found)] == ["b", "a", "c"]
    assert found.placement == "capacity_only"


def test_links_of_equal_cost_keep_the_capacity_order() -> None:
    nodes = [bare(name, (40 + index) * GB // 10) for index, name in enumerate("abc")]
    edges = [link(a, b, 700) for a in "abc" for b in "abc" if a != b]
    assert [name for name, _, _ in layout(placed(problem(nodes, edges)))] == ["c", "b", "a"]


def test_a_star_without_speeds_chooses_the_best_connected_head() -> None:
    nodes = [bare(name, 9 * GB // 2) for name in "abc"]
    edges = [*both("c", "a", 100), *both("c", "b", 100), *both("a", "b", 5_000)]
    found = placed(problem(nodes, edges, calibration=Calibration(topology="star")))
    assert found.stages[0].node_id == "c"


def test_a_pinned_node_leads_whatever_its_memory() -> None:
    nodes = [bare("large", 9 * GB), bare("small", 4 * GB)]
    found = placed(problem(nodes, pin_stage0="small", minimum_nodes=2))
    assert layout(found) == [("small", 0, 3), ("large", 3, 10)]
