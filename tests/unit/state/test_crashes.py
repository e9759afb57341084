"""Disks that fill up, directories without permission, and processes killed between two instructions."""

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.errors import StateError
from stage_agent.state.store import StateStore

WRITER = """
import sys
from pathlib import Path
from stage_agent.state.store import StateStore
store = StateStore.open(Path(sys.argv[1]))
store.boot()
number = 0
while True:
    number += 1
    store.persist_slot("default", {"number": number, "filler": "x" * (number % 7000)})
    store.persist_term(number)
    sys.stdout.write(f"{number}\\n")
    sys.stdout.flush()
"""
FILLER = """
import sys, signal
from pathlib import Path
from protocol.errors import StateError
from stage_agent.state.store import StateStore
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = StateStore.open(Path(sys.argv[1]))
written = 0
try:
    while written < 10_000:
        store.put("space", "key", {"number": written + 1, "filler": "x" * 5000})
        written += 1
except StateError as error:
    assert store.get("space", "key")["number"] == written, "a failed write was visible"
    print(written, error)
"""


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory whose writer was killed after 30 acknowledged rounds; copy it."""
    directory = tmp_path_factory.mktemp("crashed")
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(directory)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(30):
        process.stdout.readline()
    process.kill()
    process.communicate()
    return directory


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 512 KiB; needs the right to mount."""
    directory = tmp_path / "tiny"
    directory.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(directory)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("no right to mount a small file system here")
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True)


def fill(directory: Path) -> None:
    with contextlib.suppress(OSError), (directory / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    assert os.statvfs(directory).f_bavail == 0


def put_until_refused(store: StateStore) -> None:
    for number in range(100):
        store.put("space", f"key {number}", {"value": "x" * 4000})


@pytest.mark.parametrize("writes", [1, 3, 10, 40, 150])
def test_a_process_killed_while_writing_has_lost_nothing_it_was_told_is_durable(tmp_path: Path, writes: int) -> None:
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(writes):
        process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    acknowledged = [int(line) for line in process.stdout.read().split()] or [writes]
    process.wait()
    with StateStore.open(tmp_path) as store:
        assert not store.amnesia
        number = store.slots()["default"]["number"]
        assert number >= acknowledged[-1] >= writes
        assert store.boot().last_term in {number, number - 1}


def test_a_torn_last_write_is_as_if_it_never_happened(crashed: Path, tmp_path: Path) -> None:
    shutil.copytree(crashed, tmp_path, dirs_exist_ok=True)
    log = tmp_path / "state.db-wal"
    whole = log.read_bytes()
    database = (tmp_path / "state.db").read_bytes()
    for missing in (1, 100, 4096, 4120, 5000):
        (tmp_path / "state.db").write_bytes(database)
        log.write_bytes(whole[:-missing])
        with StateStore.open(tmp_path) as store:
            assert not store.amnesia
            document = store.slots()["default"]
            assert len(document["filler"]) == document["number"] % 7000
            assert document["number"] >= 28


def test_a_last_transaction_that_reached_the_disk_in_part_was_never_acknowledged(crashed: Path, tmp_path: Path) -> None:
    shutil.copytree(crashed, tmp_path, dirs_exist_ok=True)
    log = tmp_path / "state.db-wal"
    content = bytearray(log.read_bytes())
    frames = [content[at : at + 4120] for at in range(32, len(content) - 4119, 4120)]
    ours = [frame[8:16] == content[16:24] and any(frame[4:8]) for frame in frames]
    at = 32 + max(number for number, commits in enumerate(ours) if commits) * 4120 + 24
    content[at : at + 4096] = bytes(4096)  # its header was written, its page was not
    log.write_bytes(content)
    with StateStore.open(tmp_path) as store:
        assert not store.amnesia
        assert store.slots()["default"]["number"] >= 28


@pytest.mark.parametrize(
    "byte", [0, 9, 20, *(32 + frame * 4120 + byte for frame in (0, 25) for byte in (0, 9, 16, 1000))]
)
def test_a_damaged_log_is_amnesia_and_not_a_silent_return_to_older_promises(
    crashed: Path, tmp_path: Path, byte: int
) -> None:
    shutil.copytree(crashed, tmp_path, dirs_exist_ok=True)
    log = tmp_path / "state.db-wal"
    content = bytearray(log.read_bytes())
    assert len(content) > 40 * 4120
    content[byte] ^= 0x40
    log.write_bytes(content)
    with StateStore.open(tmp_path) as store:
        assert store.amnesia
        assert (tmp_path / "state.db.corrupt-1.wal").read_bytes() == content
        assert store.boot().boot_counter == 2


def test_a_full_disk_refuses_the_write_in_one_line_and_keeps_what_was_there(tiny_disk: Path) -> None:
    with StateStore.open(tiny_disk) as store:
        store.boot()
        store.put("space", "key", {"value": "kept"})
        fill(tiny_disk)
        with pytest.raises(StateError) as refused:
            put_until_refused(store)
        assert "\n" not in str(refused.value)
        assert store.get("space", "key") == {"value": "kept"}
        (tiny_disk / "filler").unlink()
        store.put("space", "key", {"value": "after"})
    with StateStore.open(tiny_disk) as store:
        assert not store.amnesia
        assert store.get("space", "key") == {"value": "after"}


def test_a_disk_that_is_full_at_the_start_is_named_and_nothing_is_left_half_written(tiny_disk: Path) -> None:
    fill(tiny_disk)
    with pytest.raises(StateError, match="the disk is full: free some space"):
        StateStore.open(tiny_disk / "state")
    (tiny_disk / "filler").unlink()
    with StateStore.open(tiny_disk / "state") as store:
        assert store.boot().boot_counter == 1
        assert not store.amnesia


def test_a_write_that_hits_the_file_size_limit_is_refused_and_the_last_good_one_stays(tmp_path: Path) -> None:
    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))

    result = subprocess.run(
        [sys.executable, "-c", FILLER, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=limited,
    )
    written, _, message = result.stdout.partition(" ")
    assert int(written) > 3
    assert "cannot use the state file" in message
    with StateStore.open(tmp_path) as store:
        document = store.get("space", "key")
        assert document is not None
        assert document["number"] == int(written)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_a_directory_without_permission_is_refused_in_one_line() -> None:
    os.seteuid(65534)
    try:
        with pytest.raises(StateError, match="no permission: give this user the directory"):
            StateStore.open(Path("/etc/stagemesh-state"))
    finally:
        os.seteuid(0)


def test_a_read_only_file_system_is_named(tiny_disk: Path) -> None:
    StateStore.open(tiny_disk / "state").close()
    subprocess.run(["mount", "-o", "remount,ro", str(tiny_disk)], check=True)
    with pytest.raises(StateError, match="read-only: mount it writable"):
        StateStore.open(tiny_disk / "state")
