"""One beat for everything periodic: waking a process costs 0.1 to 0.3 ms of processor, however little it then does.

Whatever need not be punctual to better than half a second is done at the beat, so that many timers share one wake; what is
only looked at now and then shares every other beat, the slow one.
Every node has its own phase, from its id: the nodes of one machine share a clock and must not all wake at once.
"""

from zlib import crc32

from protocol.ids import NodeId

BEAT_US = 500_000
SLOW_BEAT_US = 2 * BEAT_US
EARLY_US = 2_000
"""Added to a wait for a certain moment. uvloop counts whole milliseconds of a time that it read a moment ago and wakes up
to 1.5 ms early: too early to do what is due, and then again and again until it is (five wakes for one deadline, once 59)."""


def phase_us(node_id: NodeId) -> int:
    """Of this node's beats, in [0, ``SLOW_BEAT_US``)."""
    return crc32(node_id.encode()) % SLOW_BEAT_US


def at_beat_us(moment_us: int, phase: int) -> int:
    """The first beat at or after ``moment_us`` of a clock in µs."""
    return moment_us + (phase - moment_us) % BEAT_US


def next_slow_beat_us(moment_us: int, phase: int) -> int:
    """The slow beat nearest to a second after ``moment_us``: half a second to one and a half later."""
    soonest_us = moment_us + SLOW_BEAT_US // 2
    return soonest_us + (phase - soonest_us) % SLOW_BEAT_US
