"""What is wrong with this node right now, as labels that its row carries, and how long a conflict is believed."""

LAG_HOLD_US = 30_000_000
"""A late loop is shown this long after its last sign, so that the label does not flicker."""
CONFLICT_REFRESHES = 5
"""A duplicate identity is believed until this many row refreshes passed without a new sign of it."""


class Conditions:
    """Labels: ``loop_lag``, ``datagrams_blocked``, ``link_degraded``, ``duplicate_identity``."""

    def __init__(self) -> None:
        self._lagged_us: int | None = None

    def lagged(self, now_us: int) -> None:
        """The loop was late."""
        self._lagged_us = now_us

    def labels(self, now_us: int, *, blocked: bool, degraded: bool, conflict: bool) -> tuple[str, ...]:
        """Constant names in a constant order."""
        lagging = self._lagged_us is not None and now_us - self._lagged_us < LAG_HOLD_US
        wrong = (
            ("loop_lag", lagging),
            ("datagrams_blocked", blocked),
            ("link_degraded", degraded),
            ("duplicate_identity", conflict),
        )
        return tuple(name for name, is_so in wrong if is_so)


def in_conflict(seen_us: int | None, row_refresh_us: int, now_us: int) -> bool:
    """Whether a conflict seen at that time still stands in a mesh that repeats its rows that often."""
    return seen_us is not None and now_us - seen_us < CONFLICT_REFRESHES * row_refresh_us
