"""Sizes of every tensor element type."""

import gguf.constants
import pytest

from coordinator.model.tensor_types import GGML_TYPES, REMOVED_GGML_TYPES, SAFETENSORS_TYPES, cache_row_bytes
from protocol.errors import ModelError


def test_every_type_the_gguf_package_knows_has_the_same_name_and_block_layout():
    expected = {int(kind): (kind.name, *sizes) for kind, sizes in gguf.constants.GGML_QUANT_SIZES.items()}
    ours = {code: (kind.name, kind.block_values, kind.block_bytes) for code, kind in GGML_TYPES.items()}
    assert ours == expected


def test_withdrawn_types_are_not_types():
    assert not REMOVED_GGML_TYPES & set(GGML_TYPES)
    assert set(GGML_TYPES) | REMOVED_GGML_TYPES == set(range(42))


@pytest.mark.parametrize(
    ("cache_type", "expected"), [("f16", 256), ("bf16", 256), ("f32", 512), ("q8_0", 136), ("q4_0", 72)]
)
def test_a_cache_row_of_128_values_takes_what_its_type_says(cache_type, expected):
    assert cache_row_bytes(cache_type, 128) == expected


def test_a_row_that_is_not_whole_blocks_is_rounded_up_to_whole_bytes():
    assert cache_row_bytes("q8_0", 33) == 36  # 33 · 34 / 32 = 35.06


def test_an_unknown_cache_type_is_refused_by_name():
    with pytest.raises(ModelError, match=r"q3_x"):
        cache_row_bytes("q3_x", 1)


def test_sub_byte_safetensors_types_round_up():
    assert SAFETENSORS_TYPES["F4"].row_bytes(5) == 3
