"""The decoder's arithmetic against the definition, written the slow way: one position at a time, in double precision."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from stage_agent.runtimes.reference.decoder import StageDecoder
from stage_agent.runtimes.reference.weights import StageWeights, read_stage
from tests.unit.runtimes.conftest import LAYERS

if TYPE_CHECKING:
    from collections.abc import Callable

TOKENS = (5, 300, 17, 300, 511, 0, 42, 9)


def weights(model: Path, start: int = 0, end: int = LAYERS) -> StageWeights:
    report: Callable[[int, int], None] = print
    return read_stage(model, start, end, first=start == 0, last=end == LAYERS, report=report, stopped=lambda: False)


def defined(model: StageWeights, tokens: tuple[int, ...]) -> np.ndarray:
    """Activations after the last layer for the last token: llama as its paper and GGUF's conventions define it."""
    size = model.dimensions
    keys: list[list[np.ndarray]] = [[] for _ in model.layers]
    values: list[list[np.ndarray]] = [[] for _ in model.layers]

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean() + size.rms_epsilon) * weight

    def rotated(head: np.ndarray, position: int) -> np.ndarray:
        pairs = head[0::2] + 1j * head[1::2]
        angles = position * size.rope_base ** (-np.arange(0, size.head_length, 2) / size.head_length)
        turned = pairs * np.exp(1j * angles)
        return np.stack([turned.real, turned.imag], axis=1).reshape(-1)

    hidden = np.zeros(size.width)
    for position, token in enumerate(tokens):
        assert model.embedding is not None
        hidden = model.embedding[token].astype(np.float64)
        for index, layer in enumerate(model.layers):
            x = norm(hidden, layer.attn_norm)
            split = lambda matrix, x=x: (matrix.astype(np.float64) @ x).reshape(-1, size.head_length)
            keys[index].append(np.array([rotated(head, position) for head in split(layer.attn_k)]))
            values[index].append(split(layer.attn_v))
            heads = []
            for number, query in enumerate(split(layer.attn_q)):
                shared = number // (size.heads // size.kv_heads)
                scores = np.array([rotated(query, position) @ key[shared] for key in keys[index]])
                weight = np.exp(scores / np.sqrt(size.head_length))
                heads.append(sum(w * v[shared] for w, v in zip(weight / weight.sum(), values[index], strict=True)))
            hidden = hidden + layer.attn_output @ np.concatenate(heads)
            x = norm(hidden, layer.ffn_norm)
            gate = layer.ffn_gate @ x
            hidden = hidden + layer.ffn_down @ (gate / (1 + np.exp(-gate)) * (layer.ffn_up @ x))
    return hidden


def test_activations_are_those_of_the_definition(model: Path) -> None:
    whole = weights(model)
    decoder = StageDecoder(whole)
    hidden = decoder.run(decoder.embed(TOKENS), 0, decoder.new_cache(0))
    assert hidden.dtype == np.float32
    np.testing.assert_allclose(hidden[-1], defined(whole, TOKENS), rtol=2e-4, atol=2e-4)


def test_the_prediction_is_the_head_applied_to_the_normed_last_position(model: Path) -> None:
    whole = weights(model)
    decoder = StageDecoder(whole)
    hidden = decoder.run(decoder.embed(TOKENS), 0, decoder.new_cache(0))
    last = defined(whole, TOKENS)
    assert whole.output is not None
    assert whole.output_norm is not None
    logits = whole.output @ (last / np.sqrt((last**2).mean() + 1e-5) * whole.output_norm)
    assert decoder.predict(hidden) == int(np.argmax(logits))


@pytest.mark.parametrize("cuts", [(1,), (3, 4), tuple(range(1, len(TOKENS)))])
def test_a_prompt_in_pieces_gives_the_activations_of_the_prompt_in_one(model: Path, cuts: tuple[int, ...]) -> None:
    decoder = StageDecoder(weights(model))
    whole = decoder.run(decoder.embed(TOKENS), 0, decoder.new_cache(0))
    cache = decoder.new_cache(0)
    hidden = whole[:0]
    for start, end in zip((0, *cuts), (*cuts, len(TOKENS)), strict=True):
        hidden = decoder.run(decoder.embed(TOKENS[start:end]), start, cache)
    np.testing.assert_allclose(hidden[-1], whole[-1], rtol=1e-4, atol=1e-4)
    assert cache.length == len(TOKENS)


def test_a_cache_grows_past_its_first_size_without_losing_anything(model: Path) -> None:
    decoder = StageDecoder(weights(model))
    long = tuple((7 * index) % 512 for index in range(150))
    whole = decoder.run(decoder.embed(long), 0, decoder.new_cache(0))
    cache = decoder.new_cache(0)
    for start in range(0, 150, 30):
        hidden = decoder.run(decoder.embed(long[start : start + 30]), start, cache)
    np.testing.assert_allclose(hidden[-1], whole[-1], rtol=1e-4, atol=1e-4)


def test_going_back_and_taking_another_turn_is_as_if_the_first_turn_never_was(model: Path) -> None:
    decoder = StageDecoder(weights(model))
    cache = decoder.new_cache(0)
    decoder.run(decoder.embed((*TOKENS, 1, 2, 3)), 0, cache)
    again = decoder.run(decoder.embed((77,)), 4, cache)
    fresh = decoder.new_cache(0)
    decoder.run(decoder.embed((*TOKENS, 1, 2, 3)[:4]), 0, fresh)
    expected = decoder.run(decoder.embed((77,)), 4, fresh)
    np.testing.assert_allclose(again, expected, rtol=1e-4, atol=1e-4)
    assert cache.length == 5


def test_stages_in_a_row_give_bit_for_bit_what_the_whole_model_gives(model: Path) -> None:
    whole = StageDecoder(weights(model))
    expected = whole.run(whole.embed(TOKENS), 0, whole.new_cache(0))
    hidden = whole.embed(TOKENS)
    for start, end in ((0, 1), (1, 4), (4, 6)):
        stage = StageDecoder(weights(model, start, end))
        hidden = np.frombuffer(stage.run(hidden, 0, stage.new_cache(0)).tobytes(), dtype="<f4").reshape(hidden.shape)
    np.testing.assert_array_equal(hidden, expected)
