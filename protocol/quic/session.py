"""One authenticated connection to one peer, whatever carries it: who may say what, and when.

Theory of operation. A *carrier* (QUIC, TLS, or memory in tests) tells its session three things: the peer's key after the
handshake, frames, and the end. The session knows the peer's id from that key and from nothing else, and moves

    HANDSHAKE ──established──► GREETING ──Hello both ways──► OPEN ──► CLOSED
                                  ├──JoinRequest answered──► LINGERING ──► CLOSED
                                  └──trial in both Hellos──► TRIAL ──taken──► OPEN   (``trials``)

The dialler greets first, and only a peer it knows as admitted; the other side answers only after it has judged the
dialler's greeting. So a stranger who connects gets a closed connection and no byte about this mesh. A stranger may do one
thing, send a ``JoinRequest``; the answer is followed by the end of the connection. Who is barred, and proves to own that
key, is shown the signed statements that say so: a machine that slept through its revocation learns why nobody talks to it.

Sessions read no clock: ``now_us`` comes from their host, deadlines are swept by it (``overdue``).
"""

import enum
from typing import Protocol

from protocol.admission import AdmissionBook
from protocol.codec import MAX_DATAGRAM_BYTES, decode, encode
from protocol.errors import WireError
from protocol.ids import NodeId, node_id_of
from protocol.messages import (
    Gossip,
    GossipPush,
    Hello,
    JoinAccepted,
    JoinRefused,
    JoinRequest,
    Message,
    PathEcho,
    PathTake,
)
from protocol.quic.carriage import Carrier
from protocol.quic.interface import Lane, TransportCounters
from protocol.quic.limits import TokenBucket

LINGER_US = 1_000_000
"""How long an answered or replaced connection may stay so that its last bytes arrive."""
TRIAL_US = 10_000_000
"""A path on trial is taken or given up within this time."""

BARRED = frozenset({"revoked", "superseded"})
"""Reasons that a peer is shown the proof of, by statements of the admission book, before the connection closes."""

WAIT = "wait"
"""A verdict that is none yet."""

TOLD_TO_STRANGERS = "refused"
"""The only reason that somebody who is not admitted ever hears."""


class SessionHost(Protocol):
    """What a session asks of the transport it belongs to."""

    node_id: NodeId
    book: AdmissionBook
    counters: TransportCounters
    hello_timeout_us: int
    outstanding_limit: int
    message_rate: int

    def now_us(self) -> int:
        """Monotonic."""

    def greeting(self, session: "Session") -> Hello:
        """This node's hello for that peer."""

    def redeem(self, session: "Session", request: JoinRequest) -> JoinAccepted | JoinRefused:
        """Judge a stranger's request; an acceptance is durable before this returns."""

    def judge(self, session: "Session", hello: Hello) -> str:
        """A valid greeting came: the empty string lets it in, ``WAIT`` asks for patience, else the reason why not."""

    def opened(self, session: "Session") -> None:
        """Both greetings were exchanged."""

    def received(self, session: "Session", message: Message, lane: Lane, size: int) -> None:
        """A message on an open session."""

    def echoed(self, session: "Session", echo: PathEcho, lane: Lane) -> None:
        """Paths are being compared."""

    def taken(self, session: "Session") -> bool:
        """The peer says that this session counts from now on; False when nobody spoke of that."""

    def ended(self, session: "Session", was: "State", reason: str) -> None:
        """Comes exactly once."""


class State(enum.Enum):
    """See the module."""

    HANDSHAKE = "handshake"
    GREETING = "greeting"
    TRIAL = "trial"
    OPEN = "open"
    LINGERING = "lingering"
    CLOSED = "closed"


