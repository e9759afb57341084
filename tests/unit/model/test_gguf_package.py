"""Weights by layer and by end, experts, draft layers, and what is missing."""

import dataclasses

import pytest

from protocol.errors import ModelError
from tests.fixtures_model import F16, F32, Q4_K, Q8_0, TensorSpec, gguf_bytes, metadata, package, tensors

EMBEDDING = 64 * 100 * 2
NORM = 64 * 4
HEAD = 64 * 100 // 32 * 34


def model(specs, layers=4, **overrides):
    return package(gguf_bytes(metadata(layers=layers, **overrides), specs))


def test_every_layer_has_its_own_exact_bytes():
    layers = model(tensors(4, rows=[10, 20, 30, 40])).layers
    assert [layer.weight_bytes for layer in layers] == [rows * 64 * 4 + NORM for rows in (10, 20, 30, 40)]
    assert [layer.streamed_bytes for layer in layers] == [layer.weight_bytes for layer in layers]


def test_all_bytes_of_the_file_are_charged_exactly_once():
    specs = [*tensors(4), TensorSpec("rope_freqs.weight", (16,)), TensorSpec("per_layer_token_embd.weight", (64, 10))]
    assert model(specs).weight_bytes == sum(spec.nbytes for spec in specs)


def test_the_ends_carry_embeddings_and_head():
    package_ = model(tensors(4))
    assert package_.shared_first_bytes == EMBEDDING
    assert package_.shared_last_bytes == NORM + HEAD
    assert not package_.tied_embeddings


def test_tied_embeddings_are_charged_at_both_ends():
    package_ = model(tensors(4, head=False))
    assert package_.shared_first_bytes == EMBEDDING
    assert package_.shared_last_bytes == NORM + EMBEDDING
    assert package_.tied_embeddings


def test_a_bias_of_the_head_alone_is_no_head():
    assert model([*tensors(4, head=False), TensorSpec("output.bias", (100,))]).tied_embeddings


def test_a_tensor_named_like_the_head_inside_a_block_is_not_the_head():
    specs = tensors(4, head=False, per_layer=[TensorSpec("attn_output.weight", (64, 64))])
    assert model(specs).tied_embeddings


def test_the_frame_is_the_width_in_f16_or_in_what_the_engine_sends():
    content = gguf_bytes(metadata(), tensors(4))
    assert package(content).activation_frame_bytes == 128
    assert package(content, activation_value_bytes=4).activation_frame_bytes == 256
    assert package(content).activation_width == 64


EXPERTS = [
    TensorSpec("ffn_gate_inp.weight", (64, 8)),
    TensorSpec("ffn_up_exps.weight", (64, 30, 8), F32),
    TensorSpec("ffn_down_exps.weight", (32, 61, 8), Q8_0),
    TensorSpec("ffn_down_exps.scale", (1,), F16),
    TensorSpec("ffn_up_shexp.weight", (64, 30), F32),
]


