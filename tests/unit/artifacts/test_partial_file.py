"""A file that is still arriving, through crashes and damage."""

import errno
import json
import os

import pytest

from stage_agent.artifacts import partial_file
from stage_agent.artifacts.errors import ArtifactError
from stage_agent.artifacts.partial_file import PartialFile
from tests.unit.artifacts.stores import sha, small_disk

CONTENT = bytes(range(256)) * 64
NAME = sha(CONTENT)
SIZE = len(CONTENT)


def begun(tmp_path, size, source="peer-a"):
    partial = PartialFile(tmp_path, NAME, len(CONTENT))
    partial.append(CONTENT[:size], source)
    return partial


def again(tmp_path, size_bytes=SIZE):
    return PartialFile(tmp_path, NAME, size_bytes)


def test_a_closed_one_goes_on_where_it_stopped_and_knows_who_gave_what(tmp_path):
    begun(tmp_path, 5_000).close()
    partial = again(tmp_path)
    assert (partial.position, partial.sources) == (5_000, ("peer-a",))
    partial.append(CONTENT[5_000:], "peer-b")
    assert partial.complete
    assert partial.genuine
    assert partial.path.read_bytes() == CONTENT
    assert partial.sources == ("peer-a", "peer-b")


def test_bytes_after_the_last_checkpoint_are_not_believed_after_a_crash(tmp_path, monkeypatch):
    monkeypatch.setattr(partial_file, "CHECKPOINT_BYTES", 4_096)
    partial = begun(tmp_path, 4_096)
    partial.append(CONTENT[4_096:5_000], "peer-a")
    os.close(partial._descriptor)  # the process is gone
    with partial.path.open("r+b") as file:
        file.seek(4_500)
        file.write(b"\0" * 400)  # the last pages never reached the disk
    resumed = again(tmp_path)
    assert resumed.position == 4_096
    resumed.append(CONTENT[4_096:], "peer-a")
    assert resumed.genuine
    assert resumed.path.read_bytes() == CONTENT


@pytest.mark.parametrize("where", [0, 2_500, 4_999])
def test_a_damaged_part_begins_anew(tmp_path, where):
    begun(tmp_path, 5_000).close()
    path = tmp_path / f"{NAME}.part"
    content = bytearray(path.read_bytes())
    content[where] ^= 1
    path.write_bytes(content)
    assert again(tmp_path).position == 0


def test_a_part_shorter_than_its_record_begins_anew(tmp_path):
    begun(tmp_path, 5_000).close()
    os.truncate(tmp_path / f"{NAME}.part", 4_999)
    assert again(tmp_path).position == 0


@pytest.mark.parametrize(
    "record", [b"", b"{", b"[]", b"null", b'{"size_bytes": 1}', b"\xff" * 10,
               json.dumps({"size_bytes": len(CONTENT), "verified_bytes": -1, "prefix_sha256": NAME}).encode(),
               json.dumps({"size_bytes": len(CONTENT), "verified_bytes": 2**60, "prefix_sha256": NAME}).encode(),
               json.dumps({"size_bytes": len(CONTENT), "verified_bytes": 5_000, "prefix_sha256": "x"}).encode()],
)  # fmt: skip
def test_a_damaged_record_begins_anew(tmp_path, record):
    begun(tmp_path, 5_000).close()
    (tmp_path / f"{NAME}.json").write_bytes(record)
    assert again(tmp_path).position == 0


def test_another_size_for_the_same_hash_begins_anew(tmp_path):
    begun(tmp_path, 5_000).close()
    partial = again(tmp_path, 4_000)
    assert partial.position == 0
    assert partial.path.stat().st_size == 0


def test_wrong_bytes_are_noticed_at_the_end(tmp_path):
    partial = begun(tmp_path, 5_000)
    partial.append(b"x" + CONTENT[5_001:], "peer-a")
    assert partial.complete
    assert not partial.genuine
    partial.start_anew()
    assert (partial.position, partial.sources) == (0, ())
    partial.append(CONTENT, "peer-b")
    assert partial.genuine


def test_two_writers_cannot_have_the_same_part(tmp_path):
    first = begun(tmp_path, 5_000)
    with pytest.raises(ArtifactError, match="another process") as caught:
        again(tmp_path)
    assert caught.value.reason == "in_use"
    first.append(CONTENT[5_000:], "peer-a")
    assert first.genuine, "the second one changed nothing"
    first.close()
    assert again(tmp_path).position == len(CONTENT)


def test_a_closed_one_takes_nothing_and_a_discarded_one_is_gone(tmp_path):
    partial = begun(tmp_path, 5_000)
    partial.close()
    partial.append(CONTENT[5_000:], "peer-a")
    partial.close()
    assert partial.position == 5_000
    again(tmp_path).discard()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_line_and_what_was_written_before_stays_right(tmp_path):
    with small_disk(tmp_path / "disk", 1) as disk:
        content = os.urandom(2 * 1_048_576)
        partial = PartialFile(disk, sha(content), len(content))

        def fill():
            for start in range(0, len(content), 65_536):
                partial.append(content[start : start + 65_536], "peer")

        with pytest.raises(ArtifactError, match="the disk is full") as caught:
            fill()
        assert caught.value.reason == "disk_full"
        assert "\n" not in str(caught.value)
        taken = partial.position
        assert taken % 65_536 == 0
        assert partial.path.read_bytes()[:taken] == content[:taken]
        partial.close()
        partial = PartialFile(disk, sha(content), len(content))
        assert partial.position in {0, taken}, "the record may not have fitted"
        partial.discard()
        assert list(disk.iterdir()) == []


def test_what_a_failed_write_left_is_written_over(tmp_path, monkeypatch):
    partial = begun(tmp_path, 5_000)
    write = os.pwrite

    def half(descriptor, _data, offset):
        write(descriptor, b"garbage", offset)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pwrite", half)
    with pytest.raises(ArtifactError, match="Input/output"):
        partial.append(CONTENT[5_000:], "peer-a")
    monkeypatch.setattr(os, "pwrite", write)
    partial.append(CONTENT[5_000:], "peer-a")
    assert partial.genuine
    assert partial.path.read_bytes() == CONTENT


def test_a_directory_that_cannot_be_written_is_one_line(tmp_path):
    with pytest.raises(ArtifactError, match="No such file") as caught:
        PartialFile(tmp_path / "missing", NAME, 1)
    assert caught.value.reason == "disk_failed"


def test_a_node_that_stops_does_not_finish_hashing_first(tmp_path):
    begun(tmp_path, 5_000).close()
    with pytest.raises(ArtifactError):
        PartialFile(tmp_path, NAME, len(CONTENT), stopping=lambda: True)
    assert again(tmp_path).position == 5_000, "and nothing is lost by that"
