"""Every element type the decoder reads gives the values that the gguf package gives."""

import subprocess
import sys

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


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere numpy may come with another matrix library")
def test_the_matrix_library_of_numpys_own_wheels_can_be_kept_to_one_thread() -> None:
    program = (
        "import time, numpy as np\n"
        "from stage_agent.runtimes.reference.blas import use_one_thread\n"
        "assert use_one_thread() and use_one_thread()\n"
        "a = np.ones((1500, 1500), np.float32)\n"
        "wall, used = time.perf_counter(), time.process_time()\n"
        "for _ in range(5): a @ a\n"
        "wall, used = time.perf_counter() - wall, time.process_time() - used\n"
        "assert used < 1.2 * wall + 0.05, (used, wall)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
