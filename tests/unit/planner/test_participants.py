from dataclasses import replace

import pytest

from coordinator.planner.participants import log_bucket, participant_set_hash, rtt_class
from tests.unit.planner.builders import GB, both, node, problem

NODES = [node("a", 6 * GB, coordinator_rtt_us=0), node("b", 6 * GB, coordinator_rtt_us=1_500)]
BASE = problem(NODES, both("a", "b", 1_500))


def changed(**fields: object) -> str:
    return participant_set_hash(replace(BASE, participants=(replace(NODES[0], **fields), NODES[1])))


@pytest.mark.parametrize(
    ("rtt", "expected"),
    [(0, 1_000), (1_000, 1_000), (1_001, 2_000), (10_001, 20_000), (20_001, 40_000), (80_001, 160_000), (None, None)],
)
def test_round_trip_times_fall_into_doubling_classes(rtt: int | None, expected: int | None) -> None:
    assert rtt_class(rtt) == expected


def test_speed_buckets_are_ten_percent_wide() -> None:
    assert log_bucket(None) is None
    width = [value for value in range(100_000, 130_000) if log_bucket(value) == log_bucket(110_000)]
    assert max(width) / min(width) == pytest.approx(1.1, rel=1e-3)


def test_noise_inside_a_bucket_changes_nothing() -> None:
    value = next(value for value in range(100 * GB, 112 * GB, GB // 10) if log_bucket(value) != log_bucket(100 * GB))
    near = participant_set_hash(problem([node("a", 6 * GB, value), NODES[1]], BASE.edges))
    assert near == participant_set_hash(problem([node("a", 6 * GB, value + value // 50), NODES[1]], BASE.edges))


def test_capacity_speed_links_cache_and_policy_change_the_hash() -> None:
    base = participant_set_hash(BASE)
    others = [
        changed(detected_memory_bytes=6 * GB + 1),
        changed(memory_bandwidth_bytes_per_s=200 * GB),
        changed(cached_bytes=5),
        participant_set_hash(replace(BASE, edges=both("a", "b", 9_000))),
        participant_set_hash(replace(BASE, request=replace(BASE.request, objective="throughput"))),
        participant_set_hash(replace(BASE, model=replace(BASE.model, digest="1" * 64))),
        participant_set_hash(replace(BASE, participants=(NODES[0],), edges=())),
    ]
    assert base not in others
    assert len(set(others)) == len(others)


def test_order_of_nodes_and_links_does_not_matter() -> None:
    turned = replace(BASE, participants=BASE.participants[::-1], edges=BASE.edges[::-1])
    assert participant_set_hash(turned) == participant_set_hash(BASE)


def test_without_performance_awareness_signals_are_left_out() -> None:
    blind = replace(BASE, request=replace(BASE.request, performance_aware=False))
    quiet = replace(
        blind,
        edges=(),
        participants=tuple(
            replace(each, memory_bandwidth_bytes_per_s=7, coordinator_rtt_us=99_000, signals_trusted=False)
            for each in NODES
        ),
    )
    assert participant_set_hash(blind) == participant_set_hash(quiet)
    assert participant_set_hash(blind) != participant_set_hash(BASE)
