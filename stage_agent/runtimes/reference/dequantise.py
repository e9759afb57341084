"""GGML element types to float32. Layouts as in ggml: a block's scale first, then its quants."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Raw = NDArray[np.uint8]


def dequantise(raw: Raw, kind: str, rows: int, columns: int) -> Floats:
    """``rows × columns`` values of element type ``kind`` (GGML name). Raises ``KeyError`` for a type not known here."""
    return np.ascontiguousarray(_DECODERS[kind](raw).reshape(rows, columns), dtype=np.float32)


def _f32(raw: Raw) -> Floats:
    return raw.view("<f4").astype(np.float32)


def _f16(raw: Raw) -> Floats:
    return raw.view("<f2").astype(np.float32)


def _bf16(raw: Raw) -> Floats:
    return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _q8_0(raw: Raw) -> Floats:
    """32 values: f16 scale, 32 signed bytes."""
    blocks = raw.reshape(-1, 34)
    return _half(blocks[:, :2]) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _q4_0(raw: Raw) -> Floats:
    """32 values: f16 scale, 16 bytes; low nibbles are the first half, zero lies at 8."""
    blocks = raw.reshape(-1, 18)
    return _half(blocks[:, :2]) * (_nibbles(blocks[:, 2:]) - np.float32(8))


def _q4_1(raw: Raw) -> Floats:
    """32 values: f16 scale, f16 minimum, 16 bytes."""
    blocks = raw.reshape(-1, 20)
    return _half(blocks[:, :2]) * _nibbles(blocks[:, 4:]) + _half(blocks[:, 2:4])


def _q6_k(raw: Raw) -> Floats:
    """256 values: 128 bytes of low nibbles, 64 of high bit pairs, 16 signed sub-scales, f16 scale; zero lies at 32."""
    blocks = raw.reshape(-1, 210)
    low, high = blocks[:, :128].reshape(-1, 2, 2, 32), blocks[:, 128:192].reshape(-1, 2, 32)
    quants = np.empty((len(blocks), 2, 4, 32), dtype=np.float32)
    for part in range(4):
        nibble = (low[:, :, part % 2] >> (4 * (part // 2))) & 0x0F
        quants[:, :, part] = (nibble | (((high >> (2 * part)) & 3) << 4)).astype(np.float32) - np.float32(32)
    scales = _half(blocks[:, 208:210]) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    scaled = quants.reshape(-1, 16, 16) * scales[:, :, None]
    return scaled.reshape(len(blocks), 256)


def _half(raw: Raw) -> Floats:
    return np.ascontiguousarray(raw).view("<f2").astype(np.float32)


def _nibbles(raw: Raw) -> Floats:
    return np.concatenate([raw & 0x0F, raw >> 4], axis=1).astype(np.float32)


_DECODERS: dict[str, Callable[[Raw], Floats]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q6_K": _q6_k,
}
SUPPORTED_TYPES = frozenset(_DECODERS)
