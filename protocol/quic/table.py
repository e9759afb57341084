"""All sessions of this node and the one that counts per peer: the carrier-free half of a transport.

The real transport and the in-memory twin both stand on this table; it opens no socket and reads no clock of its own.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from config.settings import QuicSettings
from protocol.admission import AdmissionBook
from protocol.ids import Instance, NodeId
from protocol.messages import Hello, JoinAccepted, JoinRefused, JoinRequest, Message, PathEcho
from protocol.quic.interface import (
    AdmissionsLearned,
    IdentityConflict,
    JoinDesk,
    Lane,
    MessageReceived,
    PeerConnected,
    PeerConnection,
    PeerDisconnected,
    PeerMoved,
    Rejected,
    TransportCounters,
    TransportEvent,
)
from protocol.quic.peers import BootRegister, Candidate
from protocol.quic.predecessor import SILENT_US, Predecessor
from protocol.quic.session import WAIT, Session, State
from protocol.quic.trials import Trials

UNVOUCHED_US = 10_000_000
"""A revocation and a succession bring new vouchers for those who hung on the one that is out; they may come a little later."""


class PeerTable:
    """The ``SessionHost`` of every session.

    ``on_open`` is told of a session before its peer is reported, ``on_dial_failed`` of one that never opened.
    """

    def __init__(
        self,
        *,
        node_id: NodeId,
        book: AdmissionBook,
        hello: Hello,
        settings: QuicSettings,
        events: Callable[[TransportEvent], None],
        clock_us: Callable[[], int],
        desk: JoinDesk | None,
        on_open: Callable[[Session], None],
        on_dial_failed: Callable[[Session, str], None],
    ) -> None:
        assert book.mesh_id == hello.mesh_id
        self.node_id = node_id
        self.book = book
        self.hello = hello
        self.counters = TransportCounters()
        self.hello_timeout_us = settings.connect_timeout_us
        self.outstanding_limit = settings.outstanding_bytes_per_peer
        self.message_rate = settings.messages_per_second_per_peer
        self._read_timeout_us = settings.read_timeout_us
        self._events = events
        self._clock_us = clock_us
        self._desk = desk
        self._on_open = on_open
        self._on_dial_failed = on_dial_failed
        self._boots = BootRegister(node_id)
        self._sessions: set[Session] = set()
        self._peers: dict[NodeId, Session] = {}
        self._snapshots: dict[NodeId, PeerConnection] = {}
        self._lingering: dict[NodeId, Session] = {}
        self.trials = Trials(node_id, standing=self._peers.get, promote=self._promote, clock_us=clock_us)
        self._book_version = book.version
        self._unvouched_us: dict[NodeId, int] = {}
        self._told = {held.node_id: held.signature for held in book.statements}

    @property
    def connected(self) -> Mapping[NodeId, PeerConnection]:
        """Living connections by peer; a view that follows."""
        return MappingProxyType(self._snapshots)

    @property
    def peers(self) -> Mapping[NodeId, Session]:
        """The session that counts, by peer."""
        return MappingProxyType(self._peers)

    @property
    def strangers(self) -> int:
        """Sessions that are not, or not yet, a peer's."""
        return sum(session.state not in {State.OPEN, State.TRIAL} for session in self._sessions)

    @property
    def in_motion(self) -> bool:
        """Whether ``sweep`` may soon have something to do, and should be called several times a second."""
        return any(session.in_motion for session in self._sessions)

    def add(self, session: Session) -> None:
        """Follow a new session until it ends."""
        self._sessions.add(session)

    def knows_way(self, address: str, expect: NodeId | None) -> bool:
        """Whether dialling would be pointless: connected already."""
        if expect in self._peers:
            return True
        return any(session.dialled and session.target == address for session in self._peers.values())

    def may_try(self, peer: NodeId, address: str) -> bool:
        """Whether another path to ``peer`` may be tried at that address now."""
        held = self._snapshots.get(peer)
        return held is not None and held.address != address and peer not in self.trials

    def send(self, peer: NodeId, message: Message, lane: Lane) -> bool:
        """See ``Transport.send``."""
        session = self._peers.get(peer)
        if session is None:
            return False
        return session.send(message, lane)

    def close(self, peer: NodeId, reason: str) -> None:
        """See ``Transport.close``."""
        session = self._peers.get(peer)
        if session is not None:
            session.end(reason)

    def close_all(self, reason: str) -> None:
        """End every session."""
        for session in list(self._sessions):
            session.end(reason)

    def sweep(self) -> None:
        """End what is overdue and whom the book no longer holds. Once a second, and more often while ``in_motion``."""
        now_us = self._clock_us()
        self._tell_admissions()
        self.trials.sweep()
        self._unvouched_us = {peer: at for peer, at in self._unvouched_us.items() if peer not in self.book}
        for session in list(self._sessions):
            if session.state in {State.OPEN, State.TRIAL} and session.peer not in self.book:
                self._unvouched(session, now_us)
            elif session.waiting is not None:
                session.decide(session.waiting)
            elif reason := session.overdue(now_us, self._read_timeout_us):
                session.end(reason)

    def follow(self) -> None:
        """Tell of peers whose address changed. Call about once a second."""
        for peer, session in self._peers.items():
            held, now = self._snapshots[peer], _snapshot(session)
            if held != now:
                self._snapshots[peer] = now
                if (held.address, held.path, held.interface) != (now.address, now.path, now.interface):
                    self._moved(peer, session)

    def emit(self, event: TransportEvent) -> None:
        """Report upwards."""
        self._events(event)

    # ---- SessionHost ------------------------------------------------------------------------------------------------

    def now_us(self) -> int:
        """Monotonic."""
        return self._clock_us()

    def greeting(self, session: Session) -> Hello:
        """This node's hello, with what it sees of the peer and the proof of its own admission."""
        return self.hello.model_copy(
            update={
                "observed_address": session.carrier.address,
                "admissions": self.book.chain(self.node_id),
                "trial": session.trial,
            }
        )

    def redeem(self, session: Session, request: JoinRequest) -> JoinAccepted | JoinRefused:
        """Ask the desk; whom it admitted is in the book already."""
        if self._desk is None:
            return JoinRefused(reason="unknown_or_used_token")
        answer = self._desk.redeem(session.peer_public_key, request)
        self._tell_admissions()
        return answer

    def judge(self, session: Session, hello: Hello) -> str:
        """Clones, restarts and double connections (see ``peers``)."""
        peer = session.peer
        assert peer is not None
        self._tell_admissions()
        if peer == self.node_id:
            if hello.instance == self.hello.instance:
                return "self"
            self._conflict(session, self.hello.instance, hello.instance)
            return "identity_conflict"
        if session.trial:
            return self.trials.judge(session, hello)
        current = self._peers.get(peer)
        if current is not None and current.hello is not None and current.hello.instance != hello.instance:
            match Predecessor(current, session.waits_since_us).verdict(self._clock_us()):
                case "wait":
                    return WAIT
                case "alive":
                    self._conflict(session, current.hello.instance, hello.instance)
                    return "identity_conflict"
        verdict = self._boots.judge(
            None if current is None or current.hello is None else self._candidate(current, current.hello),
            self._candidate(session, hello),
        )
        return "" if verdict in {"take", "replace"} else verdict

    def outrank(self, boot_counter: int) -> None:
        """Greet with this boot counter from now on: peers remember a later start of this node."""
        self.hello = self.hello.model_copy(update={"boot_counter": boot_counter})

    def readdress(self, addresses: tuple[str, ...]) -> None:
        """Greet with these addresses from now on: this machine has others now."""
        self.hello = self.hello.model_copy(update={"addresses": addresses})

    def opened(self, session: Session) -> None:
        """Put the session into the table; the one it replaces lingers, or ends when it is another process's."""
        peer, hello = session.peer, session.hello
        assert peer is not None
        assert hello is not None
        self.counters.handshakes["completed"] += 1
        self._on_open(session)
        if session.trial:
            return
        before = self._peers.get(peer)
        carrier = session.carrier
        if before is not None and before.hello is not None and before.hello.instance == hello.instance:
            self._succeed(peer, before, session)
            if (before.carrier.address, before.carrier.path) != (carrier.address, carrier.path):
                self._moved(peer, session)
            return
        if before is not None:
            before.end("replaced")
        self._enter(peer, session)
        self.emit(PeerConnected(peer, carrier.address, hello, carrier.path, carrier.interface))

    def echoed(self, session: Session, echo: PathEcho, lane: Lane) -> None:
        """See ``Trials.on_echo``."""
        self.trials.on_echo(session, echo, lane)

    def taken(self, session: Session) -> bool:
        """See ``Trials.on_take``."""
        return self.trials.on_take(session)

    def received(self, session: Session, message: Message, lane: Lane, size: int) -> None:
        """Hand a message up."""
        assert session.peer is not None
        arrived_us = self._clock_us() - session.carrier.late_us
        self.emit(MessageReceived(session.peer, message, lane, size, arrived_us))

    def ended(self, session: Session, was: State, reason: str) -> None:
        """Forget the session and tell what its end means."""
        self._sessions.discard(session)
        self.trials.ended(session)
        if was in {State.LINGERING, State.TRIAL}:
            return
        if was is State.OPEN:
            assert session.peer is not None
            self._lost(session.peer, session, reason)
            return
        self.counters.handshakes["failed"] += 1
        self.counters.reject(reason)
        if session.trial and not session.dialled:
            return
        if not session.dialled:
            self.emit(Rejected(reason, session.carrier.address))
        else:
            if reason == "identity_conflict" and session.peer != self.node_id:
                own = (Instance(self.hello.instance),)
                self.emit(IdentityConflict(self.node_id, own, session.carrier.address, turned_away=True))
            self._on_dial_failed(session, reason)

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _unvouched(self, session: Session, now_us: int) -> None:
        """Its peer is not admitted: barred ones end at once, others when no new voucher is heard of for a while."""
        peer = session.peer
        assert peer is not None
        if reason := self.book.barred_as(peer):
            session.end(reason)
        elif now_us - self._unvouched_us.setdefault(peer, now_us) >= UNVOUCHED_US:
            session.end("unadmitted")

    def _promote(self, session: Session) -> None:
        """A path on trial was better: it counts now, the one before drains."""
        peer = session.peer
        assert peer is not None
        session.promote()
        self._succeed(peer, self._peers[peer], session)
        self._moved(peer, session)

    def _succeed(self, peer: NodeId, before: Session, session: Session) -> None:
        before.linger()
        self._lingering[peer] = before
        self._enter(peer, session)

    def _moved(self, peer: NodeId, session: Session) -> None:
        carrier = session.carrier
        self.emit(PeerMoved(peer, carrier.address, carrier.path, carrier.interface))

    def _lost(self, peer: NodeId, session: Session, reason: str) -> None:
        """An open session ended; one that lingers may take its place."""
        spare = self._lingering.get(peer)
        if spare is session:
            del self._lingering[peer]
        if self._peers.get(peer) is not session:
            return
        heir = self.trials.heir(peer, reason)
        if heir is not None:
            heir.promote()
            self._enter(peer, heir)
            self._moved(peer, heir)
            return
        if spare is not None and spare is not session and spare.state is State.OPEN:
            del self._lingering[peer]
            spare.resume()
            self._enter(peer, spare)
            self._moved(peer, spare)
            return
        del self._peers[peer]
        del self._snapshots[peer]
        self.emit(PeerDisconnected(peer, reason))

    def _enter(self, peer: NodeId, session: Session) -> None:
        self._peers[peer] = session
        self._snapshots[peer] = _snapshot(session)

    def _candidate(self, session: Session, hello: Hello) -> Candidate:
        assert session.peer is not None
        return Candidate(
            peer=session.peer,
            instance=Instance(hello.instance),
            boot_counter=hello.boot_counter,
            dialled=session.dialled,
            path=session.carrier.path,
            alive=self._clock_us() - session.carrier.heard_us < SILENT_US,
        )

    def _conflict(self, session: Session, held: Instance | str, offered: Instance | str) -> None:
        assert session.peer is not None
        instances = (Instance(held), Instance(offered))
        self.emit(IdentityConflict(session.peer, instances, session.carrier.address))

    def _tell_admissions(self) -> None:
        if self.book.version != self._book_version:
            self._book_version = self.book.version
            fresh = [held for held in self.book.statements if self._told.get(held.node_id) != held.signature]
            self._told.update((held.node_id, held.signature) for held in fresh)
            if fresh:
                self.emit(AdmissionsLearned(tuple(fresh)))


def _snapshot(session: Session) -> PeerConnection:
    assert session.hello is not None
    carrier = session.carrier
    return PeerConnection(
        address=carrier.address,
        since_us=session.since_us,
        datagrams=carrier.datagrams,
        path=carrier.path,
        hello=session.hello,
        dialled=session.dialled,
        interface=carrier.interface,
    )
