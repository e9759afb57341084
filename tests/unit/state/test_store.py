"""What a daemon finds again after a restart, and what it is told when the directory cannot be trusted."""

import os
import sqlite3
import stat
from pathlib import Path

import pytest

from protocol.errors import StateError
from stage_agent.state.database import MAX_SET_ASIDE
from stage_agent.state.store import MAX_DOCUMENT_BYTES, MAX_DOCUMENTS_PER_SPACE, BootRecord, StateStore

PROMISE = {"promised": [7, "node", "ab" * 16], "active": None}


def filled(directory: Path) -> None:
    with StateStore.open(directory) as store:
        store.boot()
        store.persist_term(41)
        store.persist_slot("default", PROMISE)


def damage(path: Path, needle: bytes, replacement: bytes) -> None:
    content = path.read_bytes()
    assert needle in content
    path.write_bytes(content.replace(needle, replacement))


def test_every_boot_has_a_higher_counter_and_the_last_term_survives(tmp_path: Path) -> None:
    with StateStore.open(tmp_path) as store:
        assert store.boot() == BootRecord(1, 0)
        store.persist_term(5)
        store.persist_term(3)
    with StateStore.open(tmp_path) as store:
        assert store.boot() == BootRecord(2, 5)
        assert not store.amnesia


def test_slots_come_back_as_they_were_last_persisted(tmp_path: Path) -> None:
    with StateStore.open(tmp_path) as store:
        store.persist_slot("default", {"promised": [1, "a", "b"]})
        store.persist_slot("default", PROMISE)
        store.persist_slot("draft", {"promised": None})
    with StateStore.open(tmp_path) as store:
        assert store.slots() == {"default": PROMISE, "draft": {"promised": None}}


def test_documents_are_kept_per_space_and_can_be_removed(tmp_path: Path) -> None:
    with StateStore.open(tmp_path) as store:
        store.put("tombstones", "n1", {"boot_counter": 4})
        store.put("admissions", "n1", {"version": 1})
        store.remove("tombstones", "n1")
        store.remove("tombstones", "n1")
    with StateStore.open(tmp_path) as store:
        assert store.get("tombstones", "n1") is None
        assert store.documents("admissions") == {"n1": {"version": 1}}


def test_a_second_daemon_on_the_same_directory_is_refused_until_the_first_has_closed(tmp_path: Path) -> None:
    first = StateStore.open(tmp_path)
    with pytest.raises(StateError, match="in use by another stagemesh daemon"):
        StateStore.open(tmp_path)
    first.close()
    first.close()
    StateStore.open(tmp_path).close()


def test_directory_and_files_are_for_their_owner_only(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "state"
    filled(directory)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()} == {0o600}


def test_a_changed_document_is_set_aside_and_the_node_says_amnesia_until_it_is_cleared(tmp_path: Path) -> None:
    filled(tmp_path)
    damage(tmp_path / "state.db", b'"promised":[7', b'"promised":[1')
    with StateStore.open(tmp_path) as store:
        assert store.amnesia
        assert store.slots() == {}
        assert store.set_aside == tmp_path / "state.db.corrupt-1"
        assert b'"promised":[1' in store.set_aside.read_bytes()
    with StateStore.open(tmp_path) as store:
        assert store.amnesia
        assert store.set_aside is None
        store.clear_amnesia()
    with StateStore.open(tmp_path) as store:
        assert not store.amnesia


@pytest.mark.parametrize("content", [b"not a database at all" * 300, b"SQLite format 3\0" + bytes(5000), b"x"])
def test_a_file_that_is_no_database_is_set_aside(tmp_path: Path, content: bytes) -> None:
    filled(tmp_path)
    (tmp_path / "state.db").write_bytes(content)
    with StateStore.open(tmp_path) as store:
        assert store.amnesia
        assert (tmp_path / "state.db.corrupt-1").read_bytes() == content


def test_a_truncated_database_is_set_aside(tmp_path: Path) -> None:
    filled(tmp_path)
    os.truncate(tmp_path / "state.db", 5000)
    with StateStore.open(tmp_path) as store:
        assert store.amnesia


