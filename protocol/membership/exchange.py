"""What arrives with gossip and what is pushed out: the conversation, part by part handed to those who judge it."""

from protocol.ids import NodeId
from protocol.membership.dissemination import NOTHING
from protocol.membership.ground import Ground
from protocol.membership.issuing import Issuer
from protocol.membership.judge import KNOCK_US, Judge
from protocol.membership.own import REFUTE_SPACING_US, OwnRow
from protocol.membership.prober import Prober
from protocol.membership.records import Records
from protocol.membership.table import Entry
from protocol.messages import DigestRequest, Gossip, GossipPush
from protocol.rows import Accusation

DIGEST_SPACING_US = 500_000
"""A node that joins a thousand comes to 80 connections in half a minute; a digest is 62 kB."""


class Exchange:
    """Timers ``push`` and ``sync``."""

    def __init__(
        self, ground: Ground, own: OwnRow, judge: Judge, prober: Prober, records: Records, issuer: Issuer
    ) -> None:
        self._ground = ground
        self._own = own
        self._judge = judge
        self._prober = prober
        self._records = records
        self._issuer = issuer
        self._digested_us = -DIGEST_SPACING_US
        self._shown: set[NodeId] = set()
        self._shown_version = own.version
        """Accusers that were answered with the row of this version."""

    def greet(self, peer: NodeId, now_us: int, *, fresh: bool) -> None:
        """A connection came up: own row, what is held against the peer, and (if ``fresh``) a digest.

        A digest of a large mesh is long: there only the smaller id of the two sends it, and to somebody it knows already
        at most every ``DIGEST_SPACING_US``. Connections come in dozens; gossip and ``sync`` tell the rest.
        """
        ground = self._ground
        if self._own.signed is None:
            return
        entry = ground.table.get(peer)
        accused = () if entry is None or entry.state != "dead" else (self._judge.accusation(entry, "dead"),)
        gossip = Gossip(rows=(self._own.signed,), accusations=accused)
        ground.send(peer, GossipPush(gossip=gossip), "stream")
        if not fresh:
            return
        due = entry is None or entry.state == "dead" or now_us - self._digested_us >= DIGEST_SPACING_US
        if ground.everyone_connects or (ground.node_id < peer and due):
            self._digested_us = now_us
            ground.send(peer, self._records.digest(peer), "stream")

    def knock(self, entry: Entry, now_us: int) -> None:
        """A dead node is connected: perhaps a cut has healed under the connection. Say who is here and what is believed."""
        ground = self._ground
        if entry.state == "dead" and entry.node_id in ground.connections:
            self.greet(entry.node_id, now_us, fresh=False)
            ground.timers.set("knock", entry.node_id, now_us + KNOCK_US + ground.jitter(KNOCK_US))

    def gossip(self, sender: NodeId, gossip: Gossip, now_us: int) -> None:
        """Take in every item; each stands alone. Admissions first: rows may depend on them."""
        if gossip is NOTHING:
            return
        for admission in gossip.admissions:
            self._records.on_admission(admission)
        for signed in gossip.rows:
            self._records.offer(signed, sender, now_us)
        asked: list[str | None] = []
        asked.extend(self._records.on_refutation(refutation, sender, now_us) for refutation in gossip.refutations)
        asked.extend(self._records.on_version(version, sender, now_us) for version in gossip.versions)
        self._records.ask(sender, list(dict.fromkeys(node_id for node_id in asked if node_id is not None)))
        for accusation in gossip.accusations:
            if accusation.node_id == self._ground.node_id:
                self._accused_myself(accusation, sender, now_us)
            else:
                self._judge.accused(accusation, sender, now_us)

    def digest(self, sender: NodeId, digest: DigestRequest, now_us: int) -> None:
        """Anti-entropy; a peer that believes this node dead gets its refutation."""
        if self._records.on_digest(sender, digest, now_us):
            self._refute(sender, now_us, dead=True)

    def push(self, now_us: int) -> None:
        """Tell a few random peers what is queued."""
        ground = self._ground
        ground.pushed_us = now_us
        peers = ground.connected_members()
        if not peers:
            ground.queue.clear()
        for peer in ground.random.sample(peers, min(len(peers), ground.settings.push_fanout)):
            gossip = ground.queue.take(peer, ground.nodes, len(peers))
            if gossip is not NOTHING:
                ground.send(peer, GossipPush(gossip=gossip), "datagram")

    def sync(self, now_us: int) -> None:
        """A digest to a random peer."""
        ground = self._ground
        interval_us = ground.settings.anti_entropy_interval_us
        ground.timers.set("sync", "", ground.at_beat(now_us + interval_us * 9 // 10 + ground.jitter(interval_us // 5)))
        if ground.connections:
            peer = ground.random.choice(list(ground.connections))
            ground.send(peer, self._records.digest(peer), "stream")

    def goodbye(self, now_us: int) -> None:
        """The last row, straight to everybody connected."""
        self._issuer.issue(now_us, status="left")
        assert self._own.signed is not None
        for peer in self._ground.connections:
            self._ground.send(peer, GossipPush(gossip=Gossip(rows=(self._own.signed,))), "stream")

    def _accused_myself(self, accusation: Accusation, sender: NodeId, now_us: int) -> None:
        if accusation.boot_counter != self._own.boot_counter:
            return
        if accusation.incarnation > self._own.incarnation:
            self._ground.reject(sender, "incarnation")
        elif accusation.incarnation == self._own.incarnation:
            self._prober.worse()
            self._refute(sender, now_us, dead=accusation.verdict == "dead")
        else:
            if accusation.verdict == "dead":
                self._outdo(sender, now_us)
            self._answer(sender)

    def _refute(self, sender: NodeId, now_us: int, *, dead: bool) -> None:
        """Raise the incarnation and tell everybody; who was declared dead must also show a higher row."""
        refutation = self._own.raise_incarnation(now_us)
        if refutation is None:
            self._answer(sender)
            return
        if dead:
            self._issuer.issue(now_us)
            refutation = self._own.sign_refutation()
        self._ground.queue.add("refutation", self._ground.node_id, refutation)
        self._answer(sender)

    def _outdo(self, accuser: NodeId, now_us: int) -> None:
        """Who insists on a death although it was shown the present row has that very row in the grave: issue a higher one.

        It happens because a suspicion is refuted without a new row: the row may be known to those who bury it afterwards.
        """
        if self._shown_version != self._own.version:
            self._shown.clear()
        elif accuser in self._shown and now_us - self._own.issued_us >= REFUTE_SPACING_US:
            self._issuer.issue(now_us)
            self._own.sign_refutation()
            self._shown.clear()
        self._shown_version = self._own.version
        self._shown.add(accuser)

    def _answer(self, peer: NodeId) -> None:
        """The present refutation and row, straight to one peer."""
        if self._own.refutation is not None and self._own.signed is not None:
            gossip = Gossip(refutations=(self._own.refutation,), rows=(self._own.signed,))
            self._ground.send(peer, GossipPush(gossip=gossip), "stream")
