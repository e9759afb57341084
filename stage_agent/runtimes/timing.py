"""Steady decode timing: warm-up dropped, arithmetic mean of the first 256 samples, then an EWMA of weight 1/8.

The mean settles the value quickly and without the bias of an average that starts at its first sample; the EWMA then
follows changes (thermal throttling, a busy neighbour) within some tens of tokens. Nanoseconds inside, so that layers of
a few microseconds are not rounded away; µs per layer, rounded up, outside. Pure: the clock is an argument.
"""

from stage_agent.runtimes.interface import DecodeTiming

WARM_UP_SAMPLES = 8
MEAN_SAMPLES = 256
EWMA_DIVISOR = 8


class DecodeMeter:
    """Timings of one layer range. A new range needs a new meter."""

    def __init__(self, layer_count: int) -> None:
        assert layer_count >= 1, layer_count
        self._layer_count = layer_count
        self._warm_up_left = WARM_UP_SAMPLES
        self._samples = 0
        self._sum_ns = 0
        self._average_ns = 0
        self._newest_us = 0

    def record(self, elapsed_ns: int, now_us: int) -> None:
        """One decoded token took ``elapsed_ns`` ≥ 0 over all layers of the range."""
        assert elapsed_ns >= 0, elapsed_ns
        if self._warm_up_left:
            self._warm_up_left -= 1
            return
        self._samples += 1
        self._newest_us = now_us
        if self._samples <= MEAN_SAMPLES:
            self._sum_ns += elapsed_ns
            self._average_ns = self._sum_ns // self._samples
        else:
            self._average_ns += (elapsed_ns - self._average_ns) // EWMA_DIVISOR

    def timing(self, now_us: int) -> DecodeTiming | None:
        """The present value, ``None`` before the first sample after the warm-up."""
        if not self._samples:
            return None
        us_per_layer = -(-self._average_ns // (1_000 * self._layer_count))
        return DecodeTiming(us_per_layer, self._samples, max(0, now_us - self._newest_us))
