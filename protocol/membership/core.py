"""The membership core: who is in the mesh, who is alive, what each node says of itself, and what the links are worth.

Theory of operation. Rows are owned, signed and numbered by their nodes and replicated by gossip (``records``,
``dissemination``, ``table``); others may only accuse. A SWIM failure detector with Lifeguard's local health watches the
members (``prober``); evidence outweighs accusation (``judge``); connections are sought for ever (``dialler``). RTT comes
from the same probes that watch for life, and a changed link is one of the reasons for a new row (``own``).

The core is a synchronous state machine: inputs are the methods of ``Membership``, each returns frozen effects
(``effects``), time is the monotonic ``now_us`` of this node, which must not go back. ``next_deadline`` says when
``on_timer`` wants to be called; calling it early or late is harmless, but the core takes a call that is more than 200 ms
late as proof that this node did not listen, and accuses nobody for the time it slept.

Wiring: every ``Send`` to a peer without a connection may be dropped; ``Dial`` needs no answer; ``AdmissionLearned`` is
answered by ``spread_admission`` if the statement was accepted. Nothing happens before the first ``publish``.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from random import Random
from typing import assert_never

from config.settings import LinkSettings, MembershipSettings
from protocol.ids import NodeId, node_id_of
from protocol.links.bandwidth import Direction, LimitedBy
from protocol.links.book import LinkBook
from protocol.links.vivaldi import VivaldiNode, estimate_us, is_placed
from protocol.membership.conditions import in_conflict
from protocol.membership.dialler import Dialler
from protocol.membership.dissemination import GossipQueue
from protocol.membership.effects import CloseConnection, Effect, Lane, MemberChanged, MemberState
from protocol.membership.exchange import Exchange
from protocol.membership.ground import Connection, Ground
from protocol.membership.issuing import TICK_US, Issuer
from protocol.membership.judge import KNOCK_US, Judge
from protocol.membership.member import Member, member_of, own_member
from protocol.membership.own import OwnRow
from protocol.membership.prober import Prober
from protocol.membership.records import Records
from protocol.membership.signing import Sign, Verify, Version, open_row
from protocol.membership.stalls import LATE_US, Stalls
from protocol.membership.table import Entry, NodeTable, Tombstone
from protocol.messages import Ack, DigestRequest, GossipPush, MembershipMessage, Ping, PingRequest, RowRequest
from protocol.rows import Admission, LinkFact, NodeRow


class Membership:
    """One node's view of the mesh. See the module for the contract of inputs, effects and time."""

    def __init__(
        self,
        *,
        node_id: NodeId,
        public_key: bytes,
        sign: Sign,
        verify: Verify,
        settings: MembershipSettings,
        link_settings: LinkSettings,
        random: Random,
        boot_counter: int,
        instance: str,
        is_admitted: Callable[[NodeId], bool],
        now_us: int,
        seeds: tuple[str, ...] = (),
        tombstones: tuple[Tombstone, ...] = (),
        is_shaped: Callable[[NodeId], bool] = lambda _: False,
    ) -> None:
        assert node_id == node_id_of(public_key), node_id
        self._ground = Ground(
            node_id,
            settings,
            link_settings,
            random,
            verify,
            partial(open_row, verify=verify),
            is_admitted,
            NodeTable(settings.max_members, tombstones),
            LinkBook(link_settings, is_shaped),
            GossipQueue(settings.piggyback_items),
            VivaldiNode(random),
        )
        self._own = OwnRow(node_id, public_key, sign, boot_counter, instance)
        self._judge = Judge(self._ground)
        self._prober = Prober(self._ground, self._judge)
        self._dialler = Dialler(self._ground, seeds)
        self._records = Records(self._ground, self._judge, self._dialler, self._own)
        self._issuer = Issuer(self._ground, self._own, self._prober, self._records)
        self._exchange = Exchange(self._ground, self._own, self._judge, self._prober, self._records, self._issuer)
        self._whole_mesh: Mapping[str, Callable[[int], None]] = {
            "push": self._exchange.push,
            "sync": self._exchange.sync,
            "links": self._issuer.tick,
            "refresh": self._issuer.issue,
            "topology": self._dialler.topology_due,
            "cut": self._cut_off,
        }
        self._stalls = Stalls(self._ground, self._prober, self._issuer.conditions, now_us)
        self._started = False
        self._left = False

    # -- inputs from the shell ---------------------------------------------------------------------------------------

    def publish(self, row: NodeRow, now_us: int) -> list[Effect]:
        """What the shell knows of this node; call as often as it changes. Numbering, links and key are filled in here.

        A new row goes out only if something other than ages and noise changed. The first call starts the core.
        """
        news = self._own.wish(row, now_us)
        if not self._started:
            self._start(now_us)
        if news and not self._left:
            self._issuer.issue(now_us)
        return self._ground.drain(now_us)

    def on_connected(
        self, peer: NodeId, address: str, now_us: int, *, interface: str = "", over_tcp: bool = False
    ) -> list[Effect]:
        """An admitted peer is connected (again, or by another path): rows and digests are exchanged at once."""
        ground = self._ground
        fresh = peer not in ground.connections
        ground.connections[peer] = Connection(address, now_us, over_tcp)
        ground.links.link(peer).on_path(address, interface, now_us, over_tcp=over_tcp)
        self._dialler.connected(peer, address, now_us)
        if not self._left:
            self._exchange.greet(peer, now_us, fresh=fresh)
        entry = ground.table.get(peer)
        if entry is not None and entry.live:
            self._judge.heard(entry, now_us)
            ground.timers.set("probe", peer, now_us + ground.jitter(ground.settings.probe_interval_us // 4))
        elif entry is not None:
            ground.timers.set("knock", peer, now_us + KNOCK_US)
        return ground.drain(now_us)

    def on_moved(
        self, peer: NodeId, address: str, now_us: int, *, interface: str = "", over_tcp: bool = False
    ) -> list[Effect]:
        """Another remote address or interface, or UDP stopped passing (``over_tcp``). A new port alone is no new path."""
        connection = self._ground.connections.get(peer)
        if connection is not None:
            connection.address, connection.over_tcp = address, over_tcp
            self._ground.links.link(peer).on_path(address, interface, now_us, over_tcp=over_tcp)
            self._prober.moved(peer)
        return self._ground.drain(now_us)

    def on_disconnected(self, peer: NodeId, now_us: int) -> list[Effect]:
        """No connection to the peer is left. It is not dead for that: others are asked, and it is dialled."""
        if self._ground.connections.pop(peer, None) is not None:
            self._prober.disconnected(peer, now_us)
            self._dialler.disconnected(peer, now_us)
        return self._ground.drain(now_us)

    def on_dial_failed(self, address: str, now_us: int) -> list[Effect]:
        """Optional news: a ``Dial`` to this address failed. Without it the next attempt comes a little later."""
        self._dialler.failed(address, now_us)
        return self._ground.drain(now_us)

    def on_message(
        self, sender: NodeId, message: MembershipMessage, now_us: int, *, lane: Lane, arrived_us: int | None = None
    ) -> list[Effect]:
        """A validated message from the connection of ``sender``.

        ``arrived_us``: when it reached this machine, at most ``now_us`` (left out: now). A busy process hears late; round
        trips are those of the link, between the machines.
        """
        arrived_us = now_us if arrived_us is None else min(arrived_us, now_us)
        ground = self._ground
        if self._left or not ground.is_admitted(sender):
            ground.reject(sender, "left" if self._left else "unadmitted")
            return ground.drain(now_us)
        entry = ground.table.get(sender)
        if entry is not None:
            self._judge.heard(entry, now_us)
        match message:
            case Ping():
                self._exchange.gossip(sender, message.gossip, now_us)
                self._prober.on_ping(sender, message, lane, now_us, now_us - arrived_us)
            case Ack():
                confirmed = self._prober.on_ack(sender, message, lane, now_us, arrived_us)
                if confirmed is not None:
                    self._records.vouched(confirmed, now_us)
                self._exchange.gossip(sender, message.gossip, now_us)
            case PingRequest():
                self._prober.on_ping_request(sender, message, now_us)
            case GossipPush():
                self._exchange.gossip(sender, message.gossip, now_us)
            case DigestRequest():
                self._exchange.digest(sender, message, now_us)
            case RowRequest():
                self._records.on_request(sender, message)
            case _:
                assert_never(message)
        ground.wake_push(now_us)
        return ground.drain(now_us)

    def on_transfer(
        self, peer: NodeId, direction: Direction, size: int, duration_us: int, limited_by: LimitedBy, now_us: int
    ) -> None:
        """A bulk transfer of ``size`` bytes ended: a passive bandwidth sample, if it was large and long enough."""
        self._ground.links.on_transfer(peer, direction, size, duration_us, limited_by, now_us)

    def on_conflict(self, node_id: NodeId, now_us: int) -> list[Effect]:
        """The transport saw two living processes with this identity (perhaps this node's own)."""
        if node_id == self._ground.node_id:
            self._records.conflict_us = now_us
        elif (entry := self._ground.table.get(node_id)) is not None:
            entry.conflict_us = now_us
        return self._ground.drain(now_us)

    def on_clock_gap(self, gap_us: int, now_us: int) -> list[Effect]:
        """The machine slept for ``gap_us`` that ``now_us`` does not show: samples are void, connections start anew."""
        ground = self._ground
        self._prober.lagged(gap_us, now_us)
        ground.links.void()
        for peer in list(ground.connections):
            ground.effects.append(CloseConnection(peer, "clock_gap"))
        if self._started and not self._left:
            self._issuer.issue(now_us)
        return ground.drain(now_us)

    def on_loop_lag(self, lag_us: int, now_us: int) -> list[Effect]:
        """The event loop was late: this node rests from probing and says so; above 1 s it sheds what it can spare."""
        self._stalls.late(lag_us, now_us)
        return self._ground.drain(now_us)

    def spread_admission(self, admission: Admission, now_us: int, *, told_by: NodeId | None = None) -> list[Effect]:
        """The book accepted this statement (at start, too: call it for all that are held). It is gossiped and remembered.

        Whom it bars is dropped at once; whom it leaves without a voucher, a little later.
        """
        self._records.admission(admission, told_by, now_us)
        if (barred := self._records.admissions.barred_by(admission, now_us)) is not None:
            self._drop(*barred)
        self._ground.wake_push(now_us)
        return self._ground.drain(now_us)

    def announce(self, admissions: list[Admission], now_us: int) -> list[Effect]:
        """This node's own statements, in the book already: everybody connected hears them at once, whom they bar first."""
        self._records.admissions.tell(list(self._ground.connections), admissions)
        effects = self._ground.drain(now_us)
        return [*effects, *(each for admission in admissions for each in self.spread_admission(admission, now_us))]

    def outrank(self, boot_counter: int, now_us: int) -> list[Effect]:
        """Number rows by this boot counter from now on: others remember a later start of this node than its disk did."""
        self._own.outrank(boot_counter)
        if self._started and not self._left:
            self._issuer.issue(now_us)
        return self._ground.drain(now_us)

    def add_seed(self, address: str, now_us: int) -> list[Effect]:
        """One more address to join by."""
        self._dialler.add_seed(address, now_us)
        return self._ground.drain(now_us)

    def request_measurements(self, peers: Iterable[NodeId]) -> None:
        """Stay connected to these peers, their RTT settled, although the mesh is large; at most 64, replacing those before."""
        self._prober.pace.request(peers)

    def leave(self, now_us: int) -> list[Effect]:
        """Say goodbye to everybody connected; the core is silent afterwards."""
        if self._started and not self._left:
            self._exchange.goodbye(now_us)
            self._left = True
            self._ground.timers.clear()
        return self._ground.drain(now_us)

    # -- time -------------------------------------------------------------------------------------------------------

    def next_deadline(self) -> int | None:
        """When ``on_timer`` wants to be called."""
        return self._ground.timers.next()

    def on_timer(self, now_us: int) -> list[Effect]:
        """Do what is due. See the module for lateness."""
        ground = self._ground
        due_us = ground.timers.next()
        effects: list[Effect] = []
        if due_us is not None and now_us - due_us > LATE_US:
            effects = self.on_loop_lag(now_us - due_us, now_us)
        while (key := ground.timers.pop_due(now_us)) is not None:
            self._due(key[0], key[1], now_us)
        ground.wake_push(now_us)
        return [*effects, *ground.drain(now_us)]

    # -- views ------------------------------------------------------------------------------------------------------

    def members(self, now_us: int | None = None) -> Mapping[NodeId, Member]:
        """Everybody known, the buried and this node included (once it has published).

        ``now_us`` is the moment for which links are judged; left out, that of the latest input.
        """
        now_us = self._ground.now_us if now_us is None else now_us
        ground = self._ground
        members: dict[NodeId, Member] = {}
        if self._own.row is not None:
            conflict = in_conflict(self._records.conflict_us, ground.row_refresh_us, now_us)
            members[ground.node_id] = own_member(self._own, conflict=conflict, left=self._left)
        for entry in ground.table:
            conflict = in_conflict(entry.conflict_us, ground.row_refresh_us, now_us)
            connection = ground.connections.get(entry.node_id)
            link = ground.links.view(entry.node_id, now_us)
            members[entry.node_id] = member_of(entry, connection, link, conflict=conflict)
        return members

    def standings(self) -> Iterator[tuple[NodeId, MemberState, Version]]:
        """State and row version of every other known node: the cheap part of ``members``."""
        return ((entry.node_id, entry.state, entry.version) for entry in self._ground.table)

    @property
    def revision(self) -> int:
        """Rises with every change of ``members`` that is more than ages and noise (``news``, material links)."""
        return self._ground.table.revision + self._own.version[1]

    @property
    def own_row(self) -> NodeRow | None:
        """The row as it was last issued."""
        return self._own.row

    def link_facts(self, now_us: int) -> tuple[LinkFact, ...]:
        """What would be published about this node's outgoing links now."""
        return self._ground.links.facts(now_us)

    def estimate_rtt_us(self, source: NodeId, target: NodeId) -> int | None:
        """RTT of a pair that nobody measures, from coordinates in the rows; never to be called settled.

        ``None`` while either end does not know its place (small meshes, and before its first samples).
        """
        start, end = self._ground.coordinate_of(source), self._ground.coordinate_of(target)
        if start is None or end is None or not (is_placed(start) and is_placed(end)):
            return None
        return estimate_us(start, end)

    def tombstones(self) -> tuple[Tombstone, ...]:
        """What must survive a restart so that the dead are not brought back by hearsay."""
        return self._ground.table.tombstones()

    def validate(self) -> None:
        """Invariants, for tests."""
        ground = self._ground
        ground.validate(left=self._left)
        assert not ground.effects
        assert self._prober.outstanding <= len(ground.table) + 256

    # -- inside -----------------------------------------------------------------------------------------------------

    def _start(self, now_us: int) -> None:
        ground = self._ground
        self._started = True
        self._own.started_us = now_us
        self._dialler.start(now_us)
        ground.timers.set("sync", "", now_us + ground.jitter(ground.settings.anti_entropy_interval_us))
        ground.timers.set("links", "", now_us + TICK_US)

    def _due(self, kind: str, subject: str, now_us: int) -> None:
        if (whole := self._whole_mesh.get(kind)) is not None:
            whole(now_us)
        elif kind == "timeout":
            self._prober.timed_out(int(subject), now_us)
        elif kind == "seed":
            self._dialler.seed_due(subject, now_us)
        elif (entry := self._ground.table.get(subject)) is not None:
            self._due_member(kind, entry, now_us)

    def _cut_off(self, _now_us: int) -> None:
        for node_id in self._records.admissions.cut_off():
            self._drop(node_id, "unvouched")

    def _due_member(self, kind: str, entry: Entry, now_us: int) -> None:
        match kind:
            case "probe":
                self._prober.due(entry, now_us)
            case "suspect":
                self._judge.due(entry, now_us)
                self._dialler.learnt(entry, now_us)
            case "dial":
                self._dialler.due(entry, now_us)
            case "knock":
                self._exchange.knock(entry, now_us)
            case "settle":
                self._dialler.stable(entry.node_id)
            case "forget":
                self._drop(entry.node_id, "forgotten")
            case "confirm":
                self._prober.confirm(entry, now_us)
            case _:
                raise AssertionError(kind)

    def _drop(self, node_id: NodeId, reason: str) -> None:
        """Forget a member; a connection to it is closed."""
        ground = self._ground
        entry = ground.table.forget(node_id)
        if entry is None:
            return
        for kind in ("probe", "suspect", "forget", "confirm", "knock"):
            ground.timers.cancel(kind, node_id)
        self._dialler.forget(node_id)
        ground.links.forget(node_id)
        ground.effects.append(MemberChanged(node_id, entry.state, None, reason))
        if node_id in ground.connections:
            ground.effects.append(CloseConnection(node_id, reason))
