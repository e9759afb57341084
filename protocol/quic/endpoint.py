"""The real transport: QUIC sessions over one UDP socket for accepting and dialling, TLS over TCP on the same port number.

This shell owns the sockets and the clockwork. What may be said on a session stands in ``session``, which of two
connections counts in ``peers`` and ``table``, who may begin a handshake in ``router`` and ``limits``, how a peer is
reached in ``dialling``. One timer sweeps all deadlines, keeps connections alive and looks at the conditioner's file.
"""

import asyncio
import socket
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial

from config.settings import ListenSettings, QuicSettings
from protocol.admission import AdmissionBook
from protocol.beat import EARLY_US, next_slow_beat_us, phase_us
from protocol.errors import AddressError, ConfigurationError
from protocol.ids import MeshId, NodeId
from protocol.messages import Hello, Message
from protocol.quic.address import parse_address
from protocol.quic.bulk import BulkReader, BulkWriter
from protocol.quic.carrier import QuicCarrier
from protocol.quic.conditioner import Conditioner
from protocol.quic.dialling import Dialler
from protocol.quic.identity import Identity
from protocol.quic.interface import (
    ConditionerReloaded,
    DialFailed,
    Direction,
    JoinDesk,
    Lane,
    LimitedBy,
    PeerConnection,
    TransferObserved,
    TransportCounters,
    TransportEvent,
)
from protocol.quic.limits import HandshakeGate
from protocol.quic.mutual import MutualQuicConnection, quic_configuration, self_test
from protocol.quic.router import Router
from protocol.quic.session import Session
from protocol.quic.table import PeerTable
from protocol.quic.tcp_lane import BulkHandler, LaneHost, TcpLane, bind_tcp
from protocol.quic.tls import LaneContexts
from protocol.quic.tls_carrier import TlsCarrier
from protocol.quic.udp_socket import bind_udp

