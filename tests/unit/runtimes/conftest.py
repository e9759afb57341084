"""One small real model for all runtime tests: untied, so that tokens depend on every layer, and of mixed types."""

from pathlib import Path

import gguf
import numpy as np
import pytest

LAYERS = 6
WIDTH, HEADS, KV_HEADS, HEAD, FEED_FORWARD, VOCABULARY = 64, 4, 2, 16, 160, 512
_TYPES = ("F32", "F16", "Q8_0", "Q4_0", "Q4_1", "BF16")


def write_model(path: Path, architecture: str = "llama", extra: dict[str, tuple[int, ...]] | None = None) -> Path:
    random = np.random.default_rng(7)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(2048)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HEAD)
    writer.add_vocab_size(VOCABULARY)

    def add(name: str, shape: tuple[int, ...], kind: str) -> None:
        values = random.standard_normal(shape).astype(np.float32)
        values = 1 + 0.1 * values if len(shape) == 1 else values / np.float32(np.sqrt(shape[1]))
        quantisation = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, gguf.quants.quantize(values, quantisation), raw_dtype=quantisation)

    add("token_embd.weight", (VOCABULARY, WIDTH), "F16")
    for layer in range(LAYERS):
        kind = _TYPES[layer % len(_TYPES)]
        prefix = f"blk.{layer}."
        add(f"{prefix}attn_norm.weight", (WIDTH,), "F32")
        add(f"{prefix}attn_q.weight", (HEADS * HEAD, WIDTH), kind)
        add(f"{prefix}attn_k.weight", (KV_HEADS * HEAD, WIDTH), kind)
        add(f"{prefix}attn_v.weight", (KV_HEADS * HEAD, WIDTH), kind)
        add(f"{prefix}attn_output.weight", (WIDTH, HEADS * HEAD), kind)
        add(f"{prefix}ffn_norm.weight", (WIDTH,), "F32")
        add(f"{prefix}ffn_gate.weight", (FEED_FORWARD, WIDTH), kind)
        add(f"{prefix}ffn_up.weight", (FEED_FORWARD, WIDTH), kind)
        add(f"{prefix}ffn_down.weight", (WIDTH, FEED_FORWARD), kind)
    for name, shape in (extra or {}).items():
        add(name, shape, "F32")
    add("output_norm.weight", (WIDTH,), "F32")
    add("output.weight", (VOCABULARY, WIDTH), "Q8_0")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "small.gguf")
