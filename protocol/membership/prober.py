"""The failure detector: who is probed when, on which ways, and how far this node trusts itself.

One probe: a ping by datagram; after the timeout the same ping by stream (reliable, and over TLS where UDP is blocked) and
through up to three helpers; after the timeout once more the probe has failed. The timeout is four times the recent worst
RTT of the link, at least 500 ms, at most 2 s, times (1 + local health). Local health (Lifeguard) rises when this node
seems to be the culprit: a failed probe while nobody else was heard either, a refutation of its own death, a late loop.

An answer may be an *echo*: a ping of the answerer's own, if it would soon have sent one. Its answer gives the answerer a
sample and a sign of life, and four packets do what six did. An echo that is lost proves nothing; the probe comes in its turn.
"""

from dataclasses import dataclass, field
from typing import Literal

from protocol.ids import NodeId
from protocol.membership.dissemination import NOTHING, Fact
from protocol.membership.effects import Lane
from protocol.membership.ground import Ground
from protocol.membership.judge import Judge
from protocol.membership.pace import Pace
from protocol.membership.table import Entry
from protocol.messages import Ack, Gossip, Ping, PingRequest

CONFIRMS_MAX = 64
RELAYS_MAX = 256
RELAY_US = 5_000_000
"""A helper forgets what it was asked after this time."""
DATAGRAM_MISSES = 8
"""Consecutive probes answered by stream only, after which datagrams count as blocked on that path."""
DATAGRAM_RETRY_US = 30_000_000
PAUSE_US = 1_000_000
"""Probing rests this long after the last sign of a late loop."""
ECHO_US = 5_000_000
"""An echo that is not answered within this time says nothing any more."""


@dataclass(slots=True)
class Probe:
    """One probe under way."""

    target: NodeId
    sent_us: int
    timeout_us: int
    lane: Lane
    stage: Literal["direct", "indirect"] = "direct"
    stream_sent_us: int | None = None
    helpers: set[NodeId] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Relay:
    """A ping sent for somebody else."""

    requester: NodeId
    requester_seq: int
    target: NodeId
    until_us: int


