"""Which files make room."""

import random

from stage_agent.artifacts.eviction import Blob, Room, victims


def room(**more):
    facts = {
        "budget_bytes": 1_000,
        "reserved_bytes": 0,
        "reserved_free_bytes": 0,
        "disk_free_bytes": 10**6,
        "keep_free_bytes": 0,
    }
    return Room(**(facts | more))


def names(chosen):
    return None if chosen is None else [blob.sha256 for blob in chosen]


A, B, C = Blob("a", 400, 1), Blob("b", 300, 2), Blob("c", 300, 3)


def test_nothing_goes_while_everything_fits_to_the_byte():
    assert names(victims([A, B], [], 300, room())) == []
    assert names(victims([A, B], [], 301, room())) == ["a"]


def test_the_least_recently_used_goes_first_and_no_more_than_needed():
    assert names(victims([C, B, A], [], 400, room())) == ["a"]
    assert names(victims([C, B, A], [], 401, room())) == ["a", "b"]


def test_what_a_live_assignment_uses_stays_even_if_the_new_file_cannot_come():
    assert names(victims([A, B, C], {"a"}, 500, room())) == ["b", "c"]
    assert victims([A, B, C], {"a"}, 601, room()) is None
    assert victims([A, B, C], {"a", "b", "c"}, 1, room()) is None


def test_transfers_under_way_count_in_full():
    assert names(victims([A], [], 300, room(reserved_bytes=300))) == []
    assert names(victims([A], [], 301, room(reserved_bytes=300))) == ["a"]


def test_the_disk_is_never_filled_below_what_is_kept_free():
    assert names(victims([A, B], [], 100, room(disk_free_bytes=150, keep_free_bytes=50))) == []
    assert names(victims([A, B], [], 100, room(disk_free_bytes=149, keep_free_bytes=50))) == ["a"]
    assert names(victims([A, B], [], 100, room(disk_free_bytes=160, keep_free_bytes=50, reserved_free_bytes=20))) == [
        "a"
    ]
    assert victims([A, B], [], 900, room(disk_free_bytes=100, keep_free_bytes=50, budget_bytes=10**6)) is None


def test_a_file_larger_than_the_budget_evicts_nothing():
    assert victims([A, B, C], [], 1_001, room()) is None


def test_the_outcome_always_fits_and_never_takes_a_pinned_one():
    die = random.Random(7)
    for _ in range(2_000):
        blobs = [Blob(f"{index:02}", die.randrange(1, 200), die.randrange(5)) for index in range(die.randrange(8))]
        pinned = {blob.sha256 for blob in blobs if die.random() < 0.3}
        size, space = die.randrange(1, 400), room(budget_bytes=die.randrange(800), disk_free_bytes=die.randrange(500))
        chosen = victims(blobs, pinned, size, space)
        pinned_bytes = sum(blob.size_bytes for blob in blobs if blob.sha256 in pinned)
        evictable = sum(blob.size_bytes for blob in blobs) - pinned_bytes
        possible = pinned_bytes + size <= space.budget_bytes and size <= space.disk_free_bytes + evictable
        assert (chosen is not None) == possible
        if chosen is not None:
            freed = sum(blob.size_bytes for blob in chosen)
            assert not pinned & {blob.sha256 for blob in chosen}
            assert sum(blob.size_bytes for blob in blobs) - freed + size <= space.budget_bytes
            assert size <= space.disk_free_bytes + freed
            oldest_kept = min((b.used_ns for b in blobs if b not in chosen and b.sha256 not in pinned), default=9)
            assert all(blob.used_ns <= oldest_kept for blob in chosen)
