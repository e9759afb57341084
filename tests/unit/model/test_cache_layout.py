"""Attention caches, windows, shared caches and recurrent state, family by family."""

import pytest

from coordinator.model.windows import WINDOW_PATTERNS
from protocol.errors import ModelError
from tests.fixtures_model import architecture_package, gguf_bytes, metadata, package, tensors

ROW = 2 * 2 * 16 * 2  # keys and values, two heads of 16 values, f16


def rows(model):
    return [layer.kv_bytes_per_token for layer in model.layers]


def windows(model):
    return [layer.kv_window_tokens for layer in model.layers]


def states(model):
    return [layer.recurrent_bytes_per_sequence for layer in model.layers]


def test_grouped_query_attention_caches_only_its_key_value_heads():
    assert rows(architecture_package("llama", 4)) == [ROW] * 4


def test_without_key_value_heads_every_head_is_cached():
    assert rows(architecture_package("llama", 2, attention__head_count_kv=None)) == [2 * ROW] * 2


def test_stated_head_lengths_win_over_width_by_heads():
    model = architecture_package("qwen3", 2, attention__key_length=128, attention__value_length=96)
    assert rows(model) == [2 * (128 + 96) * 2] * 2


def test_layers_may_have_different_numbers_of_heads():
    model = architecture_package("deci", 4, attention__head_count_kv=[2, 0, 1, 2])
    assert rows(model) == [ROW, 0, ROW // 2, ROW]


@pytest.mark.parametrize(("cache_type", "expected"), [("f16", ROW), ("f32", 2 * ROW), ("q8_0", ROW * 34 // 64)])
def test_the_cache_type_scales_the_cache(cache_type, expected):
    assert rows(package(gguf_bytes(metadata(), tensors(4)), cache_type=cache_type)) == [expected] * 4


def test_latent_attention_caches_one_latent_row_and_no_values():
    model = architecture_package(
        "deepseek2", 3,
        attention__head_count_kv=1, attention__kv_lora_rank=512, rope__dimension_count=64,
        attention__key_length=576, attention__value_length=512,
        attention__key_length_mla=192, attention__value_length_mla=128,
    )  # fmt: skip
    assert rows(model) == [(512 + 64) * 2] * 3


def test_latent_attention_converted_the_old_way_caches_all_heads():
    model = architecture_package(
        "deepseek2", 2,
        attention__head_count_kv=4, attention__kv_lora_rank=512, rope__dimension_count=64,
        attention__key_length=192, attention__value_length=128,
    )  # fmt: skip
    assert rows(model) == [4 * (192 + 128) * 2] * 2


def test_sparse_attention_caches_its_indexer_s_keys_too():
    model = architecture_package(
        "deepseek32", 2,
        attention__head_count_kv=1, attention__kv_lora_rank=512, rope__dimension_count=64,
        attention__key_length_mla=192, attention__indexer__key_length=128,
    )  # fmt: skip
    assert rows(model) == [(512 + 64 + 128) * 2] * 2


def test_an_indexer_beside_grouped_queries_is_cached_where_there_is_attention():
    model = architecture_package("novel", 2, attention__head_count_kv=[2, 0], attention__indexer__key_length=128)
    assert rows(model) == [ROW + 256, 0]


@pytest.mark.parametrize(
    ("architecture", "full"),
    [
        ("gemma3", [5, 11]),
        ("gemma2", [1, 3, 5, 7, 9, 11]),
        ("gpt-oss", [1, 3, 5, 7, 9, 11]),
        ("cohere2", [3, 7, 11]),
        ("olmo2", [3, 7, 11]),
        ("exaone4", [3, 7, 11]),
        ("llama4", [3, 7, 11]),
        ("plamo3", [7]),
        ("smallthinker", [0, 4, 8]),
    ],
)
def test_a_window_without_a_pattern_follows_the_architecture(architecture, full):
    model = architecture_package(architecture, 12, attention__sliding_window=512)
    assert [index for index, window in enumerate(windows(model)) if window is None] == full
    assert {window for window in windows(model) if window} == {512}
    assert rows(model) == [ROW] * 12


def test_gemma3n_has_its_own_pattern_and_shares_the_caches_behind_layer_20():
    model = architecture_package("gemma3n", 30, attention__sliding_window=512)
    assert [index for index, window in enumerate(windows(model)[:20]) if window is None] == [4, 9, 14, 19]
    assert rows(model) == [ROW] * 20 + [0] * 10


def test_architectures_with_a_fixed_window_need_no_key():
    assert windows(architecture_package("llama4", 4)) == [8192, 8192, 8192, None]
    assert windows(architecture_package("llama4", 4, attention__sliding_window=0)) == [None] * 4


def test_a_stated_pattern_wins():
    flags = [True, False, False, True]
    assert windows(
        architecture_package("gemma4", 4, attention__sliding_window=100, attention__sliding_window_pattern=flags)
    ) == [100, None, None, 100]
    assert windows(
        architecture_package("gemma3", 4, attention__sliding_window=100, attention__sliding_window_pattern=2)
    ) == [100, None, 100, None]
    assert (
        windows(architecture_package("gemma3", 4, attention__sliding_window=100, attention__sliding_window_pattern=0))
        == [100] * 4
    )


def test_a_layer_without_a_cache_has_no_window():
    model = architecture_package("gemma3", 2, attention__sliding_window=100, attention__head_count_kv=[0, 2])
    assert windows(model) == [None, 100]


def test_a_pattern_of_the_wrong_length_is_refused():
    with pytest.raises(ModelError, match=r"sliding_window_pattern has 3 entries for 4 layers"):
        architecture_package(
            "gemma4", 4, attention__sliding_window=100, attention__sliding_window_pattern=[True, False, True]
        )


def test_an_unknown_architecture_s_window_is_not_trusted():
    model = architecture_package("phi3", 4, attention__sliding_window=2047)
    assert windows(model) == [None] * 4
    assert model.diagnostics == ("sliding_window_ignored",)


def test_windowed_layers_may_have_their_own_head_lengths():
    model = architecture_package(
        "gemma4", 2,
        attention__sliding_window=100, attention__sliding_window_pattern=[True, False],
        attention__key_length=64, attention__value_length=64,
        attention__key_length_swa=32, attention__value_length_swa=16,
    )  # fmt: skip
    assert rows(model) == [2 * (32 + 16) * 2, 2 * (64 + 64) * 2]


def test_no_cut_may_part_a_layer_from_the_cache_it_reuses():
    model = architecture_package(
        "gemma4", 8,
        attention__sliding_window=100, attention__sliding_window_pattern=[True, True, False, True, False, True, True, False],
        attention__shared_kv_layers=3,
    )  # fmt: skip
    assert rows(model) == [ROW] * 5 + [0] * 3
    # Layers 5 and 6 slide and read layer 3's cache, layer 7 is full and reads layer 4's.
    assert [boundary.layer for boundary in model.forbidden_boundaries] == [4, 5, 6, 7]
    assert {boundary.reason for boundary in model.forbidden_boundaries} == {"shared_kv_region"}


def test_a_shared_region_of_one_kind_begins_at_its_own_source():
    model = architecture_package("gemma4", 6, attention__shared_kv_layers=2)
    assert [boundary.layer for boundary in model.forbidden_boundaries] == [4, 5]


def test_nothing_is_forbidden_without_shared_caches():
    assert architecture_package("llama", 4).forbidden_boundaries == ()


def test_more_shared_layers_than_layers_are_refused():
    with pytest.raises(ModelError, match=r"shared_kv_layers is 4, outside 0 to 3"):
        architecture_package("gemma4", 4, attention__shared_kv_layers=4)


STATE_SPACE = {"ssm__conv_kernel": 4, "ssm__inner_size": 128, "ssm__state_size": 16, "ssm__group_count": 2}
STATE = (3 * (128 + 2 * 2 * 16) + 16 * 128) * 4


def test_a_state_space_model_has_state_and_no_cache():
    model = architecture_package("mamba2", 3, **STATE_SPACE, attention__head_count=0, attention__head_count_kv=None)
    assert rows(model) == [0] * 3
    assert states(model) == [STATE] * 3


def test_the_first_mamba_has_no_groups():
    facts = {**STATE_SPACE, "ssm__group_count": None}
    assert states(architecture_package("mamba", 1, **facts)) == [(3 * 128 + 16 * 128) * 4]


def test_a_hybrid_keeps_state_where_it_has_no_heads():
    model = architecture_package("jamba", 4, **STATE_SPACE, attention__head_count_kv=[0, 2, 0, 0])
    assert rows(model) == [0, ROW, 0, 0]
    assert states(model) == [STATE, 0, STATE, STATE]


def test_nemotron_h_tells_state_layers_from_plain_feed_forward_layers():
    model = architecture_package(
        "nemotron_h", 4, **STATE_SPACE, attention__head_count_kv=[0, 2, 0, 0], feed_forward_length=[0, 0, 256, 0]
    )
    assert states(model) == [STATE, 0, 0, STATE]
    assert rows(model) == [0, ROW, 0, 0]


def test_falcon_h1_keeps_both_in_every_layer():
    model = architecture_package("falcon-h1", 2, **STATE_SPACE)
    assert (rows(model), states(model)) == ([ROW] * 2, [STATE] * 2)


def test_every_fourth_layer_of_qwen3next_attends():
    model = architecture_package("qwen3next", 8, **STATE_SPACE)
    assert rows(model) == [0, 0, 0, ROW] * 2
    assert states(model) == [STATE, STATE, STATE, 0] * 2


def test_a_stated_interval_or_list_of_recurrent_layers_wins():
    assert states(architecture_package("qwen35", 4, **STATE_SPACE, full_attention_interval=2)) == [STATE, 0, STATE, 0]
    listed = architecture_package("qwen35moe", 3, **STATE_SPACE, attention__recurrent_layers=[False, True, True])
    assert (states(listed), rows(listed)) == ([0, STATE, STATE], [ROW, 0, 0])


def test_draft_layers_of_a_hybrid_keep_nothing():
    model = architecture_package("qwen35", 5, **STATE_SPACE, nextn_predict_layers=1)
    assert states(model) == [STATE, STATE, STATE, 0, 0]
    assert rows(model) == [0, 0, 0, ROW, 0]


def test_an_unknown_hybrid_keeps_room_for_both():
    model = architecture_package("novel", 2, **STATE_SPACE)
    assert (rows(model), states(model)) == ([ROW] * 2, [STATE] * 2)


def test_rwkv_keeps_shifted_tokens_and_a_matrix_per_head():
    facts = {"attention__head_count": 0, "attention__head_count_kv": None, "wkv__head_size": 16}
    assert states(architecture_package("rwkv7", 2, **facts)) == [(2 * 64 + 64 * 16) * 4] * 2
    assert states(architecture_package("arwkv7", 1, **facts, token_shift_count=1)) == [(64 + 64 * 16) * 4]


def test_kimi_linear_keeps_a_matrix_per_head_and_three_convolutions():
    model = architecture_package(
        "kimi-linear", 4,
        ssm__conv_kernel=4, kda__head_dim=16, attention__head_count_kv=[0, 0, 0, 1],
        attention__kv_lora_rank=32, rope__dimension_count=8, attention__key_length_mla=24,
    )  # fmt: skip
    state = (3 * 3 * 4 * 16 + 16 * 16 * 4) * 4
    assert states(model) == [state, state, state, 0]
    assert rows(model) == [0, 0, 0, (32 + 8) * 2]


def test_lfm2_keeps_a_short_convolution():
    model = architecture_package("lfm2", 3, shortconv__l_cache=3, attention__head_count_kv=[0, 2, 0])
    assert states(model) == [64 * 2 * 4, 0, 64 * 2 * 4]
    assert rows(model) == [0, ROW, 0]


@pytest.mark.parametrize("missing", ["ssm__conv_kernel", "ssm__inner_size"])
def test_a_recurrent_model_without_its_state_s_dimensions_is_refused(missing):
    with pytest.raises(ModelError, match=missing.replace("__", ".") + " is missing"):
        architecture_package("mamba2", 2, **{**STATE_SPACE, missing: None})


def test_absurd_dimensions_are_refused_before_they_are_multiplied():
    with pytest.raises(ModelError, match=r"ssm.inner_size is 4294967295, outside"):
        architecture_package("mamba2", 2, **{**STATE_SPACE, "ssm__inner_size": 2**32 - 1})


def test_every_known_pattern_has_a_full_and_a_windowed_layer():
    for pattern in WINDOW_PATTERNS.values():
        assert pattern.period >= 2
