"""The replicated node table: one row per node, the highest version wins, and the dead stay dead.

A row is the property of its node. Merging compares ``(boot_counter, seq)`` and replaces the whole row. What differs from
a plain last-writer-wins map is burial: when a node is declared dead or says it left, its version is remembered, and only
a *higher row that the node itself brings* (the caller passes ``direct``) digs it out. Rows replayed by third parties are
held back, however new they are. A grave is forgotten after its tombstone time, but the version stays behind as a
``floor`` (bounded, oldest first), so that a machine which slept through the tombstone cannot bring the dead back either.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from protocol.ids import NodeId
from protocol.membership.effects import MemberState
from protocol.membership.news import is_news
from protocol.membership.signing import Version
from protocol.messages import RowVersion
from protocol.rows import NodeRow, Refutation, SignedRow

FLAPS_KEPT = 16
"""Latest returns from the dead (and restarts) that are remembered per node."""


@dataclass(slots=True)
class Entry:
    """One known node other than this one."""

    node_id: NodeId
    signed: SignedRow
    row: NodeRow
    received_us: int
    changed_us: int
    state: MemberState = "alive"
    incarnation: int = 0
    refutation: Refutation | None = None
    heard_us: int | None = None
    buried: Version | None = None
    held: Version | None = None
    conflict_us: int | None = None
    flaps: tuple[int, ...] = ()
    accusers: dict[NodeId, int] = field(default_factory=dict)
    mourners: dict[NodeId, int] = field(default_factory=dict)
    stash: SignedRow | None = None
    suspected_us: int | None = None

    version: Version = (0, 0)

    def __post_init__(self) -> None:
        self.version = (self.row.boot_counter, self.row.seq)

    def flapped(self, now_us: int) -> None:
        """It came back from the dead, or restarted without a goodbye."""
        self.flaps = (*self.flaps, now_us)[-FLAPS_KEPT:]

    @property
    def known_version(self) -> Version:
        """Highest version that need not be sent to us again."""
        return self.version if self.held is None else max(self.version, self.held)

    @property
    def live(self) -> bool:
        """Counted as a member: probed, gossiped to, planned around."""
        return self.state in {"alive", "suspect"}


@dataclass(frozen=True, slots=True)
class Tombstone:
    """What survives of a forgotten node; may be kept on disk and given back at the next start."""

    node_id: NodeId
    boot_counter: int
    seq: int


class NodeTable:
    """Entries by node id, in the order in which they were learnt. Never holds this node itself."""

    def __init__(self, max_members: int, tombstones: tuple[Tombstone, ...] = ()) -> None:
        self._max_members = max_members
        self._entries: dict[NodeId, Entry] = {}
        self._live: dict[NodeId, None] = {}
        self._by_signature: dict[bytes, Entry] = {}
        self._lines: dict[NodeId, RowVersion] = {}
        self.revision = 0
        """Counts what a reader of the whole table would want to know of."""
        self._floors: dict[NodeId, Version] = {stone.node_id: (stone.boot_counter, stone.seq) for stone in tombstones}

    def __contains__(self, node_id: str) -> bool:
        return node_id in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def get(self, node_id: str) -> Entry | None:
        """The entry of a known node."""
        return self._entries.get(NodeId(node_id))

    def holder(self, signed: SignedRow) -> Entry | None:
        """The live member of which exactly this row is stored: nothing more to learn from it."""
        entry = self._by_signature.get(signed.signature)
        known = entry is not None and entry.live and entry.signed.payload == signed.payload
        return entry if known else None

    def lines(self) -> list[RowVersion]:
        """What a digest says of every entry, in their order. Kept up to date: a joining node is sent dozens."""
        return list(self._lines.values())

    def compare(self, lines: Iterable[RowVersion]) -> tuple[set[str], list[RowVersion]]:
        """The live members of which a digest tells what is stored, and its other lines."""
        same: set[str] = set()
        other: list[RowVersion] = []
        for line in lines:
            if self.agrees(line):
                same.add(line.node_id)
            else:
                other.append(line)
        return same, other

    def agrees(self, line: RowVersion) -> bool:
        """The line of a digest tells what is stored of a live member: true of almost every line of a settled mesh."""
        entry = self._entries.get(NodeId(line.node_id))
        return entry is not None and entry.buried is None and entry.version == (line.boot_counter, line.seq)

    @property
    def live_count(self) -> int:
        """Members alive or suspect, this node not counted."""
        return len(self._live)

    def live_ids(self) -> list[NodeId]:
        """Members alive or suspect."""
        return list(self._live)

    @property
    def full(self) -> bool:
        """No newcomer fits."""
        return len(self._entries) >= self._max_members

    def floor(self, node_id: str) -> Version | None:
        """The version at which a forgotten node was last known."""
        return self._floors.get(NodeId(node_id))

    def known_version(self, node_id: str) -> Version | None:
        """Highest version that needs no re-sending: stored, held back, or buried long ago."""
        entry = self.get(node_id)
        return self.floor(node_id) if entry is None else entry.known_version

    def add(self, signed: SignedRow, row: NodeRow, now_us: int) -> Entry:
        """A newcomer, or a forgotten node that came back by the rules; the caller has checked both."""
        assert not self.full
        self.revision += 1
        node_id = NodeId(row.node_id)
        entry = Entry(node_id, signed, row, received_us=now_us, changed_us=now_us, incarnation=row.incarnation)
        self._entries[node_id] = entry
        self._note(entry)
        self._by_signature[signed.signature] = entry
        self._live[node_id] = None
        self._floors.pop(node_id, None)
        return entry

    def replace_row(self, entry: Entry, signed: SignedRow, row: NodeRow, now_us: int) -> bool:
        """Store a higher row of a known node; ``True`` if it is news. The state is the caller's business."""
        assert (row.boot_counter, row.seq) > entry.version
        restarted = row.boot_counter > entry.row.boot_counter
        news = is_news(entry.row, row)
        self.revision += news
        self._by_signature.pop(entry.signed.signature, None)
        self._by_signature[signed.signature] = entry
        entry.signed, entry.row, entry.received_us = signed, row, now_us
        entry.version = (row.boot_counter, row.seq)
        self._note(entry)
        entry.incarnation = row.incarnation if restarted else max(entry.incarnation, row.incarnation)
        if restarted:
            entry.refutation = None
        return news

    def set_state(self, entry: Entry, state: MemberState, now_us: int) -> MemberState:
        """Move the entry and return its old state. Burying remembers the version, returning forgets the grave."""
        old = entry.state
        self.revision += 1
        entry.state, entry.changed_us = state, now_us
        if entry.live:
            self._live[entry.node_id] = None
            entry.buried = entry.held = entry.stash = None
        else:
            self._live.pop(entry.node_id, None)
            entry.buried = entry.version
            entry.heard_us = None
        if state != "suspect":
            entry.suspected_us = None
            entry.accusers.clear()
            entry.mourners.clear()
        self._note(entry)
        return old

    def hold_back(self, entry: Entry, signed: SignedRow, version: Version) -> None:
        """A buried node's higher row came by hearsay: it stays away until the node brings it, and need not be sent again."""
        entry.held = max(version, entry.held or version)
        entry.stash = signed
        self._note(entry)

    def keep_out(self, node_id: str, version: Version) -> None:
        """Remember a version below which an unknown node must not appear. At most ``max_members``, oldest goes first."""
        self._floors[NodeId(node_id)] = version
        if len(self._floors) > self._max_members:
            del self._floors[next(iter(self._floors))]

    def forget(self, node_id: NodeId, *, keep_floor: bool = True) -> Entry | None:
        """Drop the entry; its version stays as a floor. At most ``max_members`` floors, the oldest goes first."""
        entry = self._entries.pop(node_id, None)
        self._lines.pop(node_id, None)
        self.revision += 1
        if entry is not None:
            self._by_signature.pop(entry.signed.signature, None)
        self._live.pop(node_id, None)
        if entry is not None and keep_floor:
            self.keep_out(node_id, entry.known_version)
        return entry

    def tombstones(self) -> tuple[Tombstone, ...]:
        """Everything that must not come back by hearsay: graves and floors."""
        graves = {entry.node_id: entry.known_version for entry in self if not entry.live}
        return tuple(Tombstone(node_id, *version) for node_id, version in {**self._floors, **graves}.items())

    def _note(self, entry: Entry) -> None:
        boot_counter, seq = entry.known_version
        dead, line = entry.state == "dead", self._lines.get(entry.node_id)
        if line is None or line.seq != seq or line.boot_counter != boot_counter or line.dead != dead:
            line = RowVersion(node_id=entry.node_id, boot_counter=boot_counter, seq=seq, dead=dead)
            self._lines[entry.node_id] = line

    def validate(self) -> None:
        """Invariants, for tests."""
        assert list(self._lines) == list(self._entries)
        for line, entry in zip(self._lines.values(), self, strict=True):
            said = (line.node_id, (line.boot_counter, line.seq), line.dead)
            assert said == (entry.node_id, entry.known_version, entry.state == "dead"), entry
        assert len(self._entries) == len(self._by_signature) <= self._max_members
        assert len(self._floors) <= self._max_members
        assert set(self._live) == {entry.node_id for entry in self if entry.live}
        for node_id, entry in self._entries.items():
            assert node_id == entry.node_id == entry.row.node_id
            assert node_id not in self._floors
            assert entry.version == (entry.row.boot_counter, entry.row.seq)
            assert self._by_signature[entry.signed.signature] is entry
            assert (entry.buried is not None) == (not entry.live), entry
            assert (entry.suspected_us is not None) == (entry.state == "suspect"), entry
            assert list(entry.flaps) == sorted(entry.flaps)