class Prober:
    """Probes, acknowledgements, helpers, local health."""

    def __init__(self, ground: Ground, judge: Judge) -> None:
        self._ground = ground
        self._judge = judge
        self.pace = Pace(ground)
        self._probes: dict[int, Probe] = {}
        self._by_target: dict[NodeId, int] = {}
        self._relays: dict[int, Relay] = {}
        self._misses: dict[NodeId, int] = {}
        self._retry_us: dict[NodeId, int] = {}
        self._confirms: dict[int, Relay] = {}
        self._echoes: dict[NodeId, tuple[int, int]] = {}
        self._paused_until_us = 0
        self.health = 0

    @property
    def blocked(self) -> list[NodeId]:
        """Peers whose datagrams do not arrive although their stream works."""
        return list(self._retry_us)

    @property
    def outstanding(self) -> int:
        """Probes and relays under way; bounded by connections and ``RELAYS_MAX``."""
        return len(self._probes) + len(self._relays) + len(self._confirms)

    def confirm(self, entry: Entry, now_us: int) -> None:
        """A buried node showed a higher row by hearsay and is not connected here: can a helper reach it?"""
        ground = self._ground
        if entry.stash is None:
            return
        ground.timers.set("confirm", entry.node_id, now_us + ground.settings.anti_entropy_interval_us)
        if entry.node_id in ground.connections:
            return
        helpers = ground.connected_members()
        for helper in ground.random.sample(helpers, min(len(helpers), ground.settings.indirect_probes)):
            seq = self._seq()
            if len(self._confirms) >= CONFIRMS_MAX:
                self._confirms.pop(next(iter(self._confirms)))
            self._confirms[seq] = Relay(helper, seq, entry.node_id, now_us + RELAY_US)
            ground.send(helper, PingRequest(seq=seq, target=entry.node_id), "stream")

    def due(self, entry: Entry, now_us: int) -> None:
        """The probe timer of a member fired."""
        ground = self._ground
        if not entry.live:
            return
        connected = entry.node_id in ground.connections
        if not connected and not ground.everyone_connects and entry.state == "alive":
            return
        interval_us = self.pace.interval_us(entry.node_id)
        if now_us < self._paused_until_us:
            # Not a whole interval: a node that stalls every few seconds would then never measure anybody.
            soon_us = min(interval_us, 2 * ground.settings.probe_interval_us)
            if self.pace.is_young(entry.node_id, now_us):
                soon_us = ground.settings.probe_interval_us // 2
            ground.timers.set("probe", entry.node_id, self._paused_until_us + ground.jitter(soon_us))
            return
        pause_us = self.pace.pause_us(entry.node_id, now_us)
        ground.timers.set("probe", entry.node_id, ground.at_beat(now_us + pause_us))
        if entry.node_id not in self._by_target:
            self._start(entry, now_us, connected=connected)

    def timed_out(self, seq: int, now_us: int) -> None:
        """A stage of a probe ran out of time."""
        probe = self._probes.get(seq)
        entry = None if probe is None else self._ground.table.get(probe.target)
        if probe is None or entry is None or not entry.live:
            self._end(seq)
        elif probe.stage == "direct":
            self._ask_around(seq, probe, now_us)
        else:
            self._end(seq)
            self._failed(probe, entry, now_us)

    def on_ping(self, sender: NodeId, ping: Ping, lane: Lane, now_us: int, held_us: int) -> None:
        """Answer on the lane the ping came by, and measure the link with the same exchange if that is due here, too."""
        rests = lane == "stream" or now_us < self._paused_until_us or sender in self._by_target
        echo = 0 if rests or not self.pace.wants_echo(sender, now_us) else self._seq()
        if echo:
            self._echoes[sender] = echo, now_us
        gossip = self._gossip(sender)
        answer = Ack(seq=ping.seq, held_us=held_us, health=self.health, echo=echo, gossip=gossip)
        self._ground.send(sender, answer, lane)

    def on_ping_request(self, sender: NodeId, request: PingRequest, now_us: int) -> None:
        """Probe the target for somebody else, by stream: this must not fail for loss."""
        ground = self._ground
        self._relays = {seq: relay for seq, relay in self._relays.items() if relay.until_us > now_us}
        target = NodeId(request.target)
        if len(self._relays) >= RELAYS_MAX:
            ground.reject(sender, "relay_limit")
        elif target in ground.connections and target != sender:
            seq = self._seq()
            self._relays[seq] = Relay(sender, request.seq, target, now_us + RELAY_US)
            ground.send(target, Ping(seq=seq, gossip=NOTHING), "stream")

    def on_ack(self, sender: NodeId, ack: Ack, lane: Lane, now_us: int, arrived_us: int) -> Entry | None:
        """An answer: to a probe of ours, fetched by a helper, or to a relayed ping.

        Returns the entry of a buried node that a helper reached for ``confirm``.
        """
        confirm = self._confirms.pop(ack.seq, None)
        if confirm is not None:
            asked = confirm.requester == sender and ack.target == confirm.target
            return self._ground.table.get(confirm.target) if asked else None
        relay = self._relays.pop(ack.seq, None)
        if relay is not None and relay.target == sender and not ack.target:
            answer = Ack(seq=relay.requester_seq, target=sender, health=ack.health)
            self._ground.send(relay.requester, answer, "stream")
            return None
        probe = self._probes.get(ack.seq)
        if probe is None:
            self._echoed(sender, ack, lane, now_us, arrived_us)
        elif ack.target:
            self._vouched(ack, sender, probe, now_us)
        elif sender == probe.target:
            if ack.echo and lane == "datagram":
                held_us, gossip = now_us - arrived_us, self._gossip(sender)
                self._ground.send(sender, Ack(seq=ack.echo, held_us=held_us, health=self.health, gossip=gossip), lane)
            self._answered(ack, probe, lane, now_us, arrived_us)
        else:
            self._ground.reject(sender, "foreign_ack")
        return None

    def lagged(self, lag_us: int, now_us: int) -> None:
        """The loop was late: nothing under way proves anything, and this node rests."""
        for seq in list(self._probes):
            self._end(seq)
        self._echoes.clear()
        self.worse()
        self._paused_until_us = now_us + PAUSE_US
        self._judge.extend(lag_us + PAUSE_US, now_us)

    def worse(self) -> None:
        """This node has reason to distrust itself."""
        self.health = min(self._ground.settings.local_health_max, self.health + 1)

    def moved(self, peer: NodeId) -> None:
        """Another way to the peer: it starts with datagrams again."""
        self._misses.pop(peer, None)
        self._retry_us.pop(peer, None)

    def disconnected(self, peer: NodeId, now_us: int) -> None:
        """Ask others about it soon."""
        self.pace.disconnected(peer)
        self._echoes.pop(peer, None)
        self.moved(peer)
        seq = self._by_target.get(peer)
        if seq is not None:
            self._ground.timers.set("timeout", str(seq), now_us)
        elif (entry := self._ground.table.get(peer)) is not None and entry.live:
            self._ground.timers.set("probe", peer, now_us + self._ground.jitter(100_000))

    def _start(self, entry: Entry, now_us: int, *, connected: bool) -> None:
        target = entry.node_id
        seq = self._seq()
        lane: Lane = "stream" if self._retry_us.get(target, now_us) > now_us else "datagram"
        probe = Probe(target, now_us, self._timeout_us(target), lane)
        self._probes[seq], self._by_target[target] = probe, seq
        if not connected:
            self._ask_around(seq, probe, now_us)
            return
        self._ground.connections[target].probed_us = now_us
        if lane == "stream":
            probe.stream_sent_us = now_us
        elif target in self._retry_us:
            self._retry_us[target] = now_us + DATAGRAM_RETRY_US
        self._ground.timers.set("timeout", str(seq), now_us + probe.timeout_us)
        self._ground.send(target, Ping(seq=seq, gossip=self._gossip(target)), lane)

    def _ask_around(self, seq: int, probe: Probe, now_us: int) -> None:
        ground = self._ground
        probe.stage = "indirect"
        if probe.stream_sent_us is None:
            probe.stream_sent_us = now_us
            ground.send(probe.target, Ping(seq=seq, gossip=self._gossip(probe.target)), "stream")
        others = [peer for peer in ground.connected_members() if peer != probe.target]
        for helper in ground.random.sample(others, min(len(others), ground.settings.indirect_probes)):
            probe.helpers.add(helper)
            ground.send(helper, PingRequest(seq=seq, target=probe.target), "stream")
        ground.timers.set("timeout", str(seq), max(now_us, probe.sent_us + probe.timeout_us) + probe.timeout_us)

    def _failed(self, probe: Probe, entry: Entry, now_us: int) -> None:
        if entry.heard_us is not None and entry.heard_us >= probe.sent_us:
            return
        if probe.target not in self._ground.connections and not self._ground.everyone_connects:
            # The helpers probably had no connection either: that nobody answered says nothing.
            return
        others = (self._ground.table.get(peer) for peer in self._ground.connections if peer != probe.target)
        if not any(other is not None and (other.heard_us or 0) >= probe.sent_us for other in others):
            self.worse()
        self._judge.accuse(entry, probe.sent_us, now_us)

    def _answered(self, ack: Ack, probe: Probe, lane: Lane, now_us: int, arrived_us: int) -> None:
        self._end(ack.seq)
        self.health = max(0, self.health - 1)
        target = probe.target
        if lane == "datagram":
            self._misses.pop(target, None)
            self._retry_us.pop(target, None)
            self._measured(target, arrived_us - ack.held_us - probe.sent_us, now_us)
            return
        sent_us = probe.sent_us if probe.stream_sent_us is None else probe.stream_sent_us
        if probe.lane == "stream" or probe.stream_sent_us is None:
            # Datagrams are blocked or were never possible here: the stream is the path, and its minimum is honest.
            self._measured(target, arrived_us - ack.held_us - sent_us, now_us)
        misses = self._misses[target] = self._misses.get(target, 0) + 1
        if target in self._retry_us:
            return
        if misses >= DATAGRAM_MISSES:
            self._retry_us[target] = now_us + DATAGRAM_RETRY_US
        elif self._ground.everyone_connects:  # else a link would wait a whole interval for its sample
            soon_us = self._ground.settings.probe_interval_us
            self._ground.timers.set("probe", target, now_us + soon_us // 2 + self._ground.jitter(soon_us))

    def _echoed(self, sender: NodeId, ack: Ack, lane: Lane, now_us: int, arrived_us: int) -> None:
        """The answer to an answer of ours that was a ping, too: as good as a probe, and the next one waits its interval."""
        seq, sent_us = self._echoes.get(sender, (0, 0))
        if not ack.seq or ack.seq != seq or lane != "datagram" or ack.target:
            return
        del self._echoes[sender]
        if now_us - sent_us > ECHO_US:
            return
        self.health = max(0, self.health - 1)
        self.moved(sender)
        self._measured(sender, arrived_us - ack.held_us - sent_us, now_us)
        link, ground = self._ground.links.link(sender), self._ground
        if ground.timers.deadline("probe", sender) is not None and link.settled(now_us):
            ground.timers.set("probe", sender, ground.at_beat(now_us + self.pace.pause_us(sender, now_us)))

    def _vouched(self, ack: Ack, sender: NodeId, probe: Probe, now_us: int) -> None:
        if ack.target != probe.target or sender not in probe.helpers:
            self._ground.reject(sender, "foreign_ack")
            return
        self._end(ack.seq)
        self.health = max(0, self.health - 1)
        entry = self._ground.table.get(probe.target)
        if entry is not None:
            self._judge.vouched(entry, now_us)

    def _measured(self, target: NodeId, rtt_us: int, now_us: int) -> None:
        ground = self._ground
        entry = ground.table.get(target)
        if not ground.links.link(target).on_rtt(rtt_us, now_us):
            ground.reject(target, "rtt")
        elif ground.everyone_connects:
            if not ground.links.link(target).settled(now_us):
                ground.timers.set("probe", target, now_us + self.pace.pause_us(target, now_us))
        elif entry is not None and entry.row.coordinate is not None:
            ground.vivaldi.observe(rtt_us, entry.row.coordinate)

    def _end(self, seq: int) -> None:
        probe = self._probes.pop(seq, None)
        if probe is not None:
            self._by_target.pop(probe.target, None)
            self._ground.timers.cancel("timeout", str(seq))

    def _timeout_us(self, target: NodeId) -> int:
        settings = self._ground.settings
        link = self._ground.links.known(target)
        worst_us = None if link is None else link.p99_us()
        timeout_us = min(settings.probe_timeout_max_us, max(settings.probe_timeout_us, 4 * (worst_us or 0)))
        return timeout_us * (1 + self.health)

    def _gossip(self, peer: NodeId) -> Gossip:
        """What rides along; a suspect is always told that it is one."""
        ground = self._ground
        entry = ground.table.get(peer)
        first: list[Fact] = []
        if entry is not None and entry.state == "suspect":
            first.append(self._judge.accusation(entry, "suspect"))
        return ground.queue.take(peer, ground.nodes, len(ground.connections), first=first)

    def _seq(self) -> int:
        """Unguessable, so that nobody can answer a ping it did not get."""
        return self._ground.random.getrandbits(52)
