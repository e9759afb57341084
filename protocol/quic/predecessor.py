"""Is the process that a newcomer claims to follow really gone? Two processes with one key are told apart here.

A killed process says no goodbye: its connection stands until it is missed, and its successor must be let in at once. A
copied state directory (a cloned machine) looks just the same at first, only that the other process still lives. So when
a connection of another instance stands and was heard lately, the newcomer waits a moment while the standing connection is
made to answer; what it sends ``SETTLE_US`` after the newcomer came cannot have been under way before. If it answers, the
newcomer is a copy and is refused; if not, it takes over.
"""

from dataclasses import dataclass
from typing import Literal

from protocol.quic.session import Session

SILENT_US = 3_000_000
"""Probes come every second; a connection that was silent for longer gives way to a new one."""
SETTLE_US = 300_000
PATIENCE_US = 1_200_000
"""A living process answers within this, or the newcomer is let in."""


@dataclass(frozen=True, slots=True)
class Predecessor:
    """The standing session of another instance, and since when its successor waits."""

    session: Session
    since_us: int

    def verdict(self, now_us: int) -> Literal["wait", "alive", "silent"]:
        """Ask again every quarter of a second: each time, the standing connection is made to answer."""
        carrier = self.session.carrier
        if carrier.heard_us > self.since_us + SETTLE_US:
            return "alive"
        if now_us - carrier.heard_us >= SILENT_US or now_us - self.since_us >= PATIENCE_US:
            return "silent"
        carrier.keep_alive()
        return "wait"
