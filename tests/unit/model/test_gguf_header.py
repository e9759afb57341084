"""What the header reader accepts, and how it refuses the rest."""

import struct
import tracemalloc

import pytest

from coordinator.model import gguf_header
from coordinator.model.gguf_header import Skipped, read_gguf_header
from coordinator.model.source import WINDOW_BYTES, MemorySource
from protocol.errors import ModelError
from tests.fixtures_model import F16, Q4_K, Q8_0, Raw, TensorSpec, Typed, array, gguf_bytes, metadata, tensors


def read(content: bytes):
    return read_gguf_header(MemorySource(content), "m.gguf")


@pytest.mark.parametrize("version", [2, 3])
def test_metadata_and_tensors_come_back_as_written(version):
    header = read(
        gguf_bytes({**metadata(), "x.flag": True, "x.f": 0.5, "x.i": Typed("i64", -7)}, tensors(2), version=version)
    )
    assert header.version == version
    assert header.metadata["llama.block_count"] == 4
    assert header.metadata["x.flag"] is True
    assert header.metadata["x.f"] == 0.5
    assert header.metadata["x.i"] == -7
    by_name = {entry.name: entry for entry in header.tensors}
    assert (by_name["output.weight"].kind.name, by_name["output.weight"].nbytes) == ("Q8_0", 64 * 100 // 32 * 34)
    assert all(entry.offset % 32 == 0 for entry in header.tensors)
    last = max(header.tensors, key=lambda entry: entry.offset)
    assert last.offset + last.nbytes == header.file_bytes


def test_offsets_are_where_the_bytes_really_are():
    content = gguf_bytes(metadata(), [TensorSpec("token_embd.weight", (64, 2)), TensorSpec("blk.0.w", (8,))], fill=7)
    entry = read(content).tensors[1]
    assert content[entry.offset - 1 : entry.offset + entry.nbytes] == bytes([7] * (1 + 32))
    assert entry.offset + entry.nbytes == len(content)


def test_an_alignment_of_the_file_s_own_is_respected():
    content = gguf_bytes({**metadata(), "general.alignment": 256}, tensors(2), alignment=256)
    assert {entry.offset % 256 for entry in read(content).tensors} == {0}


def test_short_arrays_are_kept_and_long_ones_passed_over():
    header = read(gguf_bytes({"a": [1, 2, 3], "b": array("f32", [0.5] * 5000), "c": array("str", ["x", "yz"])}))
    assert header.metadata["a"] == (1, 2, 3)
    assert header.metadata["b"] == Skipped(5000)
    assert header.metadata["c"] == Skipped(2)


def test_a_vocabulary_larger_than_the_window_is_passed_over_exactly():
    words = [b"w" * (length % 700) for length in range(2998)]  # 1 MB: strings cross window borders in every way
    words += [b"w" * (3 * WINDOW_BYTES), b"w" * 70_000]
    header = read(gguf_bytes({"tokenizer.ggml.tokens": array("str", words), "after": 42}))
    assert header.metadata == {"tokenizer.ggml.tokens": Skipped(3000), "after": 42}


def test_a_string_longer_than_the_window_is_passed_over():
    header = read(gguf_bytes({"tokenizer.chat_template": "x" * (2 * WINDOW_BYTES), "after": 42}))
    assert header.metadata == {"tokenizer.chat_template": Skipped(2 * WINDOW_BYTES), "after": 42}


def test_invalid_text_inside_a_vocabulary_is_nobody_s_business():
    assert read(gguf_bytes({"tokens": array("str", [b"\xff\xfe"])})).metadata["tokens"] == Skipped(1)


HOSTILE = {
    "the file is empty": b"",
    "not a GGUF file": b"PK\x03\x04" + bytes(100),
    "GGUF version 1 is not supported": gguf_bytes(metadata(), version=1),
    "GGUF version 4 is not supported": gguf_bytes(metadata(), version=4),
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "claims 18446744073709551615 tensors": gguf_bytes(metadata(), tensor_count=2**64 - 1),
    "claims 9223372036854775808 metadata keys": gguf_bytes(metadata(), pair_count=2**63),
    "truncated or damaged in the length of a metadata key": gguf_bytes(metadata(), pair_count=100),
    "metadata key of 18446744073709551615 bytes": gguf_bytes([])[:16] + struct.pack("<QQ", 1, 2**64 - 1),
    "a metadata key holds control characters": gguf_bytes([("a\nb", 1)]),
    "a tensor name holds control characters": gguf_bytes({}, [TensorSpec("a\x1b[31m", (1,))]),
    "a metadata key is not UTF-8": gguf_bytes([(b"\xff\xfe", 1)]),
    "the value of general.name is not UTF-8": gguf_bytes({"general.name": b"\xc3\x28"}),
    "'a' appears twice": gguf_bytes([("a", 1), ("a", 2)]),
    "unknown value type 13": gguf_bytes({"a": Raw(struct.pack("<I", 13))}),
    "'a' is an array of arrays": gguf_bytes({"a": Raw(struct.pack("<IIQ", 9, 9, 1) * 50)}),
    "'b' has the unknown value type 99": gguf_bytes({"b": Raw(struct.pack("<IIQ", 9, 99, 1))}),
    "claims 1152921504606846976 strings": gguf_bytes({"a": array("str", [], count=2**60)}),
    "truncated or damaged in v": gguf_bytes({"v": array("str", ["x"], count=1000)}),
    "truncated or damaged in w": gguf_bytes({"w": array("f32", [], count=2**62)}),
    "truncated or damaged in s": gguf_bytes({"s": Raw(struct.pack("<IQ", 8, 2**63))}),
    "truncated or damaged in t": gguf_bytes({"t": Raw(struct.pack("<IIQQ", 9, 8, 1, 2**64 - 1))}),
    "a boolean that is neither 0 nor 1": gguf_bytes({"a": Raw(struct.pack("<IB", 7, 2))}),
    "general.alignment is 0": gguf_bytes({"general.alignment": 0}),
    "general.alignment is 33": gguf_bytes({"general.alignment": 33}),
    "general.alignment is 2147483648": gguf_bytes({"general.alignment": 2**31}),
    "general.alignment is '32'": gguf_bytes({"general.alignment": "32"}),
    "general.alignment is True": gguf_bytes({"general.alignment": True}),
    "claims 5 dimensions": gguf_bytes({}, [TensorSpec("t", (1, 1, 1, 1, 1))]),
    "impossible shape (9223372036854775808": gguf_bytes({}, [TensorSpec("t", (2**63,))], with_data=False),
    "impossible shape (18446744073709551615": gguf_bytes({}, [TensorSpec("t", (-1,))], with_data=False),
    "impossible shape (4294967296, 4294967296": gguf_bytes({}, [TensorSpec("t", (2**32, 2**32))], with_data=False),
    "impossible shape (0": gguf_bytes({}, [TensorSpec("t", (0, 4))]),
    "element type 4, which was withdrawn": gguf_bytes({}, [TensorSpec("t", (32,), 4)]),
    "element type 999, which is unknown": gguf_bytes({}, [TensorSpec("t", (32,), 999)]),
    "rows of 100 values, not whole Q4_K blocks": gguf_bytes({}, [TensorSpec("t", (100, 256), Q4_K)]),
    "at offset 16 is not aligned to 32": gguf_bytes({}, [TensorSpec("t", (4,), offset=16)]),
    "tensors 'a' and 'b' overlap": gguf_bytes({}, [TensorSpec("a", (64,)), TensorSpec("b", (8,), offset=0)]),
    "tensors 'c' and 'd' overlap": gguf_bytes({}, [TensorSpec("c", (9,)), TensorSpec("d", (8,), offset=32)])
    + bytes(64),
    "tensor 't' ends": gguf_bytes({}, [TensorSpec("t", (8,), offset=2**62)], with_data=False),
    "tensor 't' appears twice": gguf_bytes({}, [TensorSpec("t", (8,)), TensorSpec("t", (8,))]),
    "a tensor name of 1000 bytes": gguf_bytes({}, [TensorSpec("t" * 1000, (8,))]),
    "a tensor name is not UTF-8": gguf_bytes({}, [TensorSpec(b"\xff", (8,))]),
}


@pytest.mark.parametrize("expected", list(HOSTILE))
def test_a_hostile_header_is_refused_in_words(expected):
    with pytest.raises(ModelError) as caught:
        read(HOSTILE[expected])
    assert expected in str(caught.value)
    assert str(caught.value).startswith("m.gguf: ")
    assert "\n" not in str(caught.value)


def test_every_truncation_of_a_small_file_is_refused():
    content = gguf_bytes(
        {**metadata(), "tokens": array("str", ["a", "bb", "ccc"])}, tensors(2, rows=[1, 2], head=False)[1:]
    )
    assert len(read(content).tensors) == 5
    for length in range(len(content)):
        with pytest.raises(ModelError):
            read(content[:length])


def test_a_header_longer_than_the_limit_is_refused_without_reading_it(monkeypatch):
    monkeypatch.setattr(gguf_header, "MAX_HEADER_BYTES", 4096)
    with pytest.raises(ModelError, match=r"runs past 4096 bytes"):
        read(gguf_bytes({"a": Raw(struct.pack("<IQ", 8, 10_000)), "b": 1}) + bytes(20_000))


def test_the_budget_of_strings_is_for_all_arrays_together(monkeypatch):
    monkeypatch.setattr(gguf_header, "MAX_SKIPPED_STRINGS", 5)
    three = array("str", ["a", "b", "c"])
    assert read(gguf_bytes({"x": three}))
    with pytest.raises(ModelError, match=r"claims 3 strings in y, more than the 2"):
        read(gguf_bytes({"x": three, "y": three}))


def test_the_budget_of_kept_numbers_is_for_all_arrays_together(monkeypatch):
    monkeypatch.setattr(gguf_header, "MAX_KEPT_ITEMS", 5)
    assert read(gguf_bytes({"x": [1, 2, 3], "y": [4, 5, 6], "z": [7]})).metadata == {
        "x": (1, 2, 3), "y": Skipped(3), "z": (7,),
    }  # fmt: skip


class Gigabytes:
    """A sparse file: a real header, then zeros without end."""

    def __init__(self, head: bytes, size: int) -> None:
        self.head = head
        self.size = size
        self.bytes_read = 0

    def read(self, offset: int, length: int) -> bytes:
        assert offset + length <= self.size
        self.bytes_read += length
        return self.head[offset : offset + length].ljust(length, b"\0")


def test_a_huge_file_of_empty_strings_is_refused_before_it_is_walked():
    source = Gigabytes(gguf_bytes({"a": array("str", [], count=2**30)}), 2**40)
    with pytest.raises(ModelError, match=r"strings in a"):
        read_gguf_header(source, "m.gguf")
    assert source.bytes_read <= WINDOW_BYTES


def test_a_large_numeric_array_is_neither_read_nor_held_in_memory():
    head = gguf_bytes({"a": array("f32", [], count=2**23), "b": 1})
    source = Gigabytes(head[:-17], 2**31)  # behind the array come zeros, so the next key is empty and of type 0
    tracemalloc.start()
    try:
        assert read_gguf_header(source, "m.gguf").metadata == {"a": Skipped(2**23), "": 0}
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert source.bytes_read <= 2 * WINDOW_BYTES
    assert peak < 4 * WINDOW_BYTES


def test_quantised_sizes_follow_the_block_layout():
    header = read(
        gguf_bytes({}, [TensorSpec("a", (256, 3), Q4_K), TensorSpec("b", (32, 5), Q8_0), TensorSpec("c", (7,), F16)])
    )
    assert [entry.nbytes for entry in header.tensors] == [3 * 144, 5 * 34, 14]
