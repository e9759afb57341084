"""Rows and refutations coming in and going out: merging, announcements, digests and deltas.

A digest lists every version a node knows. Its receiver sends the rows that are newer here and asks for those that are newer
there; about nodes that are buried here but not there it sends the accusation instead of the row. Digests go to a random
peer every 10 s and to every new connection, so that a lost datagram costs seconds, never agreement.
"""

from dataclasses import dataclass

from protocol.errors import WireError
from protocol.ids import NodeId
from protocol.membership.admissions import Admissions
from protocol.membership.dialler import Dialler
from protocol.membership.dissemination import gather
from protocol.membership.effects import AdmissionLearned, Conflict, MemberChanged
from protocol.membership.ground import Ground
from protocol.membership.judge import Judge
from protocol.membership.own import OwnRow
from protocol.membership.signing import RowLabel, label_of, refutation_is_genuine
from protocol.membership.table import Entry
from protocol.messages import DigestRequest, Gossip, GossipPush, RowRequest, RowVersion
from protocol.rows import Accusation, Admission, NodeRow, Refutation, SignedRow

ROWS_PER_MESSAGE = 64
BYTES_PER_MESSAGE = 400_000
ASK_AGAIN_US = 1_000_000
WANTED_MAX = 1_024
UNCONNECTED_US = 5_000_000
PENDING_MAX = 256
"""Rows that arrived before the admission of their node."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    version: tuple[int, int]
    asked_us: int


class Records:
    """What is known of others, and the exchange of it."""

    def __init__(self, ground: Ground, judge: Judge, dialler: Dialler, own: OwnRow) -> None:
        self._ground = ground
        self.admissions = Admissions(ground)
        self._judge = judge
        self._dialler = dialler
        self._own = own
        self._wanted: dict[str, _Wanted] = {}
        self._pending: dict[NodeId, SignedRow] = {}
        self.conflict_us: int | None = None

    # -- rows -------------------------------------------------------------------------------------------------------

    def offer(self, signed: SignedRow, sender: NodeId, now_us: int, *, vouched: bool = False) -> None:
        """Merge one row that ``sender`` passed on (or is the owner of); ``vouched``: contact was made through a helper."""
        ground = self._ground
        if (holder := ground.table.holder(signed)) is not None:
            ground.queue.heard("row", holder.node_id, sender, ground.nodes, len(ground.connections))
            return
        try:
            label = label_of(signed)
        except WireError as error:
            ground.reject(sender, f"row_{error.reason}")
            return
        direct = vouched or sender == label.node_id
        if not self._worth_opening(label, direct=direct):
            return
        if label.node_id != ground.node_id and not ground.is_admitted(label.node_id):
            if len(self._pending) < PENDING_MAX:
                self._pending[label.node_id] = signed
            ground.reject(sender, "row_unadmitted")
            return
        try:
            row = ground.open_row(signed)
        except WireError as error:
            ground.reject(sender, f"row_{error.reason}")
            return
        self._wanted.pop(row.node_id, None)
        entry = ground.table.get(row.node_id)
        if row.node_id == ground.node_id:
            self._own_row_of_another(row, now_us)
        elif entry is None:
            self._newcomer(signed, row, sender, now_us, direct=direct)
        else:
            self._higher(entry, signed, row, sender, now_us, direct=direct)

    def on_version(self, version: RowVersion, sender: NodeId, now_us: int) -> str | None:
        """Somebody has such a row: its id if it should be asked for."""
        ground = self._ground
        if version.node_id == ground.node_id:
            return None
        if ground.table.agrees(version):
            ground.queue.heard("row", version.node_id, sender, ground.nodes, len(ground.connections))
            return None
        number = (version.boot_counter, version.seq)
        known = self._ground.table.known_version(version.node_id)
        if known is not None and number <= known and not self._grave_opens(version.node_id, sender, number):
            return None
        wanted = self._wanted.get(version.node_id)
        if wanted is not None and wanted.version >= number and now_us - wanted.asked_us < ASK_AGAIN_US:
            return None
        if wanted is None and len(self._wanted) >= WANTED_MAX:
            self._wanted.pop(next(iter(self._wanted)))
        self._wanted[version.node_id] = _Wanted(number, now_us)
        return version.node_id

    def ask(self, peer: NodeId, node_ids: list[str]) -> None:
        """Request rows, in as many messages as the bound demands."""
        for start in range(0, len(node_ids), 256):
            self._ground.send(peer, RowRequest(rows=tuple(node_ids[start : start + 256])), "stream")

    def on_request(self, sender: NodeId, request: RowRequest) -> None:
        """Send what is held of these nodes; the dead are not handed out."""
        rows = [signed for node_id in dict.fromkeys(request.rows) if (signed := self._held(node_id)) is not None]
        self._send_rows(sender, rows)

    def on_refutation(self, refutation: Refutation, sender: NodeId, now_us: int) -> str | None:
        """A node answers its accusers; its id if the row it names should be asked for."""
        ground = self._ground
        entry = ground.table.get(refutation.node_id)
        if entry is None:
            return None
        if (
            entry.live
            and entry.row.boot_counter == refutation.boot_counter
            and refutation.incarnation > entry.incarnation
        ):
            if not refutation_is_genuine(refutation, entry.row.public_key, ground.verify):
                ground.reject(sender, "refutation_signature")
                return None
            self._judge.refuted(entry, refutation, now_us)
        version = RowVersion(node_id=refutation.node_id, boot_counter=refutation.boot_counter, seq=refutation.seq)
        return self.on_version(version, sender, now_us)

    def vouched(self, entry: Entry, now_us: int) -> None:
        """A helper reached a node whose higher row is held back."""
        if entry.stash is not None:
            self.offer(entry.stash, entry.node_id, now_us, vouched=True)

    # -- digests ----------------------------------------------------------------------------------------------------

    def digest(self, peer: NodeId, *, reply: bool = False) -> DigestRequest:
        """Everything known here, own row and admissions included; and that ``peer`` was buried before this node began.

        It must answer that with a higher row, or it would not be let in before it happens to issue one.
        """
        table = self._ground.table
        lines = table.lines()
        if peer not in table and (floor := table.floor(peer)) is not None:
            lines.append(RowVersion(node_id=peer, boot_counter=floor[0], seq=floor[1], dead=True))
        if self._own.signed is not None:
            boot_counter, seq = self._own.version
            lines.append(RowVersion(node_id=self._ground.node_id, boot_counter=boot_counter, seq=seq))
        return DigestRequest(rows=tuple(lines[:4096]), admissions=self.admissions.lines()[:4096], reply=reply)

    def on_digest(self, sender: NodeId, digest: DigestRequest, now_us: int) -> bool:
        """Answer with what is newer here, ask for what is newer there; ``True`` if the sender thinks this node dead."""
        ground = self._ground
        same, news = ground.table.compare(digest.rows)
        listed = {line.node_id: line for line in news}
        rows: list[SignedRow] = []
        accusations: list[Accusation] = []
        for entry in ground.table if len(same) < len(ground.table) else ():
            if entry.node_id in same:
                continue
            line = listed.get(entry.node_id)
            if entry.state == "dead":
                if line is not None and not line.dead and (line.boot_counter, line.seq) <= entry.known_version:
                    accusations.append(self._judge.accusation(entry, "dead"))
            elif line is None or (line.boot_counter, line.seq) < entry.version:
                rows.append(entry.signed)
        mine = listed.get(ground.node_id)
        if self._own.signed is not None and (mine is None or (mine.boot_counter, mine.seq) < self._own.version):
            rows.append(self._own.signed)
        if accusations:
            ground.send(sender, GossipPush(gossip=Gossip(accusations=tuple(accusations[:64]))), "stream")
        self._send_rows(sender, rows)
        asked = [node_id for line in news if (node_id := self.on_version(line, sender, now_us)) is not None]
        self.ask(sender, asked)
        if self.admissions.exchange(sender, digest) and not digest.reply:
            ground.send(sender, self.digest(sender, reply=True), "stream")
        return mine is not None and mine.dead and mine.boot_counter == self._own.boot_counter

    # -- admissions -------------------------------------------------------------------------------------------------

    def admission(self, admission: Admission, told_by: NodeId | None, now_us: int) -> None:
        """The shell accepted this statement: keep it for digests, spread it, take in the row that waited for it."""
        node_id = NodeId(admission.node_id)
        news = self.admissions.keep(admission, told_by)
        if news and not admission.revoked and (signed := self._pending.pop(node_id, None)) is not None:
            self.offer(signed, told_by or self._ground.node_id, now_us)

    def on_admission(self, admission: Admission) -> None:
        """News from a peer, unless held already; the shell judges."""
        if self.admissions.is_news(admission):
            self._ground.effects.append(AdmissionLearned(admission))

    # -- merging ----------------------------------------------------------------------------------------------------

    def _worth_opening(self, label: RowLabel, *, direct: bool) -> bool:
        ground = self._ground
        if label.node_id == ground.node_id:
            return label.version[0] >= self._own.boot_counter and label.instance != self._own.instance
        known = ground.table.known_version(label.node_id)
        if known is None or label.version > known:
            return True
        entry = ground.table.get(label.node_id)
        if entry is None:
            return False
        if direct and entry.buried is not None and label.version > entry.buried:
            return True
        return label.version[0] == entry.row.boot_counter and label.instance != entry.row.instance

    def _grave_opens(self, node_id: str, sender: NodeId, version: tuple[int, int]) -> bool:
        entry = self._ground.table.get(node_id)
        return entry is not None and entry.buried is not None and sender == node_id and version > entry.buried

    def _own_row_of_another(self, row: NodeRow, now_us: int) -> None:
        self.conflict_us = now_us
        self._ground.effects.append(Conflict(self._ground.node_id, row.boot_counter))

    def _newcomer(self, signed: SignedRow, row: NodeRow, sender: NodeId, now_us: int, *, direct: bool) -> None:
        ground = self._ground
        version = (row.boot_counter, row.seq)
        floor = ground.table.floor(row.node_id)
        if floor is not None and (version <= floor or not direct):
            ground.reject(sender, "row_buried")
        elif row.status == "left":
            ground.table.keep_out(row.node_id, version)
        elif ground.table.full:
            ground.reject(sender, "table_full")
        else:
            entry = ground.table.add(signed, row, now_us)
            ground.effects.append(MemberChanged(entry.node_id, None, "alive", "joined"))
            if direct:
                entry.heard_us = now_us
            connected = entry.node_id in ground.connections
            if connected or ground.everyone_connects:
                # A connection comes first; without one, helpers are asked.
                at_us = now_us + ground.jitter(ground.settings.probe_interval_us)
                ground.timers.set("probe", entry.node_id, at_us if connected else at_us + UNCONNECTED_US)
            self._spread(entry, sender)
            self._dialler.learnt(entry, now_us)

    def _higher(
        self, entry: Entry, signed: SignedRow, row: NodeRow, sender: NodeId, now_us: int, *, direct: bool
    ) -> None:
        ground = self._ground
        same_boot = row.boot_counter == entry.row.boot_counter
        if same_boot and row.instance != entry.row.instance:
            if entry.conflict_us is None:
                ground.effects.append(Conflict(entry.node_id, row.boot_counter))
            entry.conflict_us = now_us
        version = (row.boot_counter, row.seq)
        if entry.buried is not None:
            self._at_the_grave(entry, signed, row, sender, now_us, direct=direct)
        elif version > entry.version:
            restarted = not same_boot
            raised = restarted or row.incarnation > entry.incarnation
            news = ground.table.replace_row(entry, signed, row, now_us)
            if restarted:
                entry.flapped(now_us)
                entry.conflict_us = None
            self._spread(entry, sender, quiet=not (news or raised))
            if row.status == "left":
                self._judge.bury(entry, "left", "left", now_us)
            elif direct:
                self._judge.heard(entry, now_us)
            elif raised:
                self._judge.vouched(entry, now_us)

    def _at_the_grave(
        self, entry: Entry, signed: SignedRow, row: NodeRow, sender: NodeId, now_us: int, *, direct: bool
    ) -> None:
        ground = self._ground
        version = (row.boot_counter, row.seq)
        assert entry.buried is not None
        if version <= entry.buried:
            return
        if row.status == "left":
            if version > entry.version:
                ground.table.replace_row(entry, signed, row, now_us)
            self._judge.bury(entry, "left", "left", now_us)
            self._spread(entry, sender)
        elif direct:
            if version > entry.version:
                ground.table.replace_row(entry, signed, row, now_us)
            self._judge.returned(entry, now_us)
            if entry.node_id in ground.connections:
                entry.heard_us = now_us
            self._spread(entry, sender)
            self._dialler.learnt(entry, now_us)
        else:
            ground.table.hold_back(entry, signed, version)
            self._dialler.learnt(entry, now_us)
            ground.timers.set("confirm", entry.node_id, now_us + ground.jitter(1_000_000))
            self.ask(entry.node_id, [entry.node_id])

    # -- sending ----------------------------------------------------------------------------------------------------

    def _held(self, node_id: str) -> SignedRow | None:
        if node_id == self._ground.node_id:
            return self._own.signed
        entry = self._ground.table.get(node_id)
        return None if entry is None or entry.state == "dead" else entry.signed

    def _spread(self, entry: Entry, sender: NodeId, *, quiet: bool = False) -> None:
        self._ground.spread_row(entry.signed, entry.node_id, entry.version, told_by=sender, quiet=quiet)

    def _send_rows(self, peer: NodeId, rows: list[SignedRow]) -> None:
        batch: list[SignedRow] = []
        size = 0
        for signed in rows:
            if batch and (len(batch) >= ROWS_PER_MESSAGE or size + len(signed.payload) > BYTES_PER_MESSAGE):
                self._ground.send(peer, GossipPush(gossip=gather(batch)), "stream")
                batch, size = [], 0
            batch.append(signed)
            size += len(signed.payload)
        if batch:
            self._ground.send(peer, GossipPush(gossip=gather(batch)), "stream")
