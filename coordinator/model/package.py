"""``ModelPackage``: exact bytes per layer, the planner's only knowledge of a model (DESIGN §3).

Readers of GGUF files, layer packages and safetensors produce it; the scenario file may state it directly.
"""

from dataclasses import dataclass

from config.cache_types import DEFAULT_CACHE_TYPE, CacheType


@dataclass(frozen=True, slots=True)
class Layer:
    """One transformer block. All sizes in bytes, all ≥ 0."""

    weight_bytes: int
    """Resident weights."""
    streamed_bytes: int
    """Weights read for one decoded token: ``weight_bytes`` when dense, dense + shared + experts·used/count for MoE."""
    kv_bytes_per_token: int = 0
    """Attention cache per token of context and lane; 0 for recurrent layers and for layers that reuse another's cache."""
    kv_window_tokens: int | None = None
    """Sliding window: the cache never holds more tokens than this. ``None`` = grows with the context."""
    recurrent_bytes_per_sequence: int = 0
    """State of SSM, RWKV and linear-attention layers, per lane, independent of context."""


@dataclass(frozen=True, slots=True)
class ForbiddenBoundary:
    """No cut may fall before ``layer`` (1 ≤ layer < layer_count)."""

    layer: int
    reason: str


@dataclass(frozen=True, slots=True)
class ModelPackage:
    """What is placed. ``layers`` has one entry per block, in order; never empty."""

    name: str
    digest: str
    """SHA-256 (64 hex digits) that names the content."""
    layers: tuple[Layer, ...]
    shared_first_bytes: int
    """Embeddings; charged to the stage that owns layer 0."""
    shared_last_bytes: int
    """Output norm and head (with tied embeddings also their copy); charged to the stage that owns the last layer."""
    native_context_length: int
    activation_frame_bytes: int
    """One token's payload across a boundary."""
    activation_width: int | None = None
    forbidden_boundaries: tuple[ForbiddenBoundary, ...] = ()
    required_sideband_bytes: int = 0
    """Extra bytes per token across every boundary."""
    diagnostics: tuple[str, ...] = ()
    """Codes of what the reader had to assume, such as ``layer_weights_uniform_fallback``."""
    architecture: str = ""
    tied_embeddings: bool = False
    cache_type: CacheType = DEFAULT_CACHE_TYPE
    """What the layers' ``kv_bytes_per_token`` were computed for; the engine is told the same."""

    @property
    def layer_count(self) -> int:
        """How many blocks there are to place, at least 1."""
        return len(self.layers)

    @property
    def weight_bytes(self) -> int:
        """All resident weights, shared parts included."""
        return sum(layer.weight_bytes for layer in self.layers) + self.shared_first_bytes + self.shared_last_bytes

    @property
    def streamed_bytes(self) -> int:
        """Layer weights read for one decoded token, shared parts not included."""
        return sum(layer.streamed_bytes for layer in self.layers)

    @property
    def active_weight_fraction(self) -> float:
        """Share of the layers' resident bytes that one token reads: 1 = dense. For display; planning uses the bytes."""
        resident = sum(layer.weight_bytes for layer in self.layers)
        return self.streamed_bytes / resident if resident else 1.0

    @property
    def kv_bytes_per_token(self) -> int:
        """Cache growth per token over all layers."""
        return sum(layer.kv_bytes_per_token for layer in self.layers)
