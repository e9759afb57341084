"""llama.cpp's rule for which layer goes to which device, and the flags that make it place a plan exactly.

llama.cpp places ``N + 1`` units: the N blocks and, as the last one, the output layer. With ``-ngl g``, blocks before
``start = max(N + 1 - g, 0)`` stay on the head's CPU; unit j goes to the first device whose cumulative, normalised
``-ts`` share is greater than ``(j - start) / min(g, N + 1)``, in float32. So ``-ts`` must sum to the number of units:
the last entry is one more than its layers. Plain layer counts (sum N) always place at least one layer wrongly.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from config.cache_types import UNQUANTISED, CacheType

ALL_LAYERS = 999
"""Any number above every model's blocks."""
MAX_DEVICES = 16
"""``GGML_RPC_MAX_SERVERS``: more remote servers are refused by llama.cpp itself."""


@dataclass(frozen=True, slots=True)
class SplitFlags:
    """Values of ``-ngl`` and ``-ts`` (empty when every layer stays on the head's CPU)."""

    gpu_layers: int
    tensor_split: tuple[int, ...]

    def arguments(self) -> tuple[str, ...]:
        """As ``llama-server`` takes them."""
        split = ("-ts", ",".join(map(str, self.tensor_split))) if self.tensor_split else ()
        return ("-ngl", str(self.gpu_layers), "-sm", "layer", *split)


def split_flags(device_layers: Sequence[int], *, cpu_layers: int = 0) -> SplitFlags:
    """Flags that put the first ``cpu_layers`` blocks on the head's CPU and then ``device_layers`` on the devices in order.

    Counts are ≥ 0; the output layer goes to the last device, or stays on the CPU when there is none.
    """
    assert cpu_layers >= 0
    assert all(count >= 0 for count in device_layers), device_layers
    on_devices = sum(device_layers)
    if not on_devices:
        return SplitFlags(0, ())
    gpu_layers = on_devices + 1 if cpu_layers else ALL_LAYERS
    return SplitFlags(gpu_layers, (*device_layers[:-1], device_layers[-1] + 1))


def output_override(*, tied_embeddings: bool) -> str:
    """The ``-ot`` value that keeps the output layer on the head.

    Anchored: the pattern is searched for, and ``output.weight`` alone would match every ``attn_output.weight``.
    """
    return r"^token_embd\.weight$=CPU" if tied_embeddings else r"^output\.weight$=CPU"


def cache_flags(cache_type: CacheType) -> tuple[str, ...]:
    """The cache's element type as llama-server is told it; a quantised one needs flash attention."""
    attention = () if cache_type in UNQUANTISED else ("-fa", "on")
    return ("-ctk", cache_type, "-ctv", cache_type, *attention)