SWEEP_US = 250_000
"""Between sweeps while a session begins or ends; at every slow beat they also look at silent sessions and the shapes' file."""
CLOSE_GRACE_S = 0.05
"""Time for the last packets of a shutdown to leave."""
PORT_TRIES = 16
"""With port 0: how often to look for a number that is free for UDP and TCP."""


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
            on_dial_failed=self._on_dial_failed,
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
        self._contexts = LaneContexts(identity, admission)
        self._router: Router | None = None
        self._lane: TcpLane | None = None
        self._dialler: Dialler | None = None
        self.on_bulk: BulkHandler | None = None
        """Serves incoming bulk streams; None refuses them."""

    # ---- Transport --------------------------------------------------------------------------------------------------

    @property
    def connected(self) -> Mapping[NodeId, PeerConnection]:
        """Living connections by peer."""
        return self.table.connected

    async def run(self) -> None:
        """Bind, serve until cancelled, say goodbye. Raises ``AddressError`` or ``IdentityError`` before anything else."""
        self_test()
        udp, tcp = _bind(self._listen)
        self.port = udp.getsockname()[1]
        router = Router(
            configuration=quic_configuration(
                self._identity, is_client=False, idle_timeout_s=self._settings.idle_timeout_us / 1_000_000
            ),
            accept=self._accept,
            strangers=self._strangers,
            strangers_max=self._settings.max_unadmitted_connections,
            gate=self._gate,
            counters=self.counters,
            now_us=self._clock_us,
        )
        with closing(tcp):
            router.attach(udp)
            try:
                async with asyncio.TaskGroup() as tasks:
                    self._begin(router, udp.family, tasks)
                    assert self._lane is not None
                    tasks.create_task(self._lane.serve(tcp), name="tls accept")
                    tasks.create_task(self._sweep_for_ever(), name="transport deadlines")
                    self.started.set()
            finally:
                self.started.clear()
                self._dialler = self._lane = None
                self.table.close_all("closed")
                await asyncio.sleep(CLOSE_GRACE_S)
                router.close()
                self._router = None

    def dial(self, address: str, expect: NodeId | None = None, *, beside: bool = False) -> None:
        """See ``Transport.dial``. Fails with reason ``address`` while ``run`` has not bound."""
        if beside and expect is not None:
            if self._dialler is not None and self.table.may_try(expect, address):
                self._dialler.explore(address, expect)
            return
        if self.table.knows_way(address, expect):
            return
        if self._dialler is None:
            self.table.emit(DialFailed(address, "address"))
        else:
            self._dialler.dial(address, expect)

    def send(self, peer: NodeId, message: Message, lane: Lane) -> bool:
        """See ``Transport.send``."""
        return self.table.send(peer, message, lane)

    def close(self, peer: NodeId, reason: str) -> None:
        """See ``Transport.close``."""
        self.table.close(peer, reason)

    async def open_bulk(self, peer: NodeId, kind: str, header: bytes) -> tuple[BulkReader, BulkWriter]:
        """A bulk stream of ``kind`` (at most 32 characters) to a connected peer; ``header`` at most 64 KiB.

        Raises ``ConnectionError`` when the peer is not connected, cannot be reached by TCP or does not take the stream,
        ``TimeoutError`` when nobody answers in time.
        """
        held = self.connected.get(peer)
        if held is None or self._lane is None:
            raise ConnectionRefusedError(f"{peer} is not connected")
        addresses = list(dict.fromkeys((held.address, *held.hello.addresses)))
        for address in addresses[:-1]:
            try:
                return await self._bulk_to(self._lane, peer, address, kind, header)
            except OSError:
                continue
        return await self._bulk_to(self._lane, peer, addresses[-1], kind, header)

    # ---- connections ------------------------------------------------------------------------------------------------

    def _begin(self, router: Router, family: socket.AddressFamily, tasks: asyncio.TaskGroup) -> None:
        host = LaneHost(
            contexts=self._contexts,
            settings=self._settings,
            gate=self._gate,
            counters=self.counters,
            admitted=self.table.book.__contains__,
            strangers=self._strangers,
            now_us=self._clock_us,
            link=self._conditioner.link,
            observe=lambda peer: partial(self._observed, peer),
            control=self._control,
            tunnel=router.serve_tunnel,
        )
        self._router, self._lane = router, TcpLane(host, tasks, self._bulk_arrived)
        self._dialler = Dialler(
            identity=self._identity,
            settings=self._settings,
            table=self.table,
            router=router,
            lane=self._lane,
            conditioner=self._conditioner,
            tasks=tasks,
            family=family,
            now_us=self._clock_us,
        )

    def _strangers(self) -> int:
        return self.table.strangers + (self._lane.strangers if self._lane is not None else 0)

    def _accept(self, quic: MutualQuicConnection) -> QuicCarrier:
        assert self._router is not None
        carrier = QuicCarrier(
            quic, send=self._router.send, shape=self._router.shape, now_us=self._clock_us, dialled=False
        )
        carrier.conversation = session = Session(self.table, carrier, dialled=False)
        self.table.add(session)
        return carrier

    async def _control(
        self, _: NodeId, public_key: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """A peer for whom UDP does not pass."""
        carrier = TlsCarrier(reader, writer, now_us=self._clock_us, idle_s=self._settings.idle_timeout_us / 1_000_000)
        carrier.conversation = session = Session(self.table, carrier, dialled=False)
        self.table.add(session)
        session.established(public_key)
        await carrier.run()

    async def _bulk_arrived(
        self, peer: NodeId, kind: str, header: bytes, reader: BulkReader, writer: BulkWriter
    ) -> None:
        if self.on_bulk is not None:
            await self.on_bulk(peer, kind, header, reader, writer)

    async def _bulk_to(
        self, lane: TcpLane, peer: NodeId, address: str, kind: str, header: bytes
    ) -> tuple[BulkReader, BulkWriter]:
        target = parse_address(address)
        return await lane.open_bulk(peer, (target.host, target.port), kind, header)

    def _observed(self, peer: NodeId, direction: Direction, size: int, duration_us: int, limit: LimitedBy) -> None:
        shaped = self._conditioner.is_shaped(peer)
        self.table.emit(TransferObserved(peer, direction, size, duration_us, limit, shaped))

    def _on_open(self, session: Session) -> None:
        assert session.peer is not None
        assert session.hello is not None
        if self._dialler is not None:
            self._dialler.opened(session)
        self._conditioner.name(session.peer, session.hello.name)
        self._shape(session)
        self._gate.remember(parse_address(session.carrier.address).host)

    def _shape(self, session: Session) -> None:
        assert session.peer is not None
        host = parse_address(session.carrier.address).host
        session.carrier.shape(self._conditioner.link(session.peer, host))

    def _on_dial_failed(self, session: Session, reason: str) -> None:
        if self._dialler is not None:
            self._dialler.failed(session, reason)

    # ---- clockwork --------------------------------------------------------------------------------------------------

    async def _sweep_for_ever(self) -> None:
        phase, version = phase_us(self._identity.node_id), self.table.book.version
        slow_us = next_slow_beat_us(self._clock_us(), phase)
        worst_us = recent_us = 0
        while True:
            now_us = self._clock_us()
            due_us = min(slow_us, now_us + SWEEP_US) if self.table.in_motion else max(slow_us, now_us)
            await asyncio.sleep((due_us - now_us + EARLY_US) / 1_000_000)
            now_us = self._clock_us()
            recent_us = max(recent_us, now_us - due_us - EARLY_US)
            self.counters.loop_lag_us = max(worst_us, recent_us)
            if now_us >= slow_us:
                slow_us, worst_us, recent_us = next_slow_beat_us(now_us, phase), recent_us, 0
                self._slow_sweep()
            self.table.sweep()
            if version != self.table.book.version:
                version = self.table.book.version
                if self._lane is not None:
                    self._lane.cut_strangers()

    def _slow_sweep(self) -> None:
        self.table.follow()
        quiet_since_us = self._clock_us() - self._settings.keepalive_us
        for session in self.table.peers.values():
            if session.dialled and session.carrier.sent_us < quiet_since_us:
                session.carrier.keep_alive()
        if self._dialler is not None:
            self._dialler.mend()
        try:
            if self._conditioner.reload():
                for session in self.table.peers.values():
                    self._shape(session)
                self.table.emit(ConditionerReloaded())
        except ConfigurationError as error:
            self.table.emit(ConditionerReloaded(str(error)))


def _bind(listen: ListenSettings) -> tuple[socket.socket, socket.socket]:
    """UDP and TCP sockets with one port number. Raises ``AddressError``; then neither is left open."""
    for attempt in range(PORT_TRIES):
        udp = bind_udp(listen.host, listen.port)
        try:
            return udp, bind_tcp(listen.host, udp.getsockname()[1])
        except AddressError:
            udp.close()
            if listen.port or attempt == PORT_TRIES - 1:
                raise
    raise AssertionError("the loop returns or raises")
