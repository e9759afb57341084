"""One beat for everything periodic: waking a process costs 0.1 to 0.3 ms of processor, however little it then does.

Whatever need not be punctual to better than a quarter of a second is done at the beat, so that many timers share one wake.
Every node has its own phase, from its id: the nodes of one machine share a clock and must not all wake at once.
"""

from zlib import crc32

from protocol.ids import NodeId

BEAT_US = 250_000


def phase_us(node_id: NodeId) -> int:
    """Of this node's beat, in [0, ``BEAT_US``)."""
    return crc32(node_id.encode()) % BEAT_US


def at_beat_us(moment_us: int, phase: int) -> int:
    """The first beat at or after ``moment_us`` of a clock in µs."""
    return moment_us + (phase - moment_us) % BEAT_US
