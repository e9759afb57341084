"""What a checkpoint's ``config.json`` says about caches and experts; nested ``text_config`` is looked through.

Names differ by family, so every fact has its aliases. Layer kinds come from ``layer_types`` when present, otherwise from
``sliding_window`` with ``sliding_window_pattern``, or from ``full_attention_interval``. Linear-attention layers need the
``linear_*`` dimensions; a recurrent family this module does not know is refused rather than planned without its state.
"""

from typing import Any

from config.cache_types import CacheType
from coordinator.model.facts import MAX_VALUE
from coordinator.model.package import Layer
from coordinator.model.tensor_types import cache_row_bytes
from protocol.errors import ModelError

_ALIASES: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_decoder_layers", "decoder_layers"),
    "width": ("hidden_size", "n_embd", "d_model"),
    "context": ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "experts": ("num_experts", "n_routed_experts", "num_local_experts"),
    "experts_used": ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "experts_per_token"),
}
_RECURRENT_MARKS = (
    "ssm_cfg",
    "state_size",
    "mamba_d_state",
    "ssm_state_size",
    "rwkv_version",
    "head_size",
    "mamba_state_dim",
)


class ConfigFacts:
    """Typed access to one ``config.json``; ``where`` names it in errors."""

    def __init__(self, document: dict[str, Any], where: str) -> None:
        self.where = where
        text = document.get("text_config")
        self._levels = [text, document] if isinstance(text, dict) else [document]
        kind = next((level["model_type"] for level in self._levels if isinstance(level.get("model_type"), str)), "")
        self.architecture: str = kind

    def value(self, key: str) -> Any:
        """The value of a key, the language model's level first; ``None`` when absent or null."""
        return next((level[key] for level in self._levels if level.get(key) is not None), None)

    def integer(self, fact: str, default: int | None = None, *, least: int = 1, most: int = MAX_VALUE) -> int:
        """A fact by its name in the alias table, or by its own key. Required unless a default is given."""
        keys = _ALIASES.get(fact, (fact,))
        key, value = next(((key, self.value(key)) for key in keys if self.value(key) is not None), (keys[0], None))
        if value is None:
            if default is not None:
                return default
            raise ModelError(f"{self.where}: {keys[0]} is missing; memory cannot be computed without it")
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ModelError(f"{self.where}: {key} is {value!r:.40}, not a whole number from {least} to {most}")
        return value

    def layer_kinds(self, layer_count: int) -> list[str]:
        """One of ``full_attention``, ``sliding_attention``, ``linear_attention``, ``conv`` … per layer."""
        stated = self.value("layer_types")
        if stated is not None:
            if (
                not isinstance(stated, list)
                or len(stated) != layer_count
                or not all(isinstance(k, str) for k in stated)
            ):
                raise ModelError(f"{self.where}: layer_types does not name the kind of each of {layer_count} layers")
            return stated
        if self.value("full_attention_interval") is not None:
            interval = self.integer("full_attention_interval")
            return ["linear_attention" if (index + 1) % interval else "full_attention" for index in range(layer_count)]
        period = self.integer("sliding_window_pattern", 0, least=0)
        if self.window() and period:
            return ["sliding_attention" if (index + 1) % period else "full_attention" for index in range(layer_count)]
        return ["full_attention"] * layer_count

    def window(self) -> int:
        """Sliding window in tokens; 0 = none."""
        if self.value("use_sliding_window") is False:
            return 0
        return self.integer("sliding_window", 0, least=0)

    def layer_caches(self, layer_count: int, cache_type: CacheType) -> list[Layer]:
        """Per layer a ``Layer`` without weights: cache per token, window, recurrent state."""
        window = self.window()
        caches = []
        for kind in self.layer_kinds(layer_count):
            if kind == "linear_attention":
                caches.append(Layer(0, 0, recurrent_bytes_per_sequence=self._linear_state_bytes()))
            elif kind == "conv":
                state = self.integer("width") * (self.integer("conv_L_cache") - 1) * 4
                caches.append(Layer(0, 0, recurrent_bytes_per_sequence=state))
            elif kind in {"full_attention", "sliding_attention", "chunked_attention", "attention"}:
                limit = (window or self.integer("attention_chunk_size", 0)) if kind[0] in "sc" else 0
                caches.append(Layer(0, 0, self._row_bytes(cache_type), limit or None))
            else:
                raise ModelError(f"{self.where}: layer_types has the unknown kind {kind!r:.40}")
        return caches

    def _row_bytes(self, cache_type: CacheType) -> int:
        if any(self.value(key) is not None for key in _RECURRENT_MARKS):
            raise ModelError(
                f"{self.where}: the recurrent family {self.architecture!r} is not supported here; use its GGUF"
            )
        if self.value("kv_lora_rank") is not None:
            return cache_row_bytes(cache_type, self.integer("kv_lora_rank") + self.integer("qk_rope_head_dim"))
        heads = self.integer("heads")
        length = self.integer("head_dim", max(self.integer("width") // heads, 1))
        return 2 * cache_row_bytes(cache_type, self.integer("kv_heads", heads) * length)

    def _linear_state_bytes(self) -> int:
        """Gated delta net: (kernel-1) · (2·key + value widths) + heads · key · value, F32."""
        key_length, value_length = self.integer("linear_key_head_dim"), self.integer("linear_value_head_dim")
        key_width = self.integer("linear_num_key_heads") * key_length
        value_heads = self.integer("linear_num_value_heads")
        convolution = (self.integer("linear_conv_kernel_dim") - 1) * (2 * key_width + value_heads * value_length)
        return (convolution + value_heads * key_length * value_length) * 4
