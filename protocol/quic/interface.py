"""What the rest of the node sees of the network: one ``Transport``, its events and its counters.

Both the real transport (``endpoint.QuicTransport``) and its in-memory twin (``memory.MemoryTransport``) are this.
Everything happens on one event loop; events are delivered by a plain call and must be taken quickly.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from protocol.ids import Instance, NodeId
from protocol.messages import Hello, JoinAccepted, JoinRefused, JoinRequest, Message
from protocol.rows import Admission

Lane = Literal["datagram", "stream"]
Path = Literal["quic", "tls"]
"""``tls``: UDP does not get through and control runs over TCP; to be shown as degraded."""
LimitedBy = Literal["link", "app", "cpu", "window"]
Direction = Literal["send", "receive"]

REASONS = frozenset({
    "no_certificate", "unadmitted", "unverified_admission", "wrong_mesh", "wrong_identity", "self", "identity_conflict",
    "older_boot", "revoked", "superseded", "duplicate", "replaced", "handshake_rate", "unadmitted_limit", "hello_timeout",
    "read_timeout", "oversized", "malformed", "truncated", "version", "unexpected_stream", "unexpected_message",
    "unknown_type", "rate", "outstanding_bound", "timeout", "idle_timeout", "peer_closed", "closed", "handshake_failed",
    "address", "join_refused", "unknown_connection", "not_quic", "tls_failed", "hello_first", "datagram_bound", "shaped_loss",
    "shaped_queue", "shaped_mtu", "connections", "crash", "not_better", "send_buffer",
    "unreachable",
})  # fmt: skip
"""Every reason that is ever counted or reported; nothing a peer says becomes a label."""


@dataclass(frozen=True, slots=True)
class PeerConnected:
    """Both hellos were exchanged. Comes once per peer until its ``PeerDisconnected``."""

    peer: NodeId
    address: str
    hello: Hello
    path: Path = "quic"
    interface: str = ""
    """The local one by which the peer's packets come; empty when that is not known."""


@dataclass(frozen=True, slots=True)
class PeerDisconnected:
    """No connection to the peer is left. ``reason`` is one of ``REASONS``."""

    peer: NodeId
    reason: str


@dataclass(frozen=True, slots=True)
class PeerMoved:
    """The peer's address, interface or path changed while it stayed connected: RTT is void.

    NAT rebinding, another way to the peer, a better path found beside it, UDP that went or came back.
    """

    peer: NodeId
    address: str
    path: Path
    interface: str = ""


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """One valid message from an admitted peer; ``size`` is the encoded envelope in bytes."""

    peer: NodeId
    message: Message
    lane: Lane
    size: int
    arrived_us: int = 0
    """When the packet that completed it reached this machine; earlier than now by as much as this process was busy."""


@dataclass(frozen=True, slots=True)
class DialFailed:
    """``dial(address)`` did not lead to a connection. ``reason`` is one of ``REASONS``; retrying is the caller's choice."""

    address: str
    reason: str


@dataclass(frozen=True, slots=True)
class Rejected:
    """Somebody else's connection was refused. ``address`` is for people."""

    reason: str
    address: str


@dataclass(frozen=True, slots=True)
class IdentityConflict:
    """Two living processes hold ``peer``'s key (``peer`` may be this node): it may not be planned until one is gone.

    ``turned_away``: this very process came later and was refused for it.
    """

    peer: NodeId
    instances: tuple[Instance, ...]
    address: str
    turned_away: bool = False


@dataclass(frozen=True, slots=True)
class AdmissionsLearned:
    """Statements new to this node's book, already merged: store them, and let gossip spread them."""

    admissions: tuple[Admission, ...]


@dataclass(frozen=True, slots=True)
class TransferObserved:
    """A bulk transfer as one end saw it: ``size`` bytes took ``duration_us``.

    The rate is a lower bound of the link's unless ``limited_by`` is ``link``.
    """

    peer: NodeId
    direction: Direction
    size: int
    duration_us: int
    limited_by: LimitedBy
    shaped: bool = False


@dataclass(frozen=True, slots=True)
class ConditionerReloaded:
    """The link shapes were read again; ``error`` is one line, and then the shapes before stay in force."""

    error: str = ""


class JoinDesk(Protocol):
    """Judges join requests; kept on disk by ``mesh_files.MeshDirectory``, in memory by tests."""

    def redeem(self, joiner_public_key: bytes, request: JoinRequest) -> JoinAccepted | JoinRefused:
        """The answer for the node that proved to own that key; an acceptance is durable before this returns."""


TransportEvent = (
    PeerConnected
    | PeerDisconnected
    | PeerMoved
    | MessageReceived
    | DialFailed
    | Rejected
    | IdentityConflict
    | AdmissionsLearned
    | TransferObserved
    | ConditionerReloaded
)


@dataclass(frozen=True, slots=True)
class PeerConnection:
    """A living connection, as a snapshot."""

    address: str
    since_us: int
    datagrams: bool
    path: Path
    hello: Hello
    dialled: bool
    interface: str = ""


@dataclass(slots=True)
class TransportCounters:
    """Totals since start; ``rejected`` and ``dropped`` by reason (bounded: ``REASONS``)."""

    bytes: Counter[Direction] = field(default_factory=Counter)
    messages: Counter[Direction] = field(default_factory=Counter)
    lanes: Counter[tuple[Direction, Lane]] = field(default_factory=Counter)
    """``messages`` by the lane that each took."""
    packets: Counter[Direction] = field(default_factory=Counter)
    """UDP only: what QUIC made of the messages, acknowledgements included."""
    handshakes: Counter[Literal["started", "completed", "failed"]] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    loop_lag_us: int = 0
    """Worst lateness of the transport's own timer in the last second."""

    def reject(self, reason: str) -> None:
        """Count a refused connection, message or join."""
        assert reason in REASONS, reason
        self.rejected[reason] += 1

    def drop(self, reason: str) -> None:
        """Count something that was not sent or not taken, while the connection goes on."""
        assert reason in REASONS, reason
        self.dropped[reason] += 1


class Transport(Protocol):
    """Authenticated messages between nodes. Reconnecting is decided elsewhere."""

    counters: TransportCounters

    async def run(self) -> None:
        """Bind and serve until cancelled. Raises ``AddressError`` when an address cannot be bound."""

    def dial(self, address: str, expect: NodeId | None = None, *, beside: bool = False) -> None:
        """Try once, with a deadline. Ends in ``PeerConnected`` or ``DialFailed``; nothing when already connected.

        ``beside``: ``expect`` is connected, and this address may be the better way. ``PeerMoved`` comes when it really
        is; nothing when it is not, or cannot be reached, or another way to this peer is being tried.
        """

    def send(self, peer: NodeId, message: Message, lane: Lane) -> bool:
        """Hand over a message. False when not connected or a bound is exceeded (counted); never waits.

        A datagram that is too large, or that the peer or path cannot take, goes by the stream.
        """

    def close(self, peer: NodeId, reason: str) -> None:
        """Close the connection to ``peer``, if any; ``PeerDisconnected`` follows."""

    @property
    def connected(self) -> Mapping[NodeId, PeerConnection]:
        """Living connections by peer."""
