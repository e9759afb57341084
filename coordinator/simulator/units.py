"""Outside units to inside units, once. Times round up, rates round down (never better than what was written)."""

from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal

BYTES_PER_MIB = 1_048_576
US_PER_MS = 1_000
US_PER_S = 1_000_000
FLOPS_PER_GFLOP = 1_000_000_000
BYTES_PER_S_PER_GBIT = 125_000_000


def ceil_us(value: Decimal, us_per_unit: int) -> int:
    """A duration in microseconds, rounded up. 0.0001 ms is 1 µs, 0 is 0."""
    return int((value * us_per_unit).to_integral_value(rounding=ROUND_CEILING))


def floor_rate(value: Decimal, per_unit: int) -> int:
    """A rate in bytes or operations per second, rounded down, at least 1 when it was positive."""
    rate = int((value * per_unit).to_integral_value(rounding=ROUND_FLOOR))
    return max(rate, 1) if value > 0 else rate


def milli(value: Decimal) -> int:
    """A ratio in thousandths, rounded to nearest; at least 1 when it was positive."""
    rounded = int((value * 1_000).to_integral_value())
    return max(rounded, 1) if value > 0 else rounded


def ceil_div(numerator: int, denominator: int) -> int:
    """⌈numerator / denominator⌉ for whole numbers, denominator > 0."""
    return -(-numerator // denominator)