def test_the_boot_counter_never_goes_back_even_when_the_database_is_lost(tmp_path: Path) -> None:
    filled(tmp_path)
    filled(tmp_path)
    (tmp_path / "state.db").write_bytes(b"garbage" * 1000)
    with StateStore.open(tmp_path) as store:
        assert store.boot().boot_counter == 3


def test_a_deleted_database_is_noticed_as_amnesia(tmp_path: Path) -> None:
    filled(tmp_path)
    (tmp_path / "state.db").unlink()
    with StateStore.open(tmp_path) as store:
        assert store.amnesia


def test_an_older_copy_of_the_database_is_noticed_as_amnesia(tmp_path: Path) -> None:
    filled(tmp_path)
    old = (tmp_path / "state.db").read_bytes()
    filled(tmp_path)
    (tmp_path / "state.db").write_bytes(old)
    with StateStore.open(tmp_path) as store:
        assert store.amnesia
        assert store.boot().boot_counter == 3


def test_an_unreadable_boot_file_costs_nothing_while_the_database_is_sound(tmp_path: Path) -> None:
    filled(tmp_path)
    (tmp_path / "boot_counter").write_bytes(b"\xff\xfe 99")
    with StateStore.open(tmp_path) as store:
        assert not store.amnesia
        assert store.boot().boot_counter == 2


def test_peers_that_remember_a_higher_boot_counter_can_raise_it(tmp_path: Path) -> None:
    with StateStore.open(tmp_path) as store:
        store.boot()
        assert store.raise_boot_counter(70) == 70
        assert store.raise_boot_counter(5) == 70
    with StateStore.open(tmp_path) as store:
        assert store.boot().boot_counter == 71


def test_only_the_newest_damaged_files_are_kept(tmp_path: Path) -> None:
    for _ in range(MAX_SET_ASIDE + 3):
        filled(tmp_path)
        (tmp_path / "state.db").write_bytes(b"garbage" * 1000)
    StateStore.open(tmp_path).close()
    kept = sorted(int(path.name.rpartition("-")[2]) for path in tmp_path.glob("state.db.corrupt-*"))
    assert kept == list(range(4, MAX_SET_ASIDE + 4))


def test_a_store_of_a_newer_version_is_left_alone_and_named(tmp_path: Path) -> None:
    filled(tmp_path)
    connection = sqlite3.connect(tmp_path / "state.db")
    connection.execute("PRAGMA user_version = 2")
    connection.close()
    before = (tmp_path / "state.db").read_bytes()
    with pytest.raises(StateError, match="newer stagemesh"):
        StateStore.open(tmp_path)
    assert (tmp_path / "state.db").read_bytes() == before
    assert not list(tmp_path.glob("*.corrupt-*"))


def test_a_path_that_is_a_file_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StateError, match="not a directory") as refused:
        StateStore.open(tmp_path / "file")
    assert "\n" not in str(refused.value)
    with pytest.raises(StateError, match="not a directory"):
        StateStore.open(tmp_path / "file" / "below")


def test_documents_have_bounds_in_size_and_number(tmp_path: Path) -> None:
    with StateStore.open(tmp_path) as store:
        with pytest.raises(StateError, match="over"):
            store.put("space", "big", {"text": "x" * MAX_DOCUMENT_BYTES})
        # Fill the space behind the store's back: 8 192 fsyncs would only cost time.
        with store._writing() as connection:
            connection.executemany(
                "INSERT INTO documents VALUES ('full', ?, '{}', '')",
                [(str(number),) for number in range(MAX_DOCUMENTS_PER_SPACE)],
            )
        with pytest.raises(StateError, match="already holds"):
            store.put("full", "one more", {})
        store.put("full", "7", {"replaced": True})
        assert store.get("full", "7") == {"replaced": True}


def test_a_refused_document_leaves_the_store_usable(tmp_path: Path) -> None:
    with StateStore.open(tmp_path) as store:
        with pytest.raises(ValueError, match="JSON"):
            store.put("space", "nan", {"value": float("nan")})
        store.put("space", "key", {"value": 1})
        assert store.get("space", "key") == {"value": 1}


def test_every_commit_waits_for_the_disk(tmp_path: Path) -> None:
    with StateStore.open(tmp_path) as store:
        assert store._connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert store._connection.execute("PRAGMA synchronous").fetchone() == (2,)
