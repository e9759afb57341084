"""The real transport: QUIC sessions over one UDP socket for accepting and dialling.

This shell owns the socket and the clockwork. What may be said on a session stands in ``session``, which of two
connections counts in ``peers`` and ``table``, who may begin a handshake in ``router`` and ``limits``. One timer sweeps
all deadlines, keeps connections alive and looks at the conditioner's file.
"""

import asyncio
import socket
from collections.abc import Callable, Mapping

from config.settings import ListenSettings, QuicSettings
from protocol.admission import AdmissionBook
from protocol.errors import AddressError, ConfigurationError
from protocol.ids import MeshId, NodeId
from protocol.messages import Hello, Message
from protocol.quic.address import HostPort, for_socket, numeric, parse_address
from protocol.quic.carrier import QuicCarrier
from protocol.quic.conditioner import Conditioner
from protocol.quic.identity import Identity
from protocol.quic.interface import (
    ConditionerReloaded,
    DialFailed,
    JoinDesk,
    Lane,
    PeerConnection,
    TransportCounters,
    TransportEvent,
)
from protocol.quic.limits import HandshakeGate
from protocol.quic.mutual import MutualQuicConnection, quic_configuration, self_test
from protocol.quic.router import Router, bind_udp
from protocol.quic.session import Session
from protocol.quic.table import PeerTable

SWEEP_S = 0.1
"""Deadlines are kept to this precision."""
RELOAD_SWEEPS = 5
"""Sweeps between looks at the conditioner's file."""
LAG_SWEEPS = 10
"""Sweeps over which the worst lateness of the loop is kept."""
CLOSE_GRACE_S = 0.05
"""Time for the last packets of a shutdown to leave."""


