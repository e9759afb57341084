"""Tensor element types: how many bytes a row takes. GGML ids 0–41 and the safetensors names.

Source of the sizes: the block layouts of ggml (``GGML_QUANT_SIZES`` of the ``gguf`` package; a test compares them).
"""

from dataclasses import dataclass
from typing import get_args

from config.cache_types import CacheType
from protocol.errors import ModelError


@dataclass(frozen=True, slots=True)
class TensorType:
    """``block_values`` consecutive values of a row are stored in ``block_bytes`` bytes."""

    name: str
    block_values: int
    block_bytes: int

    def row_bytes(self, values: int) -> int:
        """Bytes of ``values`` consecutive values, rounded up to whole blocks."""
        return -(-values // self.block_values) * self.block_bytes


GGML_TYPES: dict[int, TensorType] = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    9: TensorType("Q8_1", 32, 40),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    15: TensorType("Q8_K", 256, 292),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    24: TensorType("I8", 1, 1),
    25: TensorType("I16", 1, 2),
    26: TensorType("I32", 1, 4),
    27: TensorType("I64", 1, 8),
    28: TensorType("F64", 1, 8),
    29: TensorType("IQ1_M", 256, 56),
    30: TensorType("BF16", 1, 2),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
    40: TensorType("NVFP4", 64, 36),
    41: TensorType("Q1_0", 128, 18),
}

REMOVED_GGML_TYPES = frozenset({4, 5, 31, 32, 33, 36, 37, 38})
"""Ids that once had a layout and were withdrawn; files with them must be converted again."""

SAFETENSORS_TYPES: dict[str, TensorType] = {
    name: TensorType(name, block_values, block_bytes)
    for name, block_values, block_bytes in (
        ("BOOL", 1, 1),
        ("U8", 1, 1),
        ("I8", 1, 1),
        ("F8_E5M2", 1, 1),
        ("F8_E4M3", 1, 1),
        ("F8_E8M0", 1, 1),
        ("F4", 2, 1),
        ("F6_E2M3", 4, 3),
        ("F6_E3M2", 4, 3),
        ("I16", 1, 2),
        ("U16", 1, 2),
        ("F16", 1, 2),
        ("BF16", 1, 2),
        ("I32", 1, 4),
        ("U32", 1, 4),
        ("F32", 1, 4),
        ("I64", 1, 8),
        ("U64", 1, 8),
        ("F64", 1, 8),
        ("C64", 1, 8),
    )
}

_BY_NAME = {kind.name: kind for kind in GGML_TYPES.values()}


def cache_row_bytes(cache_type: CacheType, values: int) -> int:
    """Cache bytes of ``values`` key or value elements of one token, rounded up to whole bytes (q8_0: 34/32 per value).

    Raises ``ModelError`` for a type no engine keeps a cache in.
    """
    if cache_type not in get_args(CacheType):
        raise ModelError(f"cache type {cache_type!r} is not one of {', '.join(get_args(CacheType))}")
    kind = _BY_NAME[cache_type.upper()]
    return -(-values * kind.block_bytes // kind.block_values)
