"""The cost model's figures, worked out by hand."""

from dataclasses import replace

import pytest

from coordinator.planner.problem import Calibration
from coordinator.planner.transfer import transfer_us
from coordinator.planner.trust import trusted_signals
from tests.unit.planner.builders import GB, MIB, both, layout, link, model, node, placed, problem

FLAT = Calibration(name="flat", per_stage_us=0, per_hop_us=0)


def test_a_mebibyte_is_not_a_million_bytes() -> None:
    assert transfer_us(10**9, 953 * MIB) == 1_000_708


def test_an_unknown_bandwidth_transfers_for_nothing() -> None:
    assert transfer_us(10**9, None) == 0


def test_one_stage_has_no_hops_and_costs_its_layers_and_one_overhead() -> None:
    found = placed(problem([node("a")]))
    assert found.hops == ()
    assert found.modeled.decode_tpot_us == 10 * 10_000 + 1_300
    assert found.modeled.pipelined_period_us == found.modeled.decode_tpot_us
    assert found.modeled.network_us_per_token == 0


def test_shared_bytes_are_streamed_before_the_ceiling() -> None:
    package = model(layers=2, weight=1, first=1, last=2)
    found = placed(problem([node("a", bandwidth=4_000_000)], package=package, calibration=FLAT))
    # ⌈2/4⌉ + ⌈3/4⌉ microseconds
    assert found.modeled.decode_tpot_us == 2


def test_every_layer_is_rounded_up_on_its_own() -> None:
    found = placed(problem([node("a", bandwidth=3_000_000)], package=model(layers=4, weight=1), calibration=FLAT))
    assert found.modeled.decode_tpot_us == 4


def test_efficiency_scales_the_bandwidth() -> None:
    found = placed(problem([node("a")], calibration=replace(FLAT, bandwidth_efficiency_milli=500)))
    assert found.modeled.decode_tpot_us == 10 * 20_000


def test_compute_and_observed_timings_are_floors_and_overheads_come_on_top() -> None:
    slow = node("a", compute_flops_per_s=100 * GB)
    assert placed(problem([slow], calibration=FLAT)).modeled.decode_tpot_us == 10 * 20_000
    seen = node("a", observed_decode_us_per_layer=30_000, observed_decode_samples=8)
    calibration = replace(FLAT, per_layer_us=3, per_stage_us=5, kv_touch_us=7)
    assert placed(problem([seen], calibration=calibration)).modeled.decode_tpot_us == 10 * 30_003 + 5 + 7


