from dataclasses import replace

import pytest

from coordinator.planner.trust import edge_settled, trusted_signals
from tests.unit.planner.builders import GB, both, layout, link, node, placed, problem

S = 1_000_000


@pytest.mark.parametrize(
    ("samples", "first", "last", "settled"),
    [
        (None, None, None, True),
        (1, 60 * S, 0, False),
        (2, 5 * S, 0, True),
        (2, 5 * S - 1, 0, False),
        (9, 40 * S, 30 * S, True),
        (9, 40 * S, 30 * S + 1, False),
        (2, None, None, False),
    ],
)
def test_a_link_settles_with_two_samples_five_seconds_apart_the_newest_within_thirty(
    samples: int | None, first: int | None, last: int | None, settled: bool
) -> None:
    edge = link("a", "b", rtt_samples=samples, rtt_first_age_us=first, rtt_last_age_us=last)
    assert edge_settled(edge) is settled


def test_an_unsettled_pair_falls_back_to_capacity_only() -> None:
    nodes = [node("a", 6 * GB), node("b", 11 * GB // 2)]
    early = [replace(edge, rtt_samples=1, rtt_first_age_us=0, rtt_last_age_us=0) for edge in both("a", "b")]
    found = placed(problem(nodes, early))
    assert found.placement == "capacity_only"
    assert found.modeled.decode_tpot_us is None
    assert {line.code for line in found.diagnostics} >= {"signals_withheld"}


def test_one_unsettled_link_does_not_discredit_a_node_with_a_settled_one() -> None:
    nodes = [node(name, 6 * GB) for name in "abc"]
    early = link("a", "c", rtt_samples=1, rtt_first_age_us=0, rtt_last_age_us=0)
    signals = trusted_signals(problem(nodes, [*both("a", "b"), link("b", "c"), early]))
    assert signals.withheld_nodes == ()
    assert ("a", "c") not in signals.edges


def test_an_untrusted_node_loses_its_speed_and_its_links() -> None:
    nodes = [node("a", 6 * GB), node("b", 6 * GB, signals_trusted=False)]
    signals = trusted_signals(problem(nodes, both("a", "b")))
    assert signals.nodes["b"].bandwidth_bytes_per_s is None
    assert signals.nodes["a"].bandwidth_bytes_per_s is not None
    assert signals.edges == {}


def test_the_coordinator_itself_needs_no_link_to_be_believed() -> None:
    early = [replace(edge, rtt_samples=1, rtt_first_age_us=0, rtt_last_age_us=0) for edge in both("a", "b")]
    nodes = [node("a", 6 * GB, coordinator_rtt_us=0), node("b", 6 * GB, coordinator_rtt_us=900)]
    assert trusted_signals(problem(nodes, early)).withheld_nodes == ("b",)


@pytest.mark.parametrize(("samples", "age", "counts"), [(8, 120 * S, True), (7, 0, False), (8, 120 * S + 1, False)])
def test_observed_timings_count_with_eight_fresh_samples(samples: int, age: int, counts: bool) -> None:
    seen = node("a", observed_decode_us_per_layer=50_000, observed_decode_samples=samples, observed_decode_age_us=age)
    tpot = placed(problem([seen])).modeled.decode_tpot_us
    assert tpot == (500_000 if counts else 100_000) + 1_300


def test_a_contradicted_benchmark_is_reported_and_the_measurement_wins() -> None:
    seen = node("a", observed_decode_us_per_layer=20_001, observed_decode_samples=8)
    assert "benchmark_contradicted" in {line.code for line in placed(problem([seen])).diagnostics}


def test_a_subset_with_one_unknown_speed_uses_capacity_spans_and_models_nothing() -> None:
    nodes = [node("a", 6 * GB, 400 * GB), node("b", 11 * GB // 2, None)]
    found = placed(problem(nodes, both("a", "b")))
    assert found.placement == "capacity_only"
    assert found.modeled.decode_tpot_us is None
    assert found.modeled.network_us_per_token == 2 * 14_000
    assert sorted(end - start for _, start, end in layout(found)) == [5, 5]


def test_the_kill_switch_equals_the_same_problem_without_signals() -> None:
    nodes = [
        node("a", 6 * GB, 50 * GB, coordinator_rtt_us=1_000),
        node("b", 11 * GB // 2, 900 * GB, coordinator_rtt_us=2_000),
    ]
    killed = placed(problem(nodes, both("a", "b"), performance_aware=False))
    bare = problem([replace(each, memory_bandwidth_bytes_per_s=None) for each in nodes], performance_aware=False)
    bare = replace(bare, model=replace(bare.model, activation_frame_bytes=0))
    assert killed == placed(bare)
    assert killed.placement == "capacity_only"
    assert killed.modeled.network_us_per_token == 2 * 2_000
