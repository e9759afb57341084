"""Who is alive: evidence against accusation.

Anything that arrives on a node's own authenticated connection is evidence of life, and nobody's word outweighs it. So an
accusation by a third party never kills a node that is connected here: it makes this node probe at once and counts as a
confirmation should that probe fail too. That is what keeps one half-cut node, which honestly believes that everybody else
is dead, from removing healthy nodes, and what stops its accusations from being passed on. Only where no connection exists
(meshes larger than ``max_connections``) is hearsay acted upon, as in plain SWIM, and two mourners are needed.

A suspect speaks up with a higher incarnation. The dead come back only by their own higher row and contact; for that they
are told that they were declared dead as soon as they connect, and again while the connection stands.
"""

from protocol.ids import NodeId
from protocol.membership.ground import Ground
from protocol.membership.suspicion import suspicion_us
from protocol.membership.table import Entry
from protocol.messages import Gossip, GossipPush
from protocol.rows import Accusation, Refutation

VERIFY_SPACING_US = 500_000
"""An accusation does not cause a probe if one was sent less than this ago."""
ACCUSERS_KEPT = 8
KNOCK_US = 3_000_000
"""A dead node whose connection still stands is told so this often: two nodes may each believe the other dead."""


class Judge:
    """States of the members and their suspicion timers."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground

    def heard(self, entry: Entry, now_us: int) -> None:
        """Direct evidence of life. The buried are heard only through ``Records``."""
        if not entry.live:
            return
        entry.heard_us = now_us
        if entry.accusers:
            entry.accusers.clear()
        if entry.state == "suspect":
            self._acquit(entry, "heard", now_us)

    def vouched(self, entry: Entry, now_us: int) -> None:
        """A helper that this node asked reached the suspect."""
        if entry.state == "suspect":
            self._acquit(entry, "vouched", now_us)

    def refuted(self, entry: Entry, refutation: Refutation, now_us: int) -> None:
        """A genuine refutation of the stored boot with a higher incarnation."""
        entry.incarnation, entry.refutation = refutation.incarnation, refutation
        self._ground.queue.add("refutation", entry.node_id, refutation)
        if entry.state == "suspect":
            self._acquit(entry, "refuted", now_us)

    def accuse(self, entry: Entry, silent_since_us: int, now_us: int) -> None:
        """This node's own probe failed on every way it knows."""
        if not entry.live:
            return
        ground = self._ground
        entry.accusers[ground.node_id] = silent_since_us
        if entry.state == "alive":
            ground.change(entry, "suspect", "probe_failed", now_us)
            entry.suspected_us = silent_since_us
        self._spread(self.accusation(entry, "suspect"), None)
        self._arm(entry, now_us)

    def accused(self, accusation: Accusation, sender: NodeId, now_us: int) -> None:
        """Somebody else's word about a third node."""
        ground = self._ground
        entry = ground.table.get(accusation.node_id)
        accuser = ground.table.get(accusation.accuser)
        if entry is None or not entry.live or accusation.boot_counter != entry.row.boot_counter:
            return
        if accuser is None or not accuser.live or accusation.accuser == accusation.node_id:
            ground.reject(sender, "accuser")
            return
        if accusation.incarnation < entry.incarnation:
            if entry.refutation is not None:
                ground.queue.add("refutation", entry.node_id, entry.refutation)
            return
        known = accuser.node_id in entry.accusers
        if known or len(entry.accusers) < ACCUSERS_KEPT:
            entry.accusers[accuser.node_id] = now_us
        if entry.node_id in ground.connections:
            self._verify(entry, now_us)
            if not known and not ground.everyone_connects:
                # Those who are not connected to it believe hearsay: it must hear of the accusation to refute it.
                ground.send(entry.node_id, GossipPush(gossip=Gossip(accusations=(accusation,))), "stream")
        else:
            self._believe(entry, accusation, sender, now_us, known=known)
        if entry.state == "suspect":
            self._arm(entry, now_us)

    def due(self, entry: Entry, now_us: int) -> None:
        """The suspicion timer of a suspect ran out."""
        if entry.state != "suspect":
            return
        witness = self._ground.node_id in entry.accusers
        self.bury(entry, "dead", "silent", now_us)
        if witness:
            # Who only heard of it must not be counted as another mourner.
            self._spread(self.accusation(entry, "dead"), None)

    def bury(self, entry: Entry, state: str, reason: str, now_us: int) -> None:
        """Declare dead or left; the tombstone timer starts."""
        assert state in {"dead", "left"}
        ground = self._ground
        ground.change(entry, "dead" if state == "dead" else "left", reason, now_us)
        ground.timers.cancel("suspect", entry.node_id)
        ground.timers.cancel("probe", entry.node_id)
        keep_us = ground.settings.tombstone_dead_us if state == "dead" else ground.settings.tombstone_left_us
        ground.timers.set("forget", entry.node_id, now_us + keep_us)
        ground.queue.drop("refutation", entry.node_id)
        if state == "dead":
            ground.timers.set("knock", entry.node_id, now_us + KNOCK_US)

    def returned(self, entry: Entry, now_us: int) -> None:
        """The rules of burial are met; the caller stored the higher row."""
        ground = self._ground
        if entry.state == "dead":
            entry.flapped(now_us)
        ground.change(entry, "alive", "returned", now_us)
        ground.timers.cancel("forget", entry.node_id)
        ground.timers.set("probe", entry.node_id, now_us + ground.jitter(ground.settings.probe_interval_us))

    def extend(self, lag_us: int, now_us: int) -> None:
        """This node did not listen for ``lag_us``: no suspect is the worse for it."""
        for entry in self._ground.table:
            if entry.suspected_us is not None:
                entry.suspected_us = min(now_us, entry.suspected_us + lag_us)
                self._arm(entry, now_us)

    def accusation(self, entry: Entry, verdict: str) -> Accusation:
        """This node's present word about the entry."""
        return Accusation(
            node_id=entry.node_id,
            boot_counter=entry.row.boot_counter,
            incarnation=entry.incarnation,
            verdict="dead" if verdict == "dead" else "suspect",
            accuser=self._ground.node_id,
        )

    def _verify(self, entry: Entry, now_us: int) -> None:
        connection = self._ground.connections[entry.node_id]
        if now_us - connection.probed_us >= VERIFY_SPACING_US:
            self._ground.timers.set("probe", entry.node_id, now_us)

    def _believe(self, entry: Entry, accusation: Accusation, sender: NodeId, now_us: int, *, known: bool) -> None:
        """Hearsay about a node that is not connected here."""
        ground = self._ground
        if entry.state == "alive":
            ground.change(entry, "suspect", "accused", now_us)
            entry.suspected_us = now_us
            ground.timers.set("probe", entry.node_id, now_us)
        if accusation.verdict == "dead" and not ground.everyone_connects:
            entry.mourners[NodeId(accusation.accuser)] = now_us
            if len(entry.mourners) >= 2:
                self.bury(entry, "dead", "mourned", now_us)
        if not known or not entry.live:
            self._spread(accusation, sender)

    def _acquit(self, entry: Entry, reason: str, now_us: int) -> None:
        ground = self._ground
        ground.change(entry, "alive", reason, now_us)
        ground.timers.cancel("suspect", entry.node_id)
        ground.queue.drop("accusation", f"{entry.node_id} {ground.node_id}")

    def _arm(self, entry: Entry, now_us: int) -> None:
        ground = self._ground
        if entry.suspected_us is not None:
            wait_us = suspicion_us(ground.settings, ground.nodes, len(entry.accusers))
            ground.timers.set("suspect", entry.node_id, max(now_us, entry.suspected_us + wait_us))

    def _spread(self, accusation: Accusation, told_by: NodeId | None) -> None:
        subject = f"{accusation.node_id} {accusation.accuser}"
        self._ground.queue.add("accusation", subject, accusation, told_by=told_by)
