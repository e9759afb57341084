"""How long bytes take, in whole µs rounded up. Apart from ``cost``, whose arrays a node that never plans must not load."""

from coordinator.planner.memory import ceil_div

MICROSECONDS = 1_000_000


def transfer_us(payload_bytes: int, bytes_per_s: int | None) -> int:
    """⌈payload / bandwidth⌉; an unknown bandwidth costs nothing (DESIGN §5)."""
    if bytes_per_s is None:
        return 0
    return ceil_div(payload_bytes * MICROSECONDS, bytes_per_s)
