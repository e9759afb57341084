"""Every element type the decoder reads gives the values that the gguf package gives."""

import gguf
import numpy as np
import pytest

from stage_agent.runtimes.reference.dequantise import SUPPORTED_TYPES, dequantise


@pytest.mark.parametrize("kind", sorted(SUPPORTED_TYPES))
def test_values_equal_those_of_the_reference_package(kind: str) -> None:
    random = np.random.default_rng(1)
    quantisation = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[quantisation]
    rows, columns = 3, 512
    if kind == "Q6_K":  # the package reads it but cannot write it: any bytes with a sane scale will do
        raw = random.integers(0, 256, (rows, columns // block * size), dtype=np.uint8)
        raw.reshape(-1, size)[:, 208:] = np.frombuffer(np.float16(0.01).tobytes(), dtype=np.uint8)
    else:
        raw = gguf.quants.quantize(random.standard_normal((rows, columns)).astype(np.float32), quantisation)
    raw = np.ascontiguousarray(raw).view(np.uint8)
    expected = gguf.quants.dequantize(raw, quantisation)
    np.testing.assert_array_equal(dequantise(raw.reshape(-1), kind, rows, columns), expected.reshape(rows, columns))
