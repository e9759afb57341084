import pytest

from coordinator.planner.problem import LockedStage, LockedTopology
from tests.unit.planner.builders import GB, both, layout, model, node, placed, problem, refused

NODES = [node("alpha", 12 * GB), node("beta-one", 9 * GB), node("beta-two", 4 * GB)]


def lock(*stages: tuple[str, int, int], **other: str) -> LockedTopology:
    return LockedTopology(tuple(LockedStage(*stage) for stage in stages), **other)


def question(locked, **request):
    return problem(NODES, both("alpha", "beta-one"), locked=locked, **request)


def test_a_lock_keeps_its_order_and_ranges_and_is_priced() -> None:
    found = placed(question(lock(("beta-one", 0, 3), ("alpha", 3, 10))))
    assert layout(found) == [("beta-one", 0, 3), ("alpha", 3, 10)]
    assert found.placement == "locked"
    assert found.modeled.decode_tpot_us == 100_000 + 2 * 1_300 + 2 * 14_000
    assert all("locked_by_operator" in stage.reason_codes for stage in found.stages)


def test_a_lock_takes_the_largest_shape_that_fits() -> None:
    package = model(kv=100_000, native=131_072)
    nodes = [node("alpha", 120 * GB), node("beta-one", 60 * GB)]
    found = placed(problem(nodes, package=package, locked=lock(("alpha", 0, 7), ("beta-one", 7, 10))))
    assert (found.context_length, found.parallel_lanes) == (131_072, 1)


def test_a_node_may_be_named_by_an_unambiguous_prefix() -> None:
    assert layout(placed(question(lock(("alph", 0, 10))))) == [("alpha", 0, 10)]


@pytest.mark.parametrize(
    ("stages", "code"),
    [
        ([("alpha", 0, 5), ("beta-one", 5, 5)], "locked_invalid_range"),
        ([("alpha", 0, 5), ("beta-one", 6, 10)], "locked_non_contiguous"),
        ([("alpha", 1, 10)], "locked_non_contiguous"),
        ([("alpha", 0, 9)], "locked_incomplete"),
        ([("alpha", 0, 11)], "locked_incomplete"),
        ([("alpha", 0, 5), ("alpha", 5, 10)], "locked_duplicate_node"),
        ([("ghost", 0, 10)], "locked_unknown_node"),
        ([("beta", 0, 10)], "locked_ambiguous_node"),
        ([("beta-two", 0, 10)], "locked_does_not_fit"),
    ],
)
def test_a_broken_lock_is_refused_by_code(stages: list, code: str) -> None:
    assert refused(question(lock(*stages))).code == code


def test_locks_are_held_to_the_operators_other_wishes() -> None:
    whole = lock(("alpha", 0, 10))
    assert refused(question(whole, minimum_nodes=2)).code == "locked_stage_count"
    assert refused(question(whole, pin_stage0="beta-one")).code == "locked_stage0_mismatch"
    assert refused(question(whole, exclude_nodes=frozenset({"alpha"}))).code == "locked_excluded_node"
    assert refused(question(whole, require_nodes=frozenset({"beta-one"}))).code == "locked_required_node_missing"


def test_a_lock_for_another_model_is_refused() -> None:
    assert refused(question(lock(("alpha", 0, 10), model="other"))).code == "locked_model_mismatch"
    assert refused(question(lock(("alpha", 0, 10), manifest_digest="ab"))).code == "locked_model_mismatch"
    assert placed(question(lock(("alpha", 0, 10), model="toy", manifest_digest="0" * 64))).placement == "locked"


def test_a_lock_may_not_cut_a_forbidden_boundary() -> None:
    locked = lock(("alpha", 0, 4), ("beta-one", 4, 10))
    found = refused(problem(NODES, package=model(forbidden=(4,)), locked=locked))
    assert found.code == "locked_forbidden_boundary"
    assert "shared_kv_region" in found.message
