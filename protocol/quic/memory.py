"""The in-memory twin of the transport: the same sessions, table and codec over a network that lives on virtual time.

Nothing here knows asyncio. The owner gives ``schedule(delay_us, call)`` and a clock; every frame is really encoded and
decoded. Datagrams can be lost, duplicated and overtake each other; streams are reliable and ordered, but a cut link
carries neither, and a session that heard nothing for the idle timeout ends on both sides.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from config.settings import QuicSettings
from protocol.admission import AdmissionBook
from protocol.ids import NodeId
from protocol.messages import Hello, Message
from protocol.quic.conditioner import LinkShape, ShapedLink
from protocol.quic.interface import DialFailed, JoinDesk, Lane, Path, PeerConnection, TransportEvent
from protocol.quic.session import Session
from protocol.quic.table import PeerTable

Schedule = Callable[[int, Callable[[], None]], None]
SWEEP_US = 100_000


@dataclass(slots=True)
class MemoryNetwork:
    """Who is reachable where, and how the links are. ``cut`` holds directed pairs of addresses that carry nothing."""

    schedule: Schedule
    clock_us: Callable[[], int]
    die: random.Random
    shape: Callable[[str, str], LinkShape] = lambda _source, _target: LinkShape(delay_us=100)
    nodes: dict[str, "MemoryTransport"] = field(default_factory=dict)
    cut: set[tuple[str, str]] = field(default_factory=set)
    bytes_sent: int = 0

    def carry(
        self, source: str, target: str, size: int, deliver: Callable[[], None], *, lossy: bool, after_us: int = 0
    ) -> int:
        """Take bytes from one address to another, or lose them. When they arrive, never before ``after_us``."""
        shape = self.shape(source, target)
        self.bytes_sent += size
        if (source, target) in self.cut or (lossy and shape.loss and self.die.random() < shape.loss):
            return after_us
        jitter_us = int(self.die.random() * shape.jitter_us) if lossy else 0
        transfer_us = -(-size * 1_000_000 // shape.bytes_per_s) if shape.bytes_per_s else 0
        resent_us = 2 * shape.delay_us if not lossy and shape.loss and self.die.random() < shape.loss else 0
        now_us = self.clock_us()
        arrives_us = max(after_us, now_us + shape.delay_us + jitter_us + transfer_us + resent_us)
        self.schedule(arrives_us - now_us, deliver)
        return arrives_us


class MemoryTransport:
    """See ``interface.Transport``. ``start`` puts the node on the network, ``stop`` (also a crash) takes it off."""

    def __init__(
        self,
        *,
        network: MemoryNetwork,
        address: str,
        public_key: bytes,
        node_id: NodeId,
        settings: QuicSettings,
        admission: AdmissionBook,
        events: Callable[[TransportEvent], None],
        hello: Hello,
        desk: JoinDesk | None = None,
    ) -> None:
        self.address = address
        self.public_key = public_key
        self.network = network
        self.idle_us = settings.idle_timeout_us
        self.table = PeerTable(
            node_id=node_id,
            book=admission,
            hello=hello,
            settings=settings,
            events=events,
            clock_us=network.clock_us,
            desk=desk,
            on_open=lambda _: None,
            on_dial_failed=self._dial_failed,
        )
        self.counters = self.table.counters
        self._generation = 0

    @property
    def connected(self) -> Mapping[NodeId, PeerConnection]:
        """Living connections by peer."""
        return self.table.connected

    @property
    def running(self) -> bool:
        """Whether it is on the network."""
        return self.network.nodes.get(self.address) is self

    def start(self) -> None:
        """Be reachable, and begin to sweep deadlines."""
        self.network.nodes[self.address] = self
        self._generation += 1
        self._sweep(self._generation)

    def stop(self, *, goodbye: bool = True) -> None:
        """Leave the network; without ``goodbye`` as a killed process does, which tells nobody."""
        if not goodbye:
            self.network.nodes.pop(self.address, None)
        self.table.close_all("closed")
        self.network.nodes.pop(self.address, None)

    def dial(self, address: str, expect: NodeId | None = None, *, beside: bool = False) -> None:
        """See ``Transport.dial``."""
        if beside and expect is not None:
            if self.table.may_try(expect, address):
                self._connect(address, expect, trial=True)
        elif not self.table.knows_way(address, expect):
            self._connect(address, expect)

    def _connect(self, address: str, expect: NodeId | None, *, trial: bool = False) -> None:
        near = MemoryCarrier(self, address)
        session = Session(self.table, near, dialled=True, target=address, expect=expect, trial=trial)
        near.session = session
        self.table.add(session)
        if expect is not None and trial:
            self.table.trials.begin(expect, session)
        self.network.carry(self.address, address, 1_200, lambda: self._arrive(near, address), lossy=False)

    def send(self, peer: NodeId, message: Message, lane: Lane) -> bool:
        """See ``Transport.send``."""
        return self.table.send(peer, message, lane)

    def close(self, peer: NodeId, reason: str) -> None:
        """See ``Transport.close``."""
        self.table.close(peer, reason)

    def _dial_failed(self, session: Session, reason: str) -> None:
        if not session.trial:
            self.table.emit(DialFailed(session.target, reason))

    def _arrive(self, near: "MemoryCarrier", address: str) -> None:
        """A handshake reaches the node at ``address``, if there is one."""
        far_node = self.network.nodes.get(address)
        if far_node is None:
            return
        far = MemoryCarrier(far_node, self.address, local=address)
        near.far, far.far = far, near
        far.session = Session(far_node.table, far, dialled=False)
        far_node.table.add(far.session)
        far.session.established(self.public_key)
        answer = far_node.public_key
        self.network.carry(address, self.address, 1_200, lambda: near.shaken(answer), lossy=False)

    def _sweep(self, generation: int) -> None:
        if not self.running or generation != self._generation:
            return
        now_us = self.network.clock_us()
        for session in list(self.table.peers.values()):
            if now_us - session.carrier.heard_us > self.idle_us:
                session.closed("idle_timeout")
        self.table.sweep()
        self.table.follow()
        self.network.schedule(SWEEP_US, lambda: self._sweep(generation))


class MemoryCarrier:
    """One end of a connection; see ``session.Carrier``."""

    def __init__(self, node: MemoryTransport, address: str, local: str = "") -> None:
        self._node = node
        self._address = address
        self._local = local or node.address
        """Answers leave from the address that was dialled."""
        self.session: Session | None = None
        self.far: MemoryCarrier | None = None
        self._shut = False
        self._arrives_us = 0
        """When the last bytes of the stream arrive: what is written later arrives no sooner."""
        self._outstanding = 0
        self.sent_us = self.heard_us = node.network.clock_us()
        self.unanswered_since_us: int | None = None

    @property
    def path(self) -> Path:
        """As if by QUIC."""
        return "quic"

    @property
    def address(self) -> str:
        """The other end's."""
        return self._address

    @property
    def interface(self) -> str:
        """There is none."""
        return ""

    @property
    def late_us(self) -> int:
        """Not known here."""
        return 0

    @property
    def datagrams(self) -> bool:
        """Always."""
        return True

    def write(self, raw: bytes) -> None:
        """Reliable: order is kept by never arriving before what was written before."""
        self._carry(raw, lossy=False)

    def write_datagram(self, raw: bytes) -> bool:
        """May be lost."""
        self._carry(raw, lossy=True)
        return True

    def outstanding_bytes(self) -> int:
        """Of the stream: on their way, not arrived yet."""
        return self._outstanding

    def pending_since_us(self) -> int | None:
        """Frames arrive whole."""
        return None

    def trust(self) -> None:
        """Frames are bounded by the codec here."""

    def keep_alive(self) -> None:
        """Sessions of the twin do not expire for being quiet in one direction."""

    def shape(self, link: ShapedLink | None) -> None:
        """Shapes belong to the network here."""
        del link

    def shut(self, reason: str) -> None:
        """Tell the other end, if the network still carries it."""
        if self._shut:
            return
        self._shut = True
        far = self.far
        if far is not None and self._node.running:
            told = "unadmitted" if reason == "refused" else reason
            self._node.network.carry(
                self._local, self._address, 40, lambda: far.left(told), lossy=False, after_us=self._arrives_us
            )

    def _carry(self, raw: bytes, *, lossy: bool) -> None:
        if self._shut or not self._node.running:
            return
        network, far = self._node.network, self.far
        self.sent_us = network.clock_us()
        self._node.counters.bytes["send"] += len(raw)
        if far is None:
            return
        if lossy:
            network.carry(self._local, self._address, len(raw), lambda: far.take(raw, lossy=True), lossy=True)
            return

        def arrive() -> None:
            self._outstanding -= len(raw)
            far.take(raw, lossy=False)

        self._outstanding += len(raw)
        self._arrives_us = network.carry(
            self._local, self._address, len(raw), arrive, lossy=False, after_us=self._arrives_us
        )

    def shaken(self, public_key: bytes) -> None:
        """The other end's half of the handshake arrives."""
        if self.session is not None and self._node.running:
            self.session.established(public_key)

    def left(self, reason: str) -> None:
        """The other end's goodbye arrives."""
        if self.session is not None:
            self.session.closed(reason)

    def take(self, raw: bytes, *, lossy: bool) -> None:
        """Bytes arrive."""
        if self.session is not None and self._node.running:
            self.heard_us = self._node.network.clock_us()
            self._node.counters.bytes["receive"] += len(raw)
            self.session.frame(raw, "datagram" if lossy else "stream")
