"""Which of several feasible plans is chosen, and what the operator's wishes do to it."""

from dataclasses import replace

from coordinator.planner.plan import Plan
from coordinator.planner.planning import plan
from coordinator.planner.problem import Calibration
from tests.property.planner.meshes import mesh
from tests.unit.planner.builders import GB, both, layout, link, model, node, placed, problem, refused

FLAT = Calibration(name="flat", per_stage_us=0, per_hop_us=0)


def names(question) -> list[str]:
    return [name for name, _, _ in layout(placed(question))]


def ring(ids: str, rtt_us: int) -> list:
    return [link(a, b, rtt_us) for a in ids for b in ids if a != b]


def test_one_node_that_holds_the_model_beats_splitting_it() -> None:
    nodes = [node("big", 20 * GB), node("fast", 6 * GB, 900 * GB), node("faster", 6 * GB, 900 * GB)]
    found = placed(problem(nodes, [*both("big", "fast"), *both("big", "faster"), *both("fast", "faster")]))
    assert names(problem(nodes)) == ["big"]
    assert found.search.proven_optimal
    assert found.search.gap == 0.0


def test_a_slow_node_is_left_out_although_memory_order_would_start_with_it() -> None:
    nodes = [node("huge", 40 * GB, 10 * GB), node("a", 11 * GB // 2, 800 * GB), node("b", 11 * GB // 2, 800 * GB)]
    assert sorted(names(problem(nodes, ring("ab", 500), minimum_nodes=1))) == ["a", "b"]


def test_a_node_behind_a_slow_link_is_left_out() -> None:
    nodes = [node(name, 11 * GB // 2) for name in "abc"]
    edges = [*both("a", "b", 90_000), *both("b", "c", 90_000), *both("a", "c", 300)]
    assert sorted(names(problem(nodes, edges))) == ["a", "c"]


def test_an_asymmetric_mesh_is_walked_in_its_cheap_direction() -> None:
    nodes = [node(name, 9 * GB // 2) for name in "abc"]
    cheap = [link("c", "b", 1_000), link("b", "a", 1_000), link("a", "c", 1_000)]
    dear = [link("b", "c", 50_000), link("a", "b", 50_000), link("c", "a", 50_000)]
    order = "".join(names(problem(nodes, cheap + dear)))
    assert order in {"cba", "bac", "acb"}


def test_a_forbidden_boundary_moves_the_cut() -> None:
    nodes = [node("a", 11 * GB // 2, 400 * GB), node("b", 9 * GB)]
    free = layout(placed(problem(nodes, both("a", "b"))))
    cut = free[0][2]
    held = layout(placed(problem(nodes, both("a", "b"), package=model(forbidden=(cut,)))))
    assert held[0][2] != cut


def test_the_larger_context_wins_among_equal_values() -> None:
    package = model(kv=10_000, native=131_072)
    found = placed(problem([node("small", 14 * GB, 100 * GB), node("large", 60 * GB, 99 * GB)], package=package))
    assert (layout(found)[0][0], found.context_length, found.parallel_lanes) == ("large", 131_072, 3)


def test_a_faster_plan_with_less_context_wins_beyond_the_tolerance() -> None:
    package = model(kv=10_000, native=131_072)
    nodes = [node("small", 18 * GB, 100 * GB), node("large", 60 * GB, 90 * GB)]
    assert names(problem(nodes, package=package)) == ["small"]
    wide = problem(nodes, package=package, prefer="context", target_decode_tpot_us=10**6)
    assert names(wide) == ["large"]


def test_a_plan_that_meets_the_target_beats_a_larger_context() -> None:
    package = model(kv=10_000, native=131_072)
    nodes = [node("small", 18 * GB, 100 * GB), node("large", 60 * GB, 99 * GB)]
    assert names(problem(nodes, package=package, target_decode_tpot_us=102_000)) == ["small"]


def test_equal_nodes_share_layers_so_that_the_fullest_keeps_most_memory() -> None:
    found = placed(problem([node("a", 9 * GB), node("b", 9 * GB)], both("a", "b")))
    assert layout(found) == [("a", 0, 5), ("b", 5, 10)]


def test_throughput_balances_stages_that_interactive_use_would_not() -> None:
    nodes = [node("a", 20 * GB), node("b", 20 * GB)]
    edges = both("a", "b", 100)
    assert names(problem(nodes, edges, calibration=FLAT)) == ["a"]
    busy = placed(problem(nodes, edges, calibration=FLAT, objective="throughput", concurrency=4))
    assert [end - start for _, start, end in layout(busy)] == [5, 5]
    assert busy.modeled.tokens_per_s is not None
    assert busy.modeled.tokens_per_s > 19


def test_one_stream_gains_nothing_from_a_pipeline() -> None:
    nodes = [node("a", 20 * GB), node("b", 20 * GB)]
    assert names(problem(nodes, both("a", "b"), objective="throughput", concurrency=1)) == ["a"]


def test_among_plans_of_equal_throughput_and_time_the_one_that_leaves_most_memory_wins() -> None:
    nodes = [node("a", 20 * GB), node("b", 30 * GB), node("c", 25 * GB)]
    assert names(problem(nodes, ring("abc", 1_000), objective="throughput", concurrency=1)) == ["b"]
    # two stages of five layers whoever is chosen
    busy = problem(nodes, ring("abc", 100), calibration=FLAT, objective="throughput", concurrency=2, parallel_lanes=2)
    assert sorted(names(busy)) == ["b", "c"]


def test_pinning_excluding_and_requiring_are_respected() -> None:
    nodes = [node(name, 11 * GB // 2) for name in "abcd"]
    edges = ring("abcd", 1_000)
    assert names(problem(nodes, edges, pin_stage0="c"))[0] == "c"
    assert "a" not in names(problem(nodes, edges, exclude_nodes=frozenset("a")))
    assert "d" in names(problem(nodes, edges, require_nodes=frozenset("d")))
    assert len(names(problem(nodes, edges, minimum_nodes=3))) == 3


def test_max_layers_bounds_a_stage() -> None:
    nodes = [node("a", 20 * GB, 900 * GB, max_layers=2), node("b", 20 * GB)]
    spans = {
        name: end - start for name, start, end in layout(placed(problem(nodes, both("a", "b", 10), calibration=FLAT)))
    }
    assert spans == {"a": 2, "b": 8}


def test_prefer_cached_breaks_ties_only() -> None:
    nodes = [node("a"), node("b", cached_bytes=5 * GB, missing_bytes=5 * GB)]
    assert names(problem(nodes)) == ["a"]
    assert names(problem(nodes, prefer_cached=True)) == ["b"]
    assert names(problem([replace(nodes[0], memory_bandwidth_bytes_per_s=101 * GB), nodes[1]], prefer_cached=True)) == [
        "a"
    ]


def test_best_effort_returns_a_missed_target_with_a_visible_reason() -> None:
    found = placed(problem([node("a")], target_decode_tpot_us=1_000))
    assert found.target.met is False
    assert [line.code for line in found.diagnostics] == ["target_missed"]


def test_must_meet_target_refuses_and_still_shows_the_plan() -> None:
    found = refused(problem([node("a")], target_decode_tpot_us=1_000, policy="must_meet_target"))
    assert found.code == "target_missed"
    assert found.best_effort is not None
    assert found.best_effort.stages[0].node_id == "a"
    assert placed(problem([node("a")], target_decode_tpot_us=101_300, policy="must_meet_target")).target.met is True


def test_an_unknown_time_never_counts_as_meeting_the_target() -> None:
    question = problem([node("a", bandwidth=None)], target_decode_tpot_us=10**9, policy="must_meet_target")
    found = refused(question)
    assert found.code == "target_missed"
    assert found.best_effort is not None
    assert found.best_effort.target.met is None


def test_the_network_alone_can_prove_a_miss() -> None:
    nodes = [node("a", 6 * GB, None), node("b", 6 * GB, None)]
    found = placed(problem(nodes, both("a", "b", 40_000)))
    assert found.modeled.decode_tpot_us is None
    assert found.target.met is False


def test_the_budget_is_counted_in_work_so_a_clock_changes_nothing_but_the_elapsed_time() -> None:
    ticks = iter(range(0, 10**9, 1_500))
    question = problem([node("a", 6 * GB), node("b", 6 * GB)], both("a", "b"))
    timed, plain = plan(question, clock_us=lambda: next(ticks)), placed(question)
    assert timed.search.elapsed_ms > 0
    assert replace(timed, search=plain.search) == plain


def test_a_clock_that_has_run_away_stops_the_proof_but_not_the_answer() -> None:
    ticks = iter(range(0, 10**15, 10**9))
    question = mesh(10, 12, stages=4, calibration=Calibration(per_hop_us=300))
    stopped, calm = plan(question, clock_us=lambda: next(ticks)), placed(question)
    assert isinstance(stopped, Plan)
    assert calm.search.proven_optimal
    assert sum(stage.layer_end - stage.layer_start for stage in stopped.stages) == question.model.layer_count


def test_the_running_order_is_a_starting_point_and_never_changes_the_optimum() -> None:
    nodes = [node(name, 11 * GB // 2, speed * GB) for name, speed in (("a", 100), ("b", 400), ("c", 900))]
    question = problem(nodes, ring("abc", 1_000))
    for running in (("a", "b"), ("a", "b", "c"), ("ghost",), ("b", "b")):
        again = replace(question, request=replace(question.request, incumbent=running))
        assert layout(placed(again)) == layout(placed(question))
