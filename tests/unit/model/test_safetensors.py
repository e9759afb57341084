"""Safetensors checkpoints: headers, index and configuration."""

import json
import struct

import pytest

from coordinator.model.safetensors_header import read_safetensors_header
from coordinator.model.safetensors_names import safetensors_role
from coordinator.model.source import MemorySource
from protocol.errors import ModelError
from stage_agent.model_source import open_model, tensor_extents
from tests.fixtures_model import safetensors_bytes

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
EMBEDDING = ("BF16", (100, 64), 12_800)


def entries(layers=2, head=True, prefix="model."):
    result = {f"{prefix}embed_tokens.weight": EMBEDDING}
    for layer in range(layers):
        result[f"{prefix}layers.{layer}.mlp.up_proj.weight"] = ("BF16", (64, 10 + layer), 128 * (10 + layer))
    result[f"{prefix}norm.weight"] = ("BF16", (64,), 128)
    if head:
        result["lm_head.weight"] = EMBEDDING
    return result


def write(directory, config=CONFIG, tensors=None):
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "model.safetensors").write_bytes(safetensors_bytes(entries() if tensors is None else tensors))
    return directory


def test_a_checkpoint_is_exact_by_layer_and_end(tmp_path):
    package = open_model(write(tmp_path))
    assert [layer.weight_bytes for layer in package.layers] == [1280, 1408]
    assert (package.shared_first_bytes, package.shared_last_bytes) == (12_800, 12_928)
    assert package.kv_bytes_per_token == 2 * 2 * 2 * 16 * 2
    assert (package.native_context_length, package.activation_frame_bytes) == (4096, 128)
    assert (package.architecture, package.tied_embeddings, package.name) == ("llama", False, tmp_path.name)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_any_of_its_files_names_the_checkpoint(tmp_path, name):
    assert open_model(write(tmp_path) / name) == open_model(tmp_path)


def test_without_a_head_the_embedding_is_charged_twice(tmp_path):
    package = open_model(write(tmp_path, tensors=entries(head=False)))
    assert package.tied_embeddings
    assert package.shared_last_bytes == 12_800 + 128
    names = [extent.name for extent in tensor_extents(tmp_path, 1, 2, False, True)]
    assert sorted(names) == ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight"]


def test_files_of_an_index_are_added_up_and_a_layer_may_straddle_two(tmp_path):
    tensors = entries()
    tensors["model.layers.0.mlp.down_proj.weight"] = ("F32", (10, 64), 2560)
    names = list(tensors)
    halves = {"a-00001-of-00002.safetensors": names[:2], "a-00002-of-00002.safetensors": names[2:]}
    for file, members in halves.items():
        (tmp_path / file).write_bytes(safetensors_bytes({name: tensors[name] for name in members}))
    weight_map = {name: file for file, members in halves.items() for name in members}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert open_model(tmp_path).layers[0].weight_bytes == 1280 + 2560
    weight_map["model.ghost"] = "a-00002-of-00002.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match=r"lacks tensor 'model.ghost'"):
        open_model(tmp_path)
    (tmp_path / "a-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"a-00002-of-00002.safetensors: no such file"):
        open_model(tmp_path)


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "x.bin", 7])
def test_an_index_may_only_name_files_beside_it(tmp_path, file):
    write(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"t": file}}))
    with pytest.raises(ModelError, match=r"not a file beside it"):
        open_model(tmp_path)


def test_experts_are_streamed_by_their_share(tmp_path):
    tensors = entries()
    for expert in range(4):
        tensors[f"model.layers.1.mlp.experts.{expert}.up_proj.weight"] = ("BF16", (10, 64), 1280)
    tensors["model.layers.1.mlp.shared_expert.up_proj.weight"] = ("BF16", (10, 64), 1280)
    package = open_model(write(tmp_path, {**CONFIG, "num_experts": 4, "num_experts_per_tok": 1}, tensors))
    assert package.layers[1].weight_bytes - package.layers[1].streamed_bytes == 3 * 1280


def test_a_multimodal_checkpoint_plans_its_language_model(tmp_path):
    tensors = entries(prefix="model.language_model.")
    tensors["model.visual.blocks.0.attn.qkv.weight"] = ("BF16", (64, 64), 8192)
    config = {"model_type": "qwen3_vl", "text_config": CONFIG, "vision_config": {"num_hidden_layers": 27}}
    package = open_model(write(tmp_path, config, tensors))
    assert package.layer_count == 2
    assert package.shared_first_bytes == 12_800 + 8192


def test_layers_behind_the_last_are_left_out(tmp_path):
    package = open_model(write(tmp_path, tensors=entries(layers=3)))
    assert package.layer_count == 2
    assert package.diagnostics == ("nextn_layers_ignored",)


def test_a_missing_layer_gives_the_average(tmp_path):
    package = open_model(write(tmp_path, {**CONFIG, "num_hidden_layers": 3}))
    assert [layer.weight_bytes for layer in package.layers] == [896] * 3
    assert package.diagnostics == ("layer_weights_uniform_fallback",)


