"""The content-addressed store."""

import os
import time

import pytest

from stage_agent.artifacts.errors import ArtifactError
from tests.unit.artifacts.stores import a_store, put, sha, small_disk

ONE, TWO, THREE = b"one" * 1_000, b"two" * 1_000, b"333" * 1_000


def test_what_was_installed_is_found_by_its_hash_read_only_and_after_a_restart(tmp_path):
    path = put(a_store(tmp_path), ONE)
    assert path == tmp_path / sha(ONE)[:2] / sha(ONE)
    assert path.stat().st_mode & 0o777 == 0o444
    store = a_store(tmp_path)
    assert store.held(sha(ONE), len(ONE)) == path
    assert path.read_bytes() == ONE
    assert store.held(sha(TWO), len(TWO)) is None
    assert list((tmp_path / "partial").iterdir()) == []
    assert [(blob.sha256, blob.size_bytes) for blob in store.blobs()] == [(sha(ONE), len(ONE))]


def damage(path, content, *, keep_time=False):
    status = path.stat()
    path.chmod(0o644)
    path.write_bytes(content)
    if keep_time:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("content", [b"ONE" + ONE[3:], ONE[:-1], b"", ONE + b"x"])
def test_a_blob_that_was_written_to_is_discarded_when_it_is_next_used(tmp_path, content):
    discarded = []
    store = a_store(tmp_path, discarded)
    path = put(store, ONE)
    damage(path, content)
    assert store.held(sha(ONE), len(ONE)) is None
    assert not path.exists()
    assert discarded == [(sha(ONE), len(content), True)]


def test_a_truncated_blob_is_discarded_even_if_its_time_was_kept(tmp_path):
    store = a_store(tmp_path)
    path = put(store, ONE)
    damage(path, ONE[:-1], keep_time=True)
    assert store.held(sha(ONE), len(ONE)) is None


def test_rot_that_keeps_size_and_time_is_found_when_somebody_doubts(tmp_path):
    store = a_store(tmp_path)
    path = put(store, ONE)
    damage(path, b"ONE" + ONE[3:], keep_time=True)
    assert store.held(sha(ONE), len(ONE)) == path
    assert not store.verify(sha(ONE))


def test_a_copied_store_whose_times_were_lost_is_believed_after_hashing(tmp_path):
    store = a_store(tmp_path)
    path = put(store, ONE)
    damage(path, ONE)
    assert store.held(sha(ONE), len(ONE)) == path
    sealed = path.stat().st_mtime_ns
    assert sealed != time.time_ns()  # noqa: TID251 the seal is not the time of writing
    store.stop()  # would refuse to hash again
    assert store.held(sha(ONE), len(ONE)) == path


def test_stopping_never_costs_a_blob_that_could_not_be_hashed_in_time(tmp_path):
    store = a_store(tmp_path)
    path = put(store, ONE)
    damage(path, ONE)
    store.stop()
    assert store.held(sha(ONE), len(ONE)) is None
    assert path.exists()


def test_the_least_recently_used_makes_room_and_use_counts(tmp_path):
    discarded = []
    store = a_store(tmp_path, discarded, store_bytes_max=2 * 3_000)
    old, new = put(store, ONE, used_ns=1_000), put(store, TWO, used_ns=2_000)
    store.held(sha(ONE), len(ONE))
    put(store, THREE)
    assert old.exists()
    assert not new.exists()
    assert discarded == [(sha(TWO), 3_000, False)]


def test_pinned_blobs_stay_and_a_full_store_says_so_without_evicting(tmp_path):
    store = a_store(tmp_path, store_bytes_max=2 * 3_000)
    first, second = put(store, ONE, used_ns=1_000), put(store, TWO, used_ns=2_000)
    store.pin([sha(ONE)])
    store.pin([sha(ONE), sha(TWO)])
    store.unpin([sha(ONE)])
    with pytest.raises(ArtifactError, match="store_bytes_max") as caught:
        store.begin(sha(THREE), len(THREE))
    assert caught.value.reason == "store_full"
    assert first.exists()
    assert second.exists()
    store.unpin([sha(TWO), sha(ONE)])
    put(store, THREE)
    assert not first.exists()


def test_a_transfer_under_way_keeps_its_room(tmp_path):
    store = a_store(tmp_path, store_bytes_max=5_000)
    store.begin(sha(ONE), len(ONE))
    with pytest.raises(ArtifactError, match="no room"):
        store.begin(sha(TWO), len(TWO))
    store.end(sha(ONE))
    store.begin(sha(TWO), len(TWO))


def test_an_abandoned_part_makes_room_before_it_is_old_but_one_in_use_does_not(tmp_path):
    other, store = a_store(tmp_path), a_store(tmp_path, store_bytes_max=3_000)
    partial = other.begin(sha(ONE), len(ONE))
    partial.append(ONE[:2_000], "peer")
    store.begin(sha(TWO), len(TWO)).close()
    store.end(sha(TWO))
    assert partial.path.exists(), "another process writes it"
    partial.close()
    store.begin(sha(TWO), len(TWO))
    assert not partial.path.exists()
    assert not partial.path.with_suffix(".json").exists()


def test_start_deletes_parts_that_are_too_old_and_keeps_younger_ones(tmp_path):
    store = a_store(tmp_path)
    for content in (ONE, TWO):
        partial = store.begin(sha(content), 3_000)
        partial.append(content[:10], "peer")
        partial.close()
    old = tmp_path / "partial" / f"{sha(ONE)}.part"
    os.utime(old, (1, 1))
    (tmp_path / "partial" / "left-over.new").write_bytes(b"x")
    a_store(tmp_path)
    assert sorted(entry.name for entry in (tmp_path / "partial").iterdir()) == sorted(
        [f"{sha(TWO)}.part", f"{sha(TWO)}.json"]
    )


def test_strange_files_in_the_store_are_neither_counted_nor_touched(tmp_path):
    store = a_store(tmp_path, store_bytes_max=3_000)
    strange = [
        tmp_path / "README",
        tmp_path / "ab" / "notes",
        tmp_path / "abc" / ("a" * 64),
        tmp_path / "ab" / ("A" * 64),
    ]
    for path in strange:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(5_000))
    put(store, ONE)
    assert [blob.sha256 for blob in store.blobs()] == [sha(ONE)]
    assert all(path.exists() for path in strange)


def test_the_disk_is_left_with_room_for_others(tmp_path):
    with small_disk(tmp_path / "disk", 2) as disk:
        store = a_store(disk / "artifacts", free_bytes_min=1_048_576)
        with pytest.raises(ArtifactError, match="kept free"):
            store.begin(sha(ONE), 1_200_000)
        store.begin(sha(ONE), 900_000)


def test_a_directory_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ArtifactError, match="cache directory"):
        a_store(tmp_path / "file")


def test_a_link_to_a_blob_has_the_blobs_name_and_others_have_none(tmp_path):
    store = a_store(tmp_path / "store")
    path = put(store, ONE)
    link, other = tmp_path / "link", tmp_path / ("ab" * 32)
    link.symlink_to(path)
    other.write_bytes(b"")
    assert store.name_of(link) == store.name_of(path) == sha(ONE)
    assert store.name_of(other) is None
    assert store.name_of(tmp_path / "nothing") is None