def two_nodes(*edges: object, **request: object) -> object:
    nodes = [node("a", 6 * GB), node("b", 11 * GB // 2)]
    return problem(nodes, edges, **request)  # type: ignore[arg-type]


def test_a_pair_pays_both_hops_with_frame_and_reply() -> None:
    edges = link("a", "b", 2_000, large_frame_bytes_per_s=8_192_000), link("b", "a", 3_000)
    calibration = Calibration(rtt_multiplier_milli=1_500, return_bytes=5)
    found = placed(two_nodes(*edges, calibration=calibration))  # type: ignore[arg-type]
    there = next(hop for hop in found.hops if hop.source == "a")
    back = next(hop for hop in found.hops if hop.source == "b")
    assert (there.rtt_us, back.rtt_us) == (2_000, 3_000)
    assert there.hop_us == 3_000 + there.transfer_us + 13_000
    assert {there.transfer_us, back.transfer_us} == ({1_000, 0} if there.kind == "forward" else {1, 0})
    assert found.modeled.decode_tpot_us == 100_000 + 2 * 1_300 + (there.hop_us or 0) + (back.hop_us or 0)


@pytest.mark.parametrize(
    ("edges", "rtts", "bases"),
    [
        ([link("a", "b", 5), link("b", "a", 9)], {5, 9}, {"measured"}),
        ([link("a", "b", 5)], {5}, {"measured", "reverse"}),
        ([link("a", "b", None)], {70}, {"coordinator"}),
        ([], {70}, {"coordinator"}),
    ],
)
def test_an_rtt_falls_back_to_the_reverse_link_then_to_the_coordinator(edges: list, rtts: set, bases: set) -> None:
    nodes = [node("a", 6 * GB, coordinator_rtt_us=70), node("b", 11 * GB // 2, coordinator_rtt_us=0)]
    found = placed(problem(nodes, edges, calibration=FLAT))
    assert {hop.rtt_us for hop in found.hops} == rtts
    assert {hop.basis for hop in found.hops} == bases


def test_an_unknown_hop_is_never_free() -> None:
    found = placed(problem([node("a", 6 * GB), node("b", 11 * GB // 2)]))
    assert [hop.basis for hop in found.hops] == ["unknown", "unknown"]
    assert found.modeled.decode_tpot_us is None
    assert found.target.met is None
    assert any(line.code == "hop_unknown" for line in found.diagnostics)


def test_known_speeds_still_share_the_layers_when_no_hop_is_known() -> None:
    nodes = [node("slow", 9 * GB, 50 * GB), node("fast", 8 * GB, 400 * GB)]
    found = placed(problem(nodes))
    shares = {name: end - start for name, start, end in layout(found)}
    assert shares["fast"] > shares["slow"]


def test_sidebands_cross_every_boundary() -> None:
    edges = [replace(edge, large_frame_bytes_per_s=10**6) for edge in both("a", "b")]
    package = model(frame=1_000, sideband=24)
    found = placed(two_nodes(*edges, package=package))  # type: ignore[arg-type]
    assert [boundary.wire_bytes_per_token for boundary in found.boundaries] == [1_024]
    assert [hop.transfer_us for hop in found.hops] == [1_024, 1_000]


def test_a_refused_reply_walks_back_down_the_chain() -> None:
    nodes = [node(name, 9 * GB // 2) for name in "abc"]
    edges = [link(x, y, 1_000, direct_prediction_return_supported=False) for x in "abc" for y in "abc" if x != y]
    found = placed(problem(nodes, edges, calibration=FLAT))
    assert [hop.kind for hop in found.hops] == ["forward", "forward", "return", "return"]
    ring = [hop.source + hop.target for hop in found.hops]
    assert [pair[::-1] for pair in ring[2:]] == ring[:2][::-1]


def test_requiring_direct_replies_avoids_links_that_refuse_them() -> None:
    nodes = [node("a", 6 * GB), node("b", 11 * GB // 2)]
    edges = [link("a", "b", 10, direct_prediction_return_supported=False), link("b", "a", 10)]
    found = placed(problem(nodes, edges, direct_prediction_return="require"))
    assert [name for name, _, _ in layout(found)] == ["a", "b"]


def test_a_star_pays_one_round_trip_per_other_node() -> None:
    nodes = [node(name, 9 * GB // 2) for name in "abc"]
    edges = [link("a", "b", 100), link("a", "c", 200), link("b", "c", 90_000)]
    found = placed(problem(nodes, edges, calibration=replace(FLAT, topology="star")))
    assert found.stages[0].node_id == "a"
    assert {(hop.source, hop.target, hop.hop_us) for hop in found.hops} == {("a", "b", 100), ("a", "c", 200)}
    assert found.modeled.decode_tpot_us == 100_000 + 300


def test_the_period_is_the_slowest_stage_with_the_hop_that_leaves_it() -> None:
    found = placed(two_nodes(*both("a", "b", 2_000), calibration=FLAT))  # type: ignore[arg-type]
    assert found.modeled.pipelined_period_us == max(stage.stage_us or 0 for stage in found.stages) + 2_000


def test_time_to_first_token_is_the_prefill_and_one_decode() -> None:
    found = placed(problem([node("a", compute_flops_per_s=10**15)], prompt_tokens=512, prefill_chunk_tokens=256))
    tpot = found.modeled.decode_tpot_us
    assert tpot is not None
    assert found.modeled.ttft_us == 2 * tpot + tpot
    assert placed(problem([node("a")], prompt_tokens=0)).modeled.ttft_us == tpot


def test_a_calibrated_speed_stands_above_the_benchmark_and_scales_compute_with_it() -> None:
    calibrated = node("a", bandwidth=8 * GB, compute_flops_per_s=100 * GB, calibrated_bytes_per_s=2 * GB)
    signals = trusted_signals(problem([calibrated])).nodes["a"]
    assert (signals.bandwidth_bytes_per_s, signals.compute_flops_per_s) == (2 * GB, 25 * GB)