class QuicTransport:
    """See ``interface.Transport``. ``events`` is called on the loop and must not raise.

    ``hello`` is this process's own greeting; the transport adds what it sees of the peer's address and the proof of
    admission. ``desk`` answers strangers who want to join; without one they are refused.
    """

    def __init__(
        self,
        *,
        identity: Identity,
        settings: QuicSettings,
        listen: ListenSettings,
        admission: AdmissionBook,
        mesh_id: MeshId,
        conditioner: Conditioner,
        events: Callable[[TransportEvent], None],
        clock_us: Callable[[], int],
        hello: Hello,
        desk: JoinDesk | None = None,
    ) -> None:
        assert admission.mesh_id == mesh_id
        self.table = PeerTable(
            node_id=identity.node_id,
            book=admission,
            hello=hello,
            settings=settings,
            events=events,
            clock_us=clock_us,
            desk=desk,
            on_open=self._on_open,
        )
        self.counters: TransportCounters = self.table.counters
        self.started = asyncio.Event()
        self.port = listen.port
        self._identity = identity
        self._settings = settings
        self._listen = listen
        self._conditioner = conditioner
        self._clock_us = clock_us
        self._gate = HandshakeGate(settings.handshakes_per_second)
        self._router: Router | None = None
        self._family = socket.AF_INET
        self._tasks: asyncio.TaskGroup | None = None

    # ---- Transport --------------------------------------------------------------------------------------------------

    @property
    def connected(self) -> Mapping[NodeId, PeerConnection]:
        """Living connections by peer."""
        return self.table.connected

    async def run(self) -> None:
        """Bind, serve until cancelled, say goodbye. Raises ``AddressError`` or ``IdentityError`` before anything else."""
        self_test()
        bound = bind_udp(self._listen.host, self._listen.port)
        self._family, self.port = bound.family, bound.getsockname()[1]
        router = Router(
            configuration=quic_configuration(self._identity, is_client=False, idle_timeout_s=self._idle_s),
            accept=self._accept,
            strangers=lambda: self.table.strangers,
            strangers_max=self._settings.max_unadmitted_connections,
            gate=self._gate,
            counters=self.counters,
            now_us=self._clock_us,
        )
        await asyncio.get_running_loop().create_datagram_endpoint(lambda: router, sock=bound)
        self._router = router
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                tasks.create_task(self._sweep_for_ever(), name="transport deadlines")
                self.started.set()
        finally:
            self._tasks = None
            self.table.close_all("closed")
            await asyncio.sleep(CLOSE_GRACE_S)
            router.close()
            self._router = None
            self.started.clear()

    def dial(self, address: str, expect: NodeId | None = None) -> None:
        """See ``Transport.dial``. Fails with reason ``address`` while ``run`` has not bound."""
        if self.table.knows_way(address, expect):
            return
        try:
            target = parse_address(address)
        except AddressError:
            target = None
        if target is None or self._tasks is None:
            self.table.emit(DialFailed(address, "address"))
            return
        self.table.dialling.add(address)
        if numeric(target):
            self._connect(address, target, expect)
        else:
            self._tasks.create_task(self._resolve(address, target, expect), name=f"resolve {address}")

    def send(self, peer: NodeId, message: Message, lane: Lane) -> bool:
        """See ``Transport.send``."""
        return self.table.send(peer, message, lane)

    def close(self, peer: NodeId, reason: str) -> None:
        """See ``Transport.close``."""
        self.table.close(peer, reason)

    # ---- connections ------------------------------------------------------------------------------------------------

    @property
    def _idle_s(self) -> float:
        return self._settings.idle_timeout_us / 1_000_000

    async def _resolve(self, address: str, target: HostPort, expect: NodeId | None) -> None:
        try:
            async with asyncio.timeout(self._settings.connect_timeout_us / 1_000_000):
                found = await asyncio.get_running_loop().getaddrinfo(target.host, target.port, type=socket.SOCK_DGRAM)
        except (OSError, TimeoutError):
            found = []
        usable = [entry[4][0] for entry in found if for_socket(str(entry[4][0]), target.port, self._family)]
        if usable:
            self._connect(address, HostPort(str(usable[0]), target.port), expect)
        else:
            self._dial_failed(address, "address")

    def _connect(self, address: str, target: HostPort, expect: NodeId | None) -> None:
        where = for_socket(target.host, target.port, self._family)
        if where is None or self._router is None:
            self._dial_failed(address, "address")
            return
        quic = MutualQuicConnection(
            configuration=quic_configuration(self._identity, is_client=True, idle_timeout_s=self._idle_s)
        )
        carrier = self._carrier(quic, dialled=True, target=address, expect=expect)
        self._router.register(carrier, quic.host_cid)
        if expect is not None:
            self._router.shape(carrier, self._conditioner.link(expect))
        self.counters.handshakes["started"] += 1
        carrier.connect(where)

    def _dial_failed(self, address: str, reason: str) -> None:
        self.table.dialling.discard(address)
        self.counters.reject(reason)
        self.table.emit(DialFailed(address, reason))

    def _accept(self, quic: MutualQuicConnection) -> QuicCarrier:
        return self._carrier(quic, dialled=False)

    def _carrier(
        self, quic: MutualQuicConnection, *, dialled: bool, target: str = "", expect: NodeId | None = None
    ) -> QuicCarrier:
        assert self._router is not None
        carrier = QuicCarrier(quic, send=self._router.send, now_us=self._clock_us, dialled=dialled)
        session = Session(self.table, carrier, dialled=dialled, target=target, expect=expect)
        carrier.conversation = session
        self.table.add(session)
        return carrier

    def _on_open(self, session: Session) -> None:
        assert session.peer is not None
        assert session.hello is not None
        self._conditioner.name(session.peer, session.hello.name)
        self._gate.remember(parse_address(session.carrier.address).host)
        if self._router is not None and isinstance(session.carrier, QuicCarrier):
            self._router.shape(session.carrier, self._conditioner.link(session.peer))

    # ---- clockwork --------------------------------------------------------------------------------------------------

    async def _sweep_for_ever(self) -> None:
        loop = asyncio.get_running_loop()
        sweeps, worst_s, recent_s = 0, 0.0, 0.0
        while True:
            due = loop.time() + SWEEP_S
            await asyncio.sleep(SWEEP_S)
            recent_s = max(recent_s, loop.time() - due)
            sweeps += 1
            if sweeps % LAG_SWEEPS == 0:
                worst_s, recent_s = recent_s, 0.0
            self.counters.loop_lag_us = round(max(worst_s, recent_s) * 1_000_000)
            self.table.sweep()
            self._keep_alive()
            if sweeps % RELOAD_SWEEPS == 0:
                self._reload()

    def _keep_alive(self) -> None:
        quiet_since_us = self._clock_us() - self._settings.keepalive_us
        for session in self.table.peers.values():
            carrier = session.carrier
            if session.dialled and isinstance(carrier, QuicCarrier) and carrier.sent_us < quiet_since_us:
                carrier.keep_alive()

    def _reload(self) -> None:
        try:
            if self._conditioner.reload():
                self.table.emit(ConditionerReloaded())
        except ConfigurationError as error:
            self.table.emit(ConditionerReloaded(str(error)))
