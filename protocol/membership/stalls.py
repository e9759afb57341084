"""When this node itself stands still: nobody is accused for that time, probing rests, and what can be spared is shed.

A retransmission timer shorter than the lateness of the loop feeds on itself: every probe elicits acknowledgements, each of
which is late again. So a node that was more than a second late gives up connections until the rest can be served.
"""

from protocol.membership.conditions import Conditions
from protocol.membership.effects import CloseConnection
from protocol.membership.ground import Ground
from protocol.membership.prober import Prober

LATE_US = 200_000
"""A timer this late means that the loop stalled."""
SHED_LAG_US = 1_000_000
SHED_ABOVE = 16
"""Connections that a stalling node keeps in any case."""


class Stalls:
    """Told of every lateness, by whoever notices it first."""

    def __init__(self, ground: Ground, prober: Prober, conditions: Conditions, now_us: int) -> None:
        self._ground = ground
        self._prober = prober
        self._conditions = conditions
        self._shed_us = now_us - 2**40
        self._stalled_us = now_us - 2**40
        """When the latest stall ended."""

    def late(self, lag_us: int, now_us: int) -> None:
        """A timer ran so late. A stall that is told twice, by two timers that were due before it ended, counts once."""
        if lag_us > LATE_US and now_us - lag_us > self._stalled_us:
            self._stalled_us = now_us
            self._prober.lagged(lag_us, now_us)
            self._conditions.lagged(now_us)
        if lag_us > SHED_LAG_US and now_us - self._shed_us > 10 * SHED_LAG_US:
            ground = self._ground
            spare = max(0, len(ground.connections) - SHED_ABOVE)
            for peer in ground.random.sample(list(ground.connections), spare // 4):
                self._shed_us = now_us
                ground.effects.append(CloseConnection(peer, "loop_lag"))
