"""Connections that were refused, told so that a flood of them neither fills the log nor pushes other events out.

The first of a reason is told at once, further ones as a number with the next one told, at most one line in ``EVERY_US`` and
reason. Every single one is counted in the metrics anyway.
"""

from collections import Counter

from stage_agent.journal import Journal

EVERY_US = 10_000_000


class Refusals:
    """Reasons are a bounded set of labels (``protocol.quic.interface.REASONS``)."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._told_us: dict[str, int] = {}
        self._untold: Counter[str] = Counter()

    def tell(self, reason: str, address: str, now_us: int) -> None:
        """A connection from ``address`` was refused."""
        told_us = self._told_us.get(reason)
        if told_us is not None and now_us - told_us < EVERY_US:
            self._untold[reason] += 1
            return
        self._told_us[reason] = now_us
        more = self._untold.pop(reason, 0)
        text = f"refused a connection from {address} ({reason})" + (
            f", and {more} more since the last line" if more else ""
        )
        self._journal.tell("connection_refused", text, "warning", reason=reason, more=more)
