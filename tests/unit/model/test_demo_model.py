"""The demo's model: real, unequal, decodable, and read the same by the reference library."""

import gguf
import numpy as np
import pytest

from protocol.errors import StateError
from stage_agent.demo_model import DemoShape, write_demo_model
from stage_agent.model_source import open_model, tensor_extents


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_demo_model(tmp_path_factory.mktemp("demo") / "demo.gguf")


def decoded(path):
    """All weights as float32, by name, from our own extents."""
    weights = {}
    for extent in tensor_extents(path, 0, 10**6, True, True):
        raw = np.fromfile(extent.file, dtype=np.uint8, count=extent.nbytes, offset=extent.offset)
        kind = gguf.GGMLQuantizationType[extent.type]
        shape = tuple(reversed(extent.shape))
        values = (
            gguf.quants.dequantize(raw.reshape((*shape[:-1], -1)), kind)
            if extent.type == "Q8_0"
            else raw.view({"F32": np.float32, "F16": np.float16}[extent.type])
        )
        weights[extent.name] = np.asarray(values, dtype=np.float32).reshape(shape)
    return weights


def rms(values, weight, epsilon):
    return values / np.sqrt(np.mean(values * values, axis=-1, keepdims=True) + epsilon) * weight


def rotate(values, base):
    """Rotary embedding of neighbouring pairs; ``values``: positions × heads × length."""
    positions, _, length = values.shape
    angles = np.arange(positions)[:, None] * base ** (-np.arange(0, length, 2) / length)
    cosine, sine = np.cos(angles)[:, None, :], np.sin(angles)[:, None, :]
    even, odd = values[..., 0::2], values[..., 1::2]
    turned = np.empty_like(values)
    turned[..., 0::2], turned[..., 1::2] = even * cosine - odd * sine, even * sine + odd * cosine
    return turned


def logits(weights, tokens, shape):
    """A plain llama forward pass over the whole prompt."""
    hidden = weights["token_embd.weight"][tokens]
    mask = np.triu(np.full((len(tokens), len(tokens)), -np.inf), 1)
    for layer in range(shape.layers):
        block = {
            name: weights[f"blk.{layer}.{name}.weight"]
            for name in (
                "attn_norm",
                "attn_q",
                "attn_k",
                "attn_v",
                "attn_output",
                "ffn_norm",
                "ffn_gate",
                "ffn_up",
                "ffn_down",
            )
        }
        normed = rms(hidden, block["attn_norm"], shape.rms_epsilon)
        query, key, value = (
            (normed @ block[name].T).reshape(len(tokens), -1, shape.head_length)
            for name in ("attn_q", "attn_k", "attn_v")
        )
        query, key = rotate(query, shape.rope_base), rotate(key, shape.rope_base)
        key, value = (np.repeat(part, shape.heads // shape.kv_heads, axis=1) for part in (key, value))
        scores = np.einsum("qhd,khd->hqk", query, key) / np.sqrt(shape.head_length) + mask
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        scores /= scores.sum(axis=-1, keepdims=True)
        hidden = hidden + np.einsum("hqk,khd->qhd", scores, value).reshape(len(tokens), -1) @ block["attn_output"].T
        normed = rms(hidden, block["ffn_norm"], shape.rms_epsilon)
        gate = normed @ block["ffn_gate"].T
        hidden = hidden + (gate / (1 + np.exp(-gate)) * (normed @ block["ffn_up"].T)) @ block["ffn_down"].T
    return hidden, rms(hidden, weights["output_norm.weight"], shape.rms_epsilon) @ weights["token_embd.weight"].T


def test_it_has_enough_layers_of_unequal_size_and_tied_embeddings(path):
    package = open_model(path)
    assert (package.architecture, package.layer_count, package.tied_embeddings) == ("llama", 28, True)
    sizes = sorted({layer.weight_bytes for layer in package.layers})
    assert len(sizes) >= 3
    assert sizes[-1] > 2 * sizes[0]
    assert 24_000_000 <= path.stat().st_size <= 60_000_000
    assert package.diagnostics == ()


def test_the_reference_reader_finds_the_same_tensors_in_the_same_places(path):
    theirs = {
        tensor.name: (tensor.tensor_type.name, tuple(map(int, tensor.shape)), tensor.data_offset, int(tensor.n_bytes))
        for tensor in gguf.GGUFReader(path).tensors
    }
    ours = {
        extent.name: (extent.type, extent.shape, extent.offset, extent.nbytes)
        for extent in tensor_extents(path, 0, 28, True, True)
    }
    assert ours == theirs
    by_layer = [
        sum(entry[3] for name, entry in theirs.items() if name.startswith(f"blk.{layer}.")) for layer in range(28)
    ]
    assert [layer.weight_bytes for layer in open_model(path).layers] == by_layer
    assert {kind for kind, *_ in theirs.values()} == {"Q8_0", "F16", "F32"}


def test_a_llama_decoder_runs_it_and_stays_finite(path):
    shape = DemoShape()
    weights = decoded(path)
    tokens = [1, 300, 400, 500]
    written = []
    for _ in range(4):
        hidden, scores = logits(weights, tokens, shape)
        assert np.isfinite(scores).all()
        assert np.abs(hidden).max() < 1000  # far inside f16, which boundary frames use
        written.append(int(scores[-1].argmax()))
        tokens.append(written[-1])
    assert min(written) >= 259, "special and byte tokens are never the most likely"
    assert len(set(written)) >= 3, "the layers, not the tied embedding, choose the token"


def test_the_vocabulary_can_spell_anything(path):
    fields = gguf.GGUFReader(path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    assert len(tokens) == len(set(tokens)) == 1024
    assert tokens[:4] == ["<unk>", "<s>", "</s>", "<0x00>"]
    assert {"▁", "▁the", "a", "Z", "~", "<0xFF>"} <= set(tokens)
    assert fields["tokenizer.ggml.model"].contents() == "llama"
    assert (
        len(fields["tokenizer.ggml.scores"].contents()) == len(fields["tokenizer.ggml.token_type"].contents()) == 1024
    )


def test_the_same_seed_writes_the_same_bytes_and_another_seed_others(tmp_path):
    shape = DemoShape(layers=3)
    one, two, other = (
        write_demo_model(tmp_path / f"{name}.gguf", seed=seed, shape=shape).read_bytes()
        for name, seed in [("a", 5), ("b", 5), ("c", 6)]
    )
    assert one == two != other


def test_it_replaces_a_file_in_one_step_and_leaves_nothing_behind(tmp_path):
    path = tmp_path / "deep" / "demo.gguf"
    write_demo_model(path, layers=1)
    path.write_bytes(b"old")
    write_demo_model(path, layers=2)
    assert open_model(path).layer_count == 2
    assert [entry.name for entry in path.parent.iterdir()] == ["demo.gguf"]


def test_a_place_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match=r"cannot be written"):
        write_demo_model(tmp_path / "file" / "demo.gguf", layers=1)


def test_without_the_gguf_package_the_error_says_what_to_install(tmp_path, monkeypatch):
    import sys

    from protocol.errors import ConfigurationError

    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'stagemesh\[demo\]'"):
        write_demo_model(tmp_path / "demo.gguf")
