"""The node's two clocks. Decisions use the monotonic one; the wall clock is only ever shown to people."""

import time
from datetime import UTC, datetime


def monotonic_us() -> int:
    """Microseconds that never go back and stand still while the machine sleeps."""
    return time.monotonic_ns() // 1_000


def wall_text() -> str:
    """Now, for people: ISO 8601 in UTC with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