def test_layer_types_say_what_each_layer_keeps(tmp_path):
    config = {
        **CONFIG,
        "num_hidden_layers": 4,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention", "linear_attention", "conv"],
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_conv_kernel_dim": 4, "conv_L_cache": 3,
    }  # fmt: skip
    layers = open_model(write(tmp_path, config, entries(layers=4))).layers
    assert [layer.kv_bytes_per_token for layer in layers] == [128, 128, 0, 0]
    assert [layer.kv_window_tokens for layer in layers] == [128, None, None, None]
    assert [layer.recurrent_bytes_per_sequence for layer in layers] == [0, 0, (3 * (32 + 32) + 4 * 64) * 4, 64 * 2 * 4]


def test_patterns_and_intervals_stand_in_for_layer_types(tmp_path):
    config = {**CONFIG, "num_hidden_layers": 4, "sliding_window": 128, "sliding_window_pattern": 2}
    assert [layer.kv_window_tokens for layer in open_model(write(tmp_path, config, entries(4))).layers] == [
        128,
        None,
    ] * 2
    config["use_sliding_window"] = False
    assert [layer.kv_window_tokens for layer in open_model(write(tmp_path, config, entries(4))).layers] == [None] * 4


def test_latent_attention_caches_one_row(tmp_path):
    package = open_model(write(tmp_path, {**CONFIG, "kv_lora_rank": 512, "qk_rope_head_dim": 64}))
    assert package.kv_bytes_per_token == 2 * 576 * 2


@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "num_attention_heads", "max_position_embeddings"])
def test_a_missing_memory_fact_is_refused_by_its_key(tmp_path, key):
    with pytest.raises(ModelError, match=f"config.json: {key} is missing"):
        open_model(write(tmp_path, {name: value for name, value in CONFIG.items() if name != key}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": 10**18}, "num_hidden_layers is 1000000000000000000"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"num_key_value_heads": True}, "num_key_value_heads is True"),
        ({"layer_types": ["full_attention"]}, "layer_types does not name the kind of each of 2 layers"),
        ({"layer_types": ["full_attention", "telepathy"]}, "unknown kind 'telepathy'"),
        ({"num_experts": 2, "num_experts_per_tok": 3}, "3 of only 2 experts"),
        ({"mamba_d_state": 16}, "not supported here; use its GGUF"),
    ],
)
def test_an_absurd_configuration_is_refused(tmp_path, change, words):
    with pytest.raises(ModelError) as caught:
        open_model(write(tmp_path, {**CONFIG, **change}))
    assert words in str(caught.value)


def one(dtype="F32", shape=(2, 2), offsets=(0, 16)):
    return json.dumps({"t": {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}}).encode()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "the file is empty"),
        (b"\x01\x02", "truncated"),
        (struct.pack("<Q", 2**63) + bytes(100), "not a safetensors file, or truncated"),
        (safetensors_bytes({}, header=b"[]"), "not an object"),
        (safetensors_bytes({}, header=b"{" * 50_000), "not valid JSON"),
        (safetensors_bytes({}, header=one("F33")) + bytes(16), "unknown type 'F33'"),
        (safetensors_bytes({}, header=one(shape=(-2, 2))) + bytes(16), "no valid shape"),
        (safetensors_bytes({}, header=one(shape=(2.5, 2))) + bytes(16), "no valid shape"),
        (safetensors_bytes({}, header=one(shape=(2**40, 2**40))) + bytes(16), "impossible shape"),
        (safetensors_bytes({}, header=one(offsets=(0, 15))) + bytes(16), "has 15 bytes, its shape needs 16"),
        (safetensors_bytes({}, header=one(offsets=(16, 0))) + bytes(16), "its shape needs 16"),
        (safetensors_bytes({}, header=one()) + bytes(15), "truncated: tensor 't' ends 1 bytes behind the end"),
        (safetensors_bytes({}, header=one()[:-1] + b',"u":' + one()[6:]) + bytes(16), "tensors 't' and 'u' overlap"),
        (safetensors_bytes({}, header=b'{"t": 5}'), "tensor 't' has no description"),
    ],
)
def test_a_hostile_header_is_refused(content, words):
    with pytest.raises(ModelError) as caught:
        read_safetensors_header(MemorySource(content), "m.safetensors")
    assert words in str(caught.value)


def test_every_truncation_of_a_header_is_refused():
    content = safetensors_bytes(entries())
    assert len(read_safetensors_header(MemorySource(content), "m").tensors) == 5
    for length in range(0, len(content), 7):
        with pytest.raises(ModelError):
            read_safetensors_header(MemorySource(content[:length]), "m")


@pytest.mark.parametrize(
    ("name", "layer", "end"),
    [
        ("transformer.h.3.attn.weight", 3, ""),
        ("gpt_neox.layers.1.mlp.weight", 1, ""),
        ("model.layers.0.input_layernorm.weight", 0, ""),
        ("transformer.ln_f.weight", None, "last"),
        ("lm_head.weight", None, "last"),
        ("transformer.wte.weight", None, "first"),
        ("vision_tower.encoder.layers.2.norm.weight", None, "first"),
        ("multi_modal_projector.linear_1.weight", None, "first"),
    ],
)
def test_names_of_many_families_find_their_stage(name, layer, end):
    role = safetensors_role(name, 4)
    assert role is not None
    assert role.layer == layer
    assert (role.first, role.last) == (end == "first", end == "last")
