"""Where logits are made: on the head when a token then costs less, never on a guess."""

import gguf
import numpy as np
import pytest

from coordinator.planner.readout import ReadoutSpeeds, head_reads_out_cheaper
from stage_agent.runtimes.llama_cpp.output_layer import output_on_head

GB, GBIT = 10**9, 125_000_000
OUTPUT_BYTES, LOGIT_BYTES = 860_000_000, 513_000
"""Of a 70B model: 8 192 × 128 256 at six bits and a half."""


@pytest.mark.parametrize(
    ("head", "last", "link", "cheaper", "why"),
    [
        (40 * GB, 40 * GB, GBIT, True, "equal machines: the logits' four milliseconds decide"),
        (40 * GB, 1_000 * GB, GBIT, False, "21 ms on the head's main memory, 5 on a card and a gigabit"),
        (40 * GB, 1_000 * GB, GBIT // 100, True, "the same card behind ten megabits"),
        (40 * GB, 40 * GB, None, False, "equal, and nothing is known of the link: memory decides"),
        (None, 40 * GB, GBIT, False, "a guess is not enough"),
        (40 * GB, None, GBIT, False, "a guess is not enough"),
    ],
)
def test_the_cheaper_place_by_memory_and_link(head, last, link, cheaper, why) -> None:
    assert head_reads_out_cheaper(OUTPUT_BYTES, LOGIT_BYTES, ReadoutSpeeds(head, last, link)) is cheaper, why


def gguf_file(path, *, tied: bool):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(512)
    writer.add_embedding_length(32)
    writer.add_head_count(4)
    shapes = {"token_embd.weight": (96, 32), "output_norm.weight": (32,), "blk.0.attn_q.weight": (32, 32)}
    if not tied:
        shapes["output.weight"] = (96, 32)
    for name, shape in shapes.items():
        writer.add_tensor(name, np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


SLOW_LINK = ReadoutSpeeds(40 * GB, 40 * GB, GBIT)
UNKNOWN = ReadoutSpeeds(None, None, None)
FAST_LAST = ReadoutSpeeds(10**6, 10**12, 10**12)


@pytest.mark.parametrize(
    ("tied", "speeds", "forced", "place"),
    [
        (True, UNKNOWN, False, "tied"),
        (True, FAST_LAST, False, "tied"),
        (False, SLOW_LINK, False, "untied"),
        (False, FAST_LAST, False, ""),
        (False, UNKNOWN, False, ""),
        (False, UNKNOWN, True, "untied"),
    ],
)
def test_a_tied_layer_is_on_the_head_anyway_and_its_own_matrix_moves_when_that_is_cheaper(
    tied, speeds, forced, place, tmp_path
) -> None:
    assert output_on_head(gguf_file(tmp_path / "m.gguf", tied=tied), speeds, forced=forced) == place
