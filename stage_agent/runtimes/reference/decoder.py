"""The llama forward pass over a stage's layers: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

All arithmetic is float32 and every operation sees the same shapes whether a model is split or not, so a split model gives
bit-identical activations and the same tokens. Rotation is that of GGUF's llama files: consecutive values form a pair.
"""

import numpy as np

from stage_agent.runtimes.reference.dequantise import Floats
from stage_agent.runtimes.reference.weights import LayerWeights, StageWeights

_FIRST_CAPACITY = 64


class SessionCache:
    """Keys and values of one session on one stage: per layer ``kv_heads × capacity × head_length``, grown by doubling."""

    def __init__(self, layers: int, kv_heads: int, head_length: int, sender_cache_epoch: int) -> None:
        self.length = 0
        self.sender_cache_epoch = sender_cache_epoch
        """The previous stage's: when it changes, that stage has rebuilt what this cache continues."""
        shape = (layers, 2, kv_heads, _FIRST_CAPACITY, head_length)
        self._store = np.zeros(shape, dtype=np.float32)

    def reserve(self, tokens: int) -> None:
        """Make room for ``tokens`` in all."""
        capacity = self._store.shape[3]
        if tokens > capacity:
            while capacity < tokens:
                capacity *= 2
            grown = np.zeros((*self._store.shape[:3], capacity, self._store.shape[4]), dtype=np.float32)
            grown[:, :, :, : self.length] = self._store[:, :, :, : self.length]
            self._store = grown

    def extend(self, layer: int, start: int, keys: Floats, values: Floats) -> tuple[Floats, Floats]:
        """Write ``tokens × kv_heads × head_length`` at ``start``; all keys and values up to there, per head."""
        end = start + len(keys)
        self._store[layer, 0, :, start:end] = keys.transpose(1, 0, 2)
        self._store[layer, 1, :, start:end] = values.transpose(1, 0, 2)
        return self._store[layer, 0, :, :end], self._store[layer, 1, :, :end]


class StageDecoder:
    """Runs one stage's layers. Not thread-safe; one thread at a time."""

    def __init__(self, weights: StageWeights) -> None:
        self._weights = weights
        self._dimensions = weights.dimensions
        steps = np.arange(0, weights.dimensions.rope_length, 2, dtype=np.float64)
        self._frequencies = weights.dimensions.rope_base ** (-steps / weights.dimensions.rope_length)
        if weights.rope_factors is not None:
            self._frequencies = self._frequencies / weights.rope_factors

    @property
    def width(self) -> int:
        """Values per token on a boundary."""
        return self._dimensions.width

    @property
    def layer_count(self) -> int:
        """Layers of this stage."""
        return len(self._weights.layers)

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding; 0 on stages without it."""
        return 0 if self._weights.embedding is None else len(self._weights.embedding)

    def new_cache(self, sender_cache_epoch: int) -> SessionCache:
        """An empty cache for a session."""
        dimensions = self._dimensions
        return SessionCache(self.layer_count, dimensions.kv_heads, dimensions.head_length, sender_cache_epoch)

    def embed(self, tokens: tuple[int, ...]) -> Floats:
        """First stage only; every token must be in the vocabulary."""
        assert self._weights.embedding is not None
        return self._weights.embedding[np.array(tokens, dtype=np.int64)]

    def run(self, hidden: Floats, start: int, cache: SessionCache) -> Floats:
        """``hidden`` (tokens × width) at positions from ``start`` through all layers; extends ``cache``."""
        cache.reserve(start + len(hidden))
        cosine, sine = self._angles(start, len(hidden))
        for index, layer in enumerate(self._weights.layers):
            normed = self._norm(hidden, layer.attn_norm)
            hidden = hidden + self._attend(index, layer, normed, start, cache, cosine, sine)
            normed = self._norm(hidden, layer.ffn_norm)
            gate = normed @ layer.ffn_gate.T
            # exp overflows to infinity for very negative gates, and gate / infinity is the right limit, 0
            with np.errstate(over="ignore"):
                activated: Floats = gate / (np.float32(1) + np.exp(-gate)) * (normed @ layer.ffn_up.T)
            hidden = hidden + activated @ layer.ffn_down.T
        cache.length = start + len(hidden)
        return hidden

    def predict(self, hidden: Floats) -> int:
        """Last stage only: the most likely token after the last position; the lowest id among equals."""
        assert self._weights.output is not None
        assert self._weights.output_norm is not None
        return int(np.argmax(self._norm(hidden[-1:], self._weights.output_norm) @ self._weights.output.T))

    def _norm(self, values: Floats, weight: Floats) -> Floats:
        mean_square: Floats = np.mean(values * values, axis=-1, keepdims=True, dtype=np.float32)
        normed: Floats = values / np.sqrt(mean_square + np.float32(self._dimensions.rms_epsilon)) * weight
        return normed

    def _attend(
        self,
        index: int,
        layer: LayerWeights,
        normed: Floats,
        start: int,
        cache: SessionCache,
        cosine: Floats,
        sine: Floats,
    ) -> Floats:
        tokens, heads, kv_heads = len(normed), self._dimensions.heads, self._dimensions.kv_heads
        length, group = self._dimensions.head_length, self._dimensions.heads // self._dimensions.kv_heads
        queries = self._rotate((normed @ layer.attn_q.T).reshape(tokens, heads, length), cosine, sine)
        keys = self._rotate((normed @ layer.attn_k.T).reshape(tokens, kv_heads, length), cosine, sine)
        values = (normed @ layer.attn_v.T).reshape(tokens, kv_heads, length)
        all_keys, all_values = cache.extend(index, start, keys, values)
        # kv_heads × (group · tokens) × length: the queries that share a key head, in one product
        grouped = queries.reshape(tokens, kv_heads, group, length).transpose(1, 2, 0, 3)
        scores = grouped.reshape(kv_heads, group * tokens, length) @ all_keys.transpose(0, 2, 1)
        scores = scores.reshape(kv_heads, group, tokens, -1) / np.float32(np.sqrt(length))
        if tokens > 1:
            later = np.arange(start + tokens)[None, :] > (start + np.arange(tokens))[:, None]
            scores = np.where(later, np.float32(-np.inf), scores)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights = weights / weights.sum(axis=-1, keepdims=True)
        mixed = weights.reshape(kv_heads, group * tokens, -1) @ all_values
        mixed = mixed.reshape(kv_heads, group, tokens, length).transpose(2, 0, 1, 3).reshape(tokens, heads * length)
        projected: Floats = mixed @ layer.attn_output.T
        return projected

    def _angles(self, start: int, count: int) -> tuple[Floats, Floats]:
        angles = (start + np.arange(count))[:, None] * self._frequencies[None, :]
        return np.cos(angles).astype(np.float32)[:, None, :], np.sin(angles).astype(np.float32)[:, None, :]

    def _rotate(self, values: Floats, cosine: Floats, sine: Floats) -> Floats:
        turned = values.copy()
        length = self._dimensions.rope_length
        even, odd = values[..., 0:length:2], values[..., 1:length:2]
        turned[..., 0:length:2] = even * cosine - odd * sine
        turned[..., 1:length:2] = even * sine + odd * cosine
        return turned
