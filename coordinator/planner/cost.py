"""What a stage costs per decoded token, and per prefill chunk (DESIGN §5). Integer microseconds, rounded up per layer.

``stage_us = max(Σ ⌈streamed / bandwidth⌉, Σ ⌈flops / compute⌉, observed · layers) + kv_touch + per_layer · layers +
per_stage``. The streamed bytes of layer 0 and of the last layer include the shared bytes *before* the ceiling. Each
node's three sums are prefix sums, so a span costs two subtractions; the search builds its matrices from the same
prefixes, and the finished plan is priced by the same method, so both always agree.

Models do not state their arithmetic. A decoded token does one multiply and one add per weight read, so a layer is
charged ``FLOPS_PER_STREAMED_BYTE`` for each streamed byte: exact at one byte per weight, an upper bound for wider types.
"""

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from coordinator.model.package import ModelPackage
from coordinator.planner.memory import ceil_div
from coordinator.planner.problem import Calibration
from coordinator.planner.transfer import MICROSECONDS
from coordinator.planner.trust import NodeSignals

Matrix = NDArray[np.int64]

FLOPS_PER_STREAMED_BYTE = 2
STAGE_US_LIMIT = 2**44
"""About 200 days per token: a stage slower than this is treated as unable to serve, which keeps sums inside int64."""


def streamed_bytes(model: ModelPackage) -> tuple[int, ...]:
    """Bytes read per decoded token by each layer, shared bytes added at the two ends."""
    streamed = [layer.streamed_bytes for layer in model.layers]
    streamed[0] += model.shared_first_bytes
    streamed[-1] += model.shared_last_bytes
    return tuple(streamed)


def resident_bytes(model: ModelPackage) -> tuple[int, ...]:
    """Bytes of every layer, shared bytes added at the two ends: what a prefill chunk reads once."""
    resident = [layer.weight_bytes for layer in model.layers]
    resident[0] += model.shared_first_bytes
    resident[-1] += model.shared_last_bytes
    return tuple(resident)


@dataclass(frozen=True, slots=True)
class StageTimes:
    """One node's prefix sums (µs) over the layers, capped at ``STAGE_US_LIMIT``; ``None`` bandwidth has no instance."""

    stream: tuple[int, ...]
    compute: tuple[int, ...]
    prefill_stream: tuple[int, ...]
    observed_us_per_layer: int
    calibration: Calibration

    def overhead_us(self, layers: int) -> int:
        """What the engine adds to a stage of that many layers."""
        return self.calibration.kv_touch_us + self.calibration.per_layer_us * layers + self.calibration.per_stage_us

    def stage_us(self, start: int, end: int) -> int:
        """Time of one decoded token on layers ``[start, end)``."""
        layers = end - start
        work = max(
            self.stream[end] - self.stream[start],
            self.compute[end] - self.compute[start],
            self.observed_us_per_layer * layers,
        )
        return work + self.overhead_us(layers)

    def prefill_us(self, start: int, end: int, tokens: int) -> int:
        """Time of one prefill chunk: every weight is read once, arithmetic grows with the tokens.

        Without a known compute rate this is the memory-bound lower bound.
        """
        layers = end - start
        work = max(
            self.prefill_stream[end] - self.prefill_stream[start],
            (self.compute[end] - self.compute[start]) * tokens,
            self.observed_us_per_layer * layers,
        )
        return work + self.overhead_us(layers)

    def matrix(self) -> Matrix:
        """``[a, b]`` = ``stage_us(a, b)`` for ``a < b``; other entries are meaningless and masked by the caller."""
        count = len(self.stream)
        index = np.arange(count, dtype=np.int64)
        layers = index[None, :] - index[:, None]
        stream, compute = np.array(self.stream, dtype=np.int64), np.array(self.compute, dtype=np.int64)
        work = np.maximum(stream[None, :] - stream[:, None], compute[None, :] - compute[:, None])
        np.maximum(work, self.observed_us_per_layer * layers, out=work)
        constant = self.calibration.kv_touch_us + self.calibration.per_stage_us
        matrix: Matrix = work + self.calibration.per_layer_us * layers + constant
        return matrix

    @property
    def key(self) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """Nodes with equal keys cost the same on every span."""
        return (self.stream, self.compute, self.observed_us_per_layer)


def stage_times(model: ModelPackage, signals: NodeSignals, calibration: Calibration) -> StageTimes | None:
    """Prefix sums of one node, or ``None`` while its bandwidth is not known."""
    if signals.bandwidth_bytes_per_s is None:
        return None
    # bandwidth · efficiency / 1000, moved into the numerator so that nothing is rounded before the ceiling
    rate = signals.bandwidth_bytes_per_s * calibration.bandwidth_efficiency_milli
    compute = signals.compute_flops_per_s
    streamed = streamed_bytes(model)
    return StageTimes(
        stream=_prefix([ceil_div(size * MICROSECONDS * 1_000, rate) for size in streamed]),
        compute=_prefix(
            [0] * len(streamed)
            if compute is None
            else [ceil_div(size * FLOPS_PER_STREAMED_BYTE * MICROSECONDS, compute) for size in streamed]
        ),
        prefill_stream=_prefix([ceil_div(size * MICROSECONDS * 1_000, rate) for size in resident_bytes(model)]),
        observed_us_per_layer=min(signals.observed_us_per_layer or 0, STAGE_US_LIMIT),
        calibration=calibration,
    )


def _prefix(times: list[int]) -> tuple[int, ...]:
    return tuple(accumulate((min(time, STAGE_US_LIMIT) for time in times), initial=0))
