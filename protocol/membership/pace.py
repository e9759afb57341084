"""How often each peer is probed, and when a sample serves both ends of a link.

Rates: up to 4 nodes everybody is probed every second; up to 64 two peers a second in all, and more where a peer would
wait longer than ``SETTLED_INTERVAL_US`` (the peer's own probe counts when an echo measured this end, too, so half of them
are sent by others); above, one a second over its connections. So every node is
probed at least once a second by somebody, and it is the first failed probe that starts everybody else's: more probes only
cost. A link whose RTT has not settled is probed as soon as a sample may settle it. Above 64 the nearest peers are measured
more often, to keep their RTT settled.
"""

from collections.abc import Iterable

from protocol.beat import BEAT_US
from protocol.ids import NodeId
from protocol.membership.ground import Ground

NEAREST_MEASURED = 8
SETTLED_INTERVAL_US = 20_000_000
"""An RTT counts as stale after 30 s: a lost datagram is sent again after a second or so, and unsettles no link."""
REQUESTED_INTERVAL_US = 5_000_000
REQUESTED_MAX = 64


class Pace:
    """See the module; ``Prober`` asks it."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._nearest: dict[NodeId, None] = {}
        self._out_of_step: set[NodeId] = set()

    def interval_us(self, target: NodeId) -> int:
        """Time between two probes of this target."""
        settings, nodes = self._ground.settings, self._ground.nodes
        if nodes <= settings.probe_everyone_up_to:
            return settings.probe_interval_us
        if self._ground.everyone_connects:
            spread_us = (nodes - 1) * 1_000_000 // settings.probes_per_second_max
            return max(settings.probe_interval_us, min(spread_us, SETTLED_INTERVAL_US))
        if not self.is_sampled(target):
            return REQUESTED_INTERVAL_US
        return max(1, len(self._ground.connections)) * settings.probe_interval_us

    def is_young(self, target: NodeId, now_us: int) -> bool:
        """Small meshes: the link has not settled yet."""
        link = self._ground.links.known(target)
        return self._ground.everyone_connects and link is not None and link.settles_in_us(now_us) is not None

    def disconnected(self, peer: NodeId) -> None:
        """What is known of its turn is void."""
        self._out_of_step.discard(peer)

    def is_sampled(self, target: NodeId) -> bool:
        """Large meshes: probed so rarely that its RTT does not stay settled."""
        return not (self._ground.everyone_connects or target in self._ground.requested or target in self._nearest)

    def request(self, targets: Iterable[NodeId]) -> None:
        """Measure these peers often although the mesh is large; replaces the set before, at most ``REQUESTED_MAX``."""
        ground = self._ground
        wanted = frozenset(sorted(target for target in targets if target != ground.node_id)[:REQUESTED_MAX])
        for peer in sorted(wanted - ground.requested):
            if ground.timers.deadline("probe", peer) is not None:
                ground.timers.set("probe", peer, ground.now_us + ground.jitter(REQUESTED_INTERVAL_US))
        ground.requested = wanted

    def measure_nearest(self) -> None:
        """Large meshes: keep the RTT to the nearest connected peers settled. Who is measured is left for a fifth, no less."""
        links = self._ground.links
        measured = [
            (rtt_us * (4 if peer in self._nearest else 5), peer)
            for peer in self._ground.connections
            if (link := links.known(peer)) is not None and (rtt_us := link.min_rtt_us()) is not None
        ]
        nearest = dict.fromkeys(peer for _, peer in sorted(measured)[:NEAREST_MEASURED])
        for peer in nearest:
            if peer not in self._nearest:
                self._ground.timers.advance("probe", peer, self._ground.random.randint(0, REQUESTED_INTERVAL_US))
        self._nearest = nearest

    def pause_us(self, target: NodeId, now_us: int) -> int:
        """Until the next probe, or until a sample may settle the link if that is sooner.

        The interval ± 10 %, half a beat less, which the wait for the beat adds. Links come up together, and seconds ± 10 %
        apart their probes would stay in step, and nobody be probed for seconds on end: the first pause of a settled link is
        any part of the interval, and those of a large mesh, a minute long, any part of twice the interval.
        """
        ground, interval_us = self._ground, self.interval_us(target)
        if self.is_sampled(target):
            return ground.jitter(2 * interval_us)
        pause_us = interval_us * 9 // 10 + ground.jitter(interval_us // 5) - BEAT_US // 2
        link, least_us = ground.links.known(target), ground.settings.probe_interval_us
        if link is None or not ground.everyone_connects or interval_us <= least_us:
            return pause_us
        settles_us = link.settles_in_us(now_us)
        if settles_us is not None:
            return min(pause_us, max(settles_us, least_us * 9 // 10 - BEAT_US // 2) + ground.jitter(least_us // 5))
        if target not in self._out_of_step:
            self._out_of_step.add(target)
            return ground.jitter(interval_us)
        return pause_us

    def wants_echo(self, target: NodeId, now_us: int) -> bool:
        """The target's probe is here: whether this node would probe it soon as well, or a sample may settle the link."""
        ground = self._ground
        entry, link = ground.table.get(target), ground.links.known(target)
        due_us = ground.timers.deadline("probe", target)
        if entry is None or not entry.live or link is None or due_us is None:
            return False
        if not ground.everyone_connects:
            return False
        settles_us = link.settles_in_us(now_us)
        return due_us - now_us <= self.interval_us(target) // 2 if settles_us is None else settles_us == 0
