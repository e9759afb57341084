"""Split models: every way a set of shards can be right or wrong."""

import pytest

from coordinator.model import gguf_package
from coordinator.model.gguf_header import MAX_TENSORS
from coordinator.model.gguf_shards import shard_file_names
from protocol.errors import ModelError
from tests.fixtures_model import TensorSpec, Typed, gguf_bytes, metadata, package, tensors


def shard(number, count, specs, total, facts=None):
    split = {
        "split.no": Typed("u16", number),
        "split.count": Typed("u16", count),
        "split.tensors.count": Typed("i32", total),
    }
    return gguf_bytes({**(facts or {}), **split}, specs)


def split_set(*parts, total=None):
    total = sum(len(part) for part in parts) if total is None else total
    return [
        shard(index, len(parts), part, total, metadata() if index == 0 else None) for index, part in enumerate(parts)
    ]


WHOLE = tensors(4)


def test_a_split_model_is_the_same_model_as_the_whole_one():
    whole = package(gguf_bytes(metadata(), WHOLE))
    split = package(split_set(WHOLE[:3], WHOLE[3:6], WHOLE[6:]))
    assert split.layers == whole.layers
    assert (split.shared_first_bytes, split.shared_last_bytes) == (whole.shared_first_bytes, whole.shared_last_bytes)


def test_the_first_shard_may_hold_metadata_only():
    assert package(split_set([], WHOLE)).layer_count == 4


def test_a_block_that_straddles_two_shards_is_added_up():
    assert [spec.name for spec in WHOLE[1:3]] == ["blk.0.attn_q.weight", "blk.0.attn_norm.weight"]
    model = package(split_set(WHOLE[:2], WHOLE[2:]))
    assert model.layers[0].weight_bytes == 64 * 64 * 4 + 64 * 4
    assert model.diagnostics == ()


def test_a_single_file_that_is_one_of_several_shards_says_so():
    with pytest.raises(ModelError, match=r"split.count says 3 shards but this file alone was found"):
        package([shard(0, 3, WHOLE, len(WHOLE), metadata())])


def test_shards_in_the_wrong_order_are_refused():
    first, second, third = split_set(WHOLE[:3], WHOLE[3:6], WHOLE[6:])
    with pytest.raises(ModelError, match=r"tiny-1.gguf: split.no is 2, but its name says 1"):
        package([first, third, second])


@pytest.mark.parametrize(
    ("stranger", "words"),
    [
        (shard(1, 3, WHOLE[3:6], len(WHOLE)), "split.count differs"),
        (shard(1, 2, WHOLE[3:], 99), "split.tensors.count differs"),
        (shard(1, 2, WHOLE[2:], len(WHOLE)), "blk.0.attn_norm.weight' is already in tiny-0.gguf"),
        (shard(1, 2, WHOLE[3:], len(WHOLE), {"general.architecture": "qwen3"}), "architecture 'qwen3'"),
    ],
)
def test_a_shard_of_another_set_is_refused(stranger, words):
    first = shard(0, 2, WHOLE[:3], len(WHOLE), metadata())
    with pytest.raises(ModelError, match=r"tiny-1.gguf: a shard of another set") as caught:
        package([first, stranger])
    assert words in str(caught.value)


def test_a_shard_without_split_keys_is_refused():
    with pytest.raises(ModelError, match=r"tiny-1.gguf: no split.no"):
        package([shard(0, 2, WHOLE[:3], len(WHOLE), metadata()), gguf_bytes(metadata(), WHOLE[3:])])


def test_a_tensor_count_that_does_not_add_up_is_refused():
    with pytest.raises(ModelError, match=r"split.tensors.count says 12, the shards hold 11"):
        package(split_set(WHOLE[:3], WHOLE[3:], total=12))


@pytest.mark.parametrize("value", ["two", True, Typed("i32", -2)])
def test_a_split_count_that_is_no_count_is_refused(value):
    with pytest.raises(ModelError, match=r"split.count is"):
        package(gguf_bytes({**metadata(), "split.count": value}, WHOLE))


def test_any_shard_names_its_whole_set():
    expected = tuple(f"a-0001-00001-of-00002.gguf-{n:05d}-of-00003.gguf" for n in (1, 2, 3))
    assert shard_file_names("a-0001-00001-of-00002.gguf-00002-of-00003.gguf") == expected
    assert shard_file_names("model.gguf") is None
    assert shard_file_names("model-00001-of-00002.safetensors") is None


@pytest.mark.parametrize("name", ["m-00000-of-00002.gguf", "m-00003-of-00002.gguf", "m-00001-of-99999.gguf"])
def test_impossible_shard_numbers_are_refused(name):
    with pytest.raises(ModelError, match=r"is not possible"):
        shard_file_names(name)


def test_shards_cannot_together_exceed_what_one_file_may_hold(monkeypatch):
    shards = split_set(WHOLE[:4], WHOLE[4:])
    monkeypatch.setattr(gguf_package, "MAX_TENSORS", 10)
    with pytest.raises(ModelError, match=r"tiny-1.gguf: the shards hold more than the 10 tensors"):
        package(shards)
    monkeypatch.setattr(gguf_package, "MAX_HEADER_BYTES", 700)
    with pytest.raises(ModelError, match=r"tiny-1.gguf: the shards' headers exceed 700 bytes"):
        package(shards)


def test_one_shard_cannot_hide_a_table_that_is_too_long():
    with pytest.raises(ModelError, match=r"tensors, more than"):
        package(
            [
                shard(0, 1, [TensorSpec("t", (1,))], 1, metadata())[:8]
                + (MAX_TENSORS + 1).to_bytes(8, "little")
                + bytes(8)
            ]
        )