class Session:
    """See the module. ``dialled`` is whether this node began; ``expect`` pins the peer when it is known."""

    def __init__(
        self,
        host: SessionHost,
        carrier: Carrier,
        *,
        dialled: bool,
        target: str = "",
        expect: NodeId | None = None,
        trial: bool = False,
    ) -> None:
        self._host = host
        self.carrier = carrier
        self.dialled = dialled
        self.target = target
        self.trial = trial
        """Begun beside the session that counts; the accepting end learns it from the greeting."""
        self.state = State.HANDSHAKE
        self.peer: NodeId | None = None
        self.peer_public_key = b""
        self.hello: Hello | None = None
        self.waiting: Hello | None = None
        """A greeting that is not judged yet, since ``waits_since_us``."""
        self.waits_since_us = 0
        self.since_us = host.now_us()
        self._expect = expect
        self._deadline_us: int | None = self.since_us + host.hello_timeout_us
        self._bucket = TokenBucket(host.message_rate, 2 * host.message_rate)

    # ---- from below -------------------------------------------------------------------------------------------------

    def established(self, public_key: bytes | None) -> None:
        """Pin the peer: its id is the hash of the key it proved to own."""
        if self.state is not State.HANDSHAKE:
            return
        if public_key is None:
            self.end("no_certificate")
            return
        self.peer_public_key = public_key
        self.peer = node_id_of(public_key)
        if self._expect not in {None, self.peer}:
            self.end("wrong_identity")
            return
        self.state = State.GREETING
        self._deadline_us = self._host.now_us() + self._host.hello_timeout_us
        if self.dialled:
            if self.peer not in self._host.book:
                self.end(self._host.book.barred_as(self.peer) or "unadmitted")
                return
            self._write(self._host.greeting(self))

    def frame(self, raw: bytes, lane: Lane) -> None:
        """Judge one envelope, whatever sent it."""
        if self.state not in {State.GREETING, State.OPEN, State.TRIAL}:
            self._host.counters.drop("closed")
            return
        if self.waiting is not None:
            self._host.counters.drop("hello_first")
            return
        now_us = self._host.now_us()
        if not self._bucket.take(now_us):
            self._host.counters.drop("rate")
            return
        try:
            message = decode(raw)
        except WireError as error:
            self._malformed(error.reason)
            return
        if message is None:
            self._host.counters.drop("unknown_type")
        elif self.state is not State.GREETING:
            self._open_message(message, lane, len(raw))
        elif lane == "datagram":
            self._host.counters.drop("hello_first")  # overtook the greeting; datagrams are not ordered
        else:
            self._first_message(message)

    def broken(self, reason: str) -> None:
        """Framing was violated: nothing after it can be trusted."""
        if self.state in {State.OPEN, State.TRIAL} and reason != "peer_closed":
            self._host.counters.reject(reason)
        self.end(reason)

    def closed(self, reason: str) -> None:
        """The carrier is gone."""
        failed = self.state is State.HANDSHAKE and reason == "peer_closed"
        self.end("handshake_failed" if failed else reason)

    # ---- from above -------------------------------------------------------------------------------------------------

    def send(self, message: Message, lane: Lane) -> bool:
        """See ``Transport.send``."""
        if self.state not in {State.OPEN, State.TRIAL}:
            return False
        try:
            raw = encode(message)
        except WireError as error:
            self._host.counters.drop(error.reason)
            return False
        small = lane == "datagram" and len(raw) <= MAX_DATAGRAM_BYTES
        if small and self.carrier.datagrams and self.carrier.write_datagram(raw):
            self._host.counters.messages["send"] += 1
            self._host.counters.lanes["send", "datagram"] += 1
            return True
        if self.carrier.outstanding_bytes() + len(raw) > self._host.outstanding_limit:
            self._host.counters.drop("outstanding_bound")
            return False
        self.carrier.write(raw)
        self._host.counters.messages["send"] += 1
        self._host.counters.lanes["send", "stream"] += 1
        return True

    def promote(self) -> None:
        """The path was better: this session is one that counts."""
        assert self.state is State.TRIAL, self.state
        self.state, self._deadline_us = State.OPEN, None

    def linger(self) -> None:
        """A better connection to the same peer exists: still listen for a moment, then close."""
        if self.state is State.OPEN:
            self._deadline_us = self._host.now_us() + LINGER_US

    def resume(self) -> None:
        """The better connection is gone: this one counts again."""
        if self.state is State.OPEN:
            self._deadline_us = None

    @property
    def in_motion(self) -> bool:
        """It begins, is measured, is on its way out, or is not judged yet."""
        return self.state is not State.OPEN or self._deadline_us is not None or self.waiting is not None

    def overdue(self, now_us: int, read_timeout_us: int) -> str:
        """Why this session must end now; empty when it need not."""
        if self._deadline_us is not None and now_us >= self._deadline_us:
            match self.state:
                case State.HANDSHAKE:
                    return "timeout"
                case State.GREETING:
                    return "hello_timeout"
                case State.TRIAL:
                    return "not_better"
                case _:
                    return "replaced" if self.state is State.OPEN else "closed"
        begun_us = self.carrier.pending_since_us()
        return "read_timeout" if begun_us is not None and now_us - begun_us > read_timeout_us else ""

    def end(self, reason: str) -> None:
        """The only way out. Safe to call again."""
        if self.state is State.CLOSED:
            return
        was, self.state = self.state, State.CLOSED
        book, peer = self._host.book, self.peer
        known = peer is not None and (peer in book or book.is_barred(peer))
        if peer is not None and reason in BARRED and was in {State.GREETING, State.OPEN, State.TRIAL}:
            self._write(GossipPush(gossip=Gossip(admissions=book.proof_against(peer))))
        self.carrier.shut(reason if known else TOLD_TO_STRANGERS)
        self._host.ended(self, was, reason)

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _first_message(self, message: Message) -> None:
        book, peer = self._host.book, self.peer
        assert peer is not None
        if reason := book.barred_as(peer):  # only now: the dialler has opened the stream that the proof goes by
            self.end(reason)
        elif isinstance(message, Hello):
            self._greet(message)
        elif isinstance(message, GossipPush) and peer in book:
            book.merge_all(message.gossip.admissions)  # why this node is turned away, as the book of the peer has it
            self.end(book.barred_as(self._host.node_id) or "hello_first")
        elif isinstance(message, JoinRequest) and not self.dialled:
            answer = self._host.redeem(self, message)
            if isinstance(answer, JoinRefused):
                self._host.counters.reject("join_refused")
            self.state = State.LINGERING
            self._deadline_us = self._host.now_us() + LINGER_US
            self._write(answer)
        else:
            self.end("hello_first" if peer in book else "unadmitted")

    def _greet(self, hello: Hello) -> None:
        host, peer = self._host, self.peer
        assert peer is not None
        if hello.mesh_id != host.book.mesh_id:
            self.end("wrong_mesh")
            return
        if peer not in host.book:
            host.book.merge_all(hello.admissions)
        if peer not in host.book:
            self.end("unadmitted")
            return
        if self.dialled and hello.trial != self.trial:
            self.end("unexpected_message")
            return
        self.trial = hello.trial
        self.waits_since_us = host.now_us()
        self.decide(hello)

    def decide(self, hello: Hello) -> None:
        """Judge the greeting; the host calls again as long as it says ``WAIT``."""
        host = self._host
        reason = host.judge(self, hello)
        self.waiting = hello if reason == WAIT else None
        if reason:
            if reason != WAIT:
                self.end(reason)
            return
        self.hello = hello
        if not self.dialled:
            self._write(host.greeting(self))
        self.state = State.TRIAL if self.trial else State.OPEN
        self._deadline_us = host.now_us() + TRIAL_US if self.trial else None
        self.carrier.trust()
        host.opened(self)

    def _open_message(self, message: Message, lane: Lane, size: int) -> None:
        book, peer = self._host.book, self.peer
        assert peer is not None
        if reason := book.barred_as(peer):
            self.end(reason)
        elif peer not in book:
            self._host.counters.drop("unadmitted")  # nobody vouches for it at the moment: see the host's sweep
        elif isinstance(message, Hello | JoinRequest | JoinAccepted | JoinRefused):
            self._host.counters.drop("unexpected_message")
        elif isinstance(message, PathEcho):
            self._host.echoed(self, message, lane)
        elif isinstance(message, PathTake):
            if not self._host.taken(self):
                self._host.counters.drop("unexpected_message")
        elif self.state is State.TRIAL:
            self._host.counters.drop("hello_first")  # overtook the agreement that this session counts
        else:
            self._host.counters.messages["receive"] += 1
            self._host.counters.lanes["receive", lane] += 1
            self._host.received(self, message, lane, size)

    def _malformed(self, reason: str) -> None:
        """Frame boundaries are intact, so an open session drops one bad message; before that it is the end."""
        if self.state in {State.OPEN, State.TRIAL}:
            self._host.counters.reject(reason)  # before that, the end of the session counts it
            if reason == "malformed":
                return
        self.end(reason)

    def _write(self, message: Message) -> None:
        self.carrier.write(encode(message))