def test_a_token_streams_the_dense_part_the_shared_expert_and_its_share_of_the_experts():
    package_ = model(tensors(2, per_layer=EXPERTS), layers=2, expert_count=8, expert_used_count=3)
    dense = 64 * 64 * 4 + NORM + 64 * 8 * 4 + 64 * 30 * 4
    experts = 64 * 30 * 8 * 4 + 61 * 8 * 34 + 2
    assert package_.layers[0].weight_bytes == dense + experts
    assert package_.layers[0].streamed_bytes == dense + -(-experts * 3 // 8)
    assert 0.3 < package_.active_weight_fraction < 0.6


def test_experts_stored_one_by_one_count_as_experts():
    specs = tensors(1, per_layer=[TensorSpec(f"ffn_up.{expert}.weight", (64, 16)) for expert in range(4)])
    layer = model(specs, layers=1, expert_count=4, expert_used_count=1).layers[0]
    assert layer.weight_bytes - layer.streamed_bytes == 3 * 64 * 16 * 4


def test_layers_may_differ_in_experts():
    specs = tensors(2, per_layer=EXPERTS)
    package_ = model(specs, layers=2, expert_count=[8, 8], expert_used_count=[2, 4])
    experts = 64 * 30 * 8 * 4 + 61 * 8 * 34 + 2
    assert package_.layers[1].streamed_bytes - package_.layers[0].streamed_bytes == -(-experts * 4 // 8) - -(
        -experts * 2 // 8
    )


def test_an_unknown_number_of_used_experts_counts_all_of_them():
    package_ = model(tensors(2, per_layer=EXPERTS), layers=2, expert_count=8)
    assert package_.layers[0].streamed_bytes == package_.layers[0].weight_bytes
    assert package_.diagnostics == ("expert_used_count_missing",)


def test_more_used_experts_than_experts_are_refused():
    with pytest.raises(ModelError, match=r"llama.expert_used_count is 9 of only 8 experts"):
        model(tensors(2, per_layer=EXPERTS), layers=2, expert_count=8, expert_used_count=9)


def test_a_gap_in_the_layer_indices_gives_every_layer_the_rounded_up_average():
    specs = [spec for spec in tensors(4, rows=[10, 20, 30, 41]) if not spec.name.startswith("blk.2.")]
    package_ = model([*specs, TensorSpec("blk.3.scale", (1,), F16)])
    total = (10 + 20 + 41) * 256 + 3 * NORM + 2
    assert [layer.weight_bytes for layer in package_.layers] == [-(-total // 4)] * 4
    assert package_.diagnostics == ("layer_weights_uniform_fallback",)


def test_layers_beyond_the_count_are_not_lost_but_averaged_in():
    package_ = model(tensors(5), layers=4)
    assert package_.layer_count == 4
    assert package_.layers[0].weight_bytes == -(-5 * (64 * 64 * 4 + NORM) // 4)
    assert "layer_weights_uniform_fallback" in package_.diagnostics


def test_draft_layers_are_resident_but_neither_streamed_nor_cached():
    package_ = model(tensors(4), nextn_predict_layers=1)
    assert package_.layers[3].weight_bytes == package_.layers[2].weight_bytes > 0
    assert (package_.layers[3].streamed_bytes, package_.layers[3].kv_bytes_per_token) == (0, 0)
    assert package_.layers[2].kv_bytes_per_token > 0
    assert package_.diagnostics == ("nextn_layers_not_streamed",)


def test_a_file_without_its_draft_layers_weights_is_still_exact():
    package_ = model(tensors(3, rows=[1, 2, 3]), nextn_predict_layers=1)
    assert [layer.weight_bytes for layer in package_.layers] == [256 + NORM, 512 + NORM, 768 + NORM, 0]
    assert package_.diagnostics == ("nextn_weights_absent",)


@pytest.mark.parametrize("key", ["block_count", "context_length", "embedding_length", "attention.head_count"])
def test_a_missing_memory_fact_is_refused_by_its_key(key):
    overrides = {key.replace(".", "__"): None}
    if key == "attention.head_count":
        overrides["attention__head_count_kv"] = None
    with pytest.raises(ModelError, match=f"llama.{key} is missing"):
        model(tensors(4), **overrides)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("block_count", 0, "llama.block_count is 0, outside 1 to 1024"),
        ("block_count", 2**31 - 1, "llama.block_count is 2147483647, outside"),
        ("block_count", "many", "llama.block_count is not a whole number"),
        ("block_count", True, "llama.block_count is not a whole number"),
        ("context_length", 4096.5, "llama.context_length is not a whole number"),
        ("embedding_length", 0, "llama.embedding_length is 0"),
        ("attention.head_count_kv", [2, 2], "llama.attention.head_count_kv has 2 entries for 4 layers"),
        ("attention.head_count_kv", [2, 2, -1, 2], "llama.attention.head_count_kv is -1"),
        ("nextn_predict_layers", 4, "llama.nextn_predict_layers is 4, outside 0 to 3"),
    ],
)
def test_an_absurd_fact_is_refused_by_its_key(key, value, words):
    with pytest.raises(ModelError) as caught:
        model(tensors(4), **{key.replace(".", "__"): value})
    assert words in str(caught.value)


def test_sizes_beyond_2_to_the_53_are_refused():
    with pytest.raises(ModelError, match=r"sizes beyond 2\^53 bytes"):
        model(
            tensors(16),
            layers=16,
            attention__head_count_kv=2**24,
            attention__key_length=2**24,
            attention__value_length=2**24,
        )


def test_a_file_without_an_architecture_is_refused():
    facts = metadata()
    del facts["general.architecture"]
    with pytest.raises(ModelError, match=r"general.architecture is missing"):
        package(gguf_bytes(facts, tensors(4)))


def test_an_architecture_that_is_no_name_is_refused_in_one_line():
    with pytest.raises(ModelError, match=r"general.architecture is 'lla\\nma', which names no model"):
        package(gguf_bytes({**metadata(), "general.architecture": "lla\nma"}, tensors(4)))


@pytest.mark.parametrize(
    ("facts", "specs", "words"),
    [
        (metadata(), [], "holds no tensors"),
        (metadata(), tensors(4)[1:], "token_embd.weight is missing"),
        (metadata(), [tensors(4)[0]], "holds no layer weights"),
        ({**metadata(), "general.type": "adapter"}, tensors(4), "holds 'adapter', not a language model"),
        (metadata("clip"), tensors(4), "holds 'clip', not a language model"),
    ],
)
def test_what_is_not_a_whole_language_model_is_refused(facts, specs, words):
    with pytest.raises(ModelError) as caught:
        package(gguf_bytes(facts, specs))
    assert words in str(caught.value)


def test_the_digest_names_the_content_and_not_the_cache_settings():
    content = gguf_bytes(metadata(), tensors(4))
    digest = package(content).digest
    assert len(digest) == 64
    assert package(content, cache_type="q8_0").digest == digest
    assert package(gguf_bytes(metadata(), tensors(4))).digest == digest


def test_two_trainings_with_equal_headers_have_different_digests():
    one = gguf_bytes(metadata(), tensors(4), fill=1)
    two = gguf_bytes(metadata(), tensors(4), fill=2)
    assert dataclasses.replace(package(one), digest="") == dataclasses.replace(package(two), digest="")
    assert package(one).digest != package(two).digest


def test_a_change_in_metadata_or_type_changes_the_digest():
    digests = {
        package(gguf_bytes(facts, specs)).digest
        for facts, specs in [
            (metadata(), tensors(4)),
            (metadata(context_length=8192), tensors(4)),
            (metadata(), [*tensors(4), TensorSpec("blk.0.x", (256,), Q4_K)]),
            (metadata(), [*tensors(4), TensorSpec("blk.0.x", (72,), F16)]),
        ]
    }
    assert len(digests) == 4


def test_multi_stream_and_per_layer_inputs_widen_the_wire():
    facts = metadata(
        "gemma3n", 25, altup__num_inputs=4, embedding_length_per_layer_input=16, attention__sliding_window=128
    )
    package_ = package(gguf_bytes(facts, tensors(25)))
    assert package_.activation_frame_bytes == 64 * 4 * 2
    assert package_.required_sideband_bytes == 16 * 25 * 2
