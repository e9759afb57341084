"""Dialling: QUIC first, the TLS lane when UDP does not answer, and the way back.

An attempt ends in a session or in one ``DialFailed``. QUIC has ``TLS_AFTER_S`` for itself; then TLS is tried as well, and
whichever opens first is used (QUIC wins when both do). A peer that answers QUIC with a refusal is believed: no TLS then.

An address to *explore* is dialled by QUIC alone, beside the connection that stands; what becomes of it is judged in
``trials``, and a failure is nobody's business.

Three attempts are made unasked, and their failures are nobody's business. When a session falls silent while it sends:
beside it, in turn, the peer's addresses (a cable was pulled, or this machine has a new address), and TLS, if this node
dialled it by QUIC (UDP was blocked underneath). And QUIC, every ``udp_retry_us``, when a session runs over TLS.
"""

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from config.settings import QuicSettings
from protocol.errors import AddressError
from protocol.ids import NodeId
from protocol.links.link import host_of
from protocol.quic.address import HostPort, SocketAddress, for_socket, numeric, parse_address
from protocol.quic.carrier import QuicCarrier
from protocol.quic.conditioner import Conditioner
from protocol.quic.identity import Identity
from protocol.quic.interface import DialFailed
from protocol.quic.mutual import MutualQuicConnection, quic_configuration
from protocol.quic.router import Router
from protocol.quic.session import Session
from protocol.quic.table import PeerTable
from protocol.quic.tcp_lane import PEER_FAULTS, TcpLane
from protocol.quic.tls import peer_of
from protocol.quic.tls_carrier import TlsCarrier

TLS_AFTER_S = 1.0
SILENCE_US = 2_000_000
"""A dialled QUIC session that sent something and heard nothing for this long looks for TCP."""
MEND_EVERY_US = 5_000_000
UNANSWERED = frozenset({"timeout", "idle_timeout"})
"""Reasons after which UDP may be blocked; every other one came from the peer."""


@dataclass(slots=True)
class Attempt:
    """One address being dialled. ``quiet`` ones report nothing; a ``trial`` goes beside the session that counts."""

    address: str
    expect: NodeId | None
    quiet: bool
    trial: bool = False
    pending: int = 0
    reason: str = ""
    tls_at: asyncio.TimerHandle | None = None
    tls: asyncio.Task[None] | None = None


@dataclass(slots=True)
class Dialler:
    """See the module. Lives while the sockets do; all its tasks are the transport's."""

    identity: Identity
    settings: QuicSettings
    table: PeerTable
    router: Router
    lane: TcpLane
    conditioner: Conditioner
    tasks: asyncio.TaskGroup
    family: socket.AddressFamily
    now_us: Callable[[], int]
    _attempts: dict[str, Attempt] = field(default_factory=dict)
    _by_session: dict[Session, Attempt] = field(default_factory=dict)
    _mended_us: dict[NodeId, int] = field(default_factory=dict)
    _turns: dict[NodeId, int] = field(default_factory=dict)

    def dial(self, address: str, expect: NodeId | None) -> None:
        """Begin, unless it is under way."""
        if address in self._attempts:
            return
        self._start(Attempt(address, expect, quiet=False))

    def explore(self, address: str, peer: NodeId) -> None:
        """Try ``address`` beside the session of ``peer``, unless it is being dialled. The caller has asked ``may_try``."""
        if address not in self._attempts:
            self._start(Attempt(address, peer, quiet=True, trial=True))

    def opened(self, session: Session) -> None:
        """The attempt succeeded; what else is under way for it is not needed."""
        attempt = self._by_session.pop(session, None)
        if attempt is None:
            return
        if self._attempts.get(attempt.address) is attempt:
            del self._attempts[attempt.address]
        if attempt.tls_at is not None:
            attempt.tls_at.cancel()
        if attempt.tls is not None and session.carrier.path == "quic":
            attempt.tls.cancel()

    def failed(self, session: Session, reason: str) -> None:
        """A dialled session ended before it opened."""
        attempt = self._by_session.pop(session, None)
        if attempt is None:
            return
        if session.carrier.path == "quic" and not attempt.quiet:
            if attempt.tls_at is not None:
                attempt.tls_at.cancel()
            if reason in UNANSWERED and attempt.tls is None:
                self._fall_back(attempt)
        self._less(attempt, "" if reason == "duplicate" and session.peer in self.table.peers else reason)

    def mend(self) -> None:
        """Look for TCP or another address where all fell silent, for UDP where TCP is in use. Call about once a second."""
        now_us = self.now_us()
        for peer, session in list(self.table.peers.items()):
            carrier = session.carrier
            if session.dialled and session.target in self._attempts:
                continue
            since_us = now_us - self._mended_us.get(peer, session.since_us)
            begun_us = carrier.unanswered_since_us
            silent = begun_us is not None and now_us - begun_us >= SILENCE_US
            if silent and since_us >= MEND_EVERY_US:
                self._look_elsewhere(peer, session)
                if session.dialled and carrier.path == "quic":
                    self._mend(peer, session, self._fall_back)
            elif session.dialled and carrier.path == "tls" and since_us >= self.settings.udp_retry_us:
                self._mend(peer, session, self._quic)
        for peer in [peer for peer in self._mended_us if peer not in self.table.peers]:
            del self._mended_us[peer]
            self._turns.pop(peer, None)

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _start(self, attempt: Attempt) -> None:
        self._attempts[attempt.address] = attempt
        try:
            target = parse_address(attempt.address)
        except AddressError:
            self._give_up(attempt, "address")
            return
        if numeric(target):
            self._begin(attempt, target)
        else:
            self.tasks.create_task(self._resolve(attempt, target), name=f"resolve {attempt.address}")

    def _mend(self, peer: NodeId, session: Session, way: Callable[[Attempt], None]) -> None:
        self._mended_us[peer] = self.now_us()
        attempt = self._attempts[session.target] = Attempt(session.target, peer, quiet=True)
        way(attempt)

    def _look_elsewhere(self, peer: NodeId, session: Session) -> None:
        self._mended_us[peer] = self.now_us()
        here = host_of(session.carrier.address)
        told = session.hello.addresses if session.hello is not None else ()
        others = [address for address in told if not session.dialled or host_of(address) != here]
        if others:
            turn = self._turns[peer] = self._turns.get(peer, -1) + 1
            address = others[turn % len(others)]
            if peer not in self.table.trials:
                self.explore(address, peer)

    async def _resolve(self, attempt: Attempt, target: HostPort) -> None:
        found = await self._lookup(target)
        if found is None:
            self._give_up(attempt, "address")
        else:
            self._begin(attempt, found)

    async def _lookup(self, target: HostPort) -> HostPort | None:
        try:
            async with asyncio.timeout(self.settings.connect_timeout_us / 1_000_000):
                found = await asyncio.get_running_loop().getaddrinfo(target.host, target.port, type=socket.SOCK_DGRAM)
        except (OSError, TimeoutError, UnicodeError):
            return None
        usable = [host for entry in found if for_socket(host := str(entry[4][0]), target.port, self.family)]
        return HostPort(usable[0], target.port) if usable else None

    def _begin(self, attempt: Attempt, target: HostPort) -> None:
        where = for_socket(target.host, target.port, self.family)
        if where is None:
            self._give_up(attempt, "address")
            return
        if not attempt.trial:
            attempt.tls_at = asyncio.get_running_loop().call_later(TLS_AFTER_S, self._fall_back, attempt)
        elif attempt.expect not in self.table.peers or attempt.expect in self.table.trials:
            self._finish(attempt)  # something else happened while the name was looked up
            return
        self._quic(attempt, where)

    def _quic(self, attempt: Attempt, where: SocketAddress | None = None) -> None:
        if where is None:
            target = parse_address(attempt.address)
            where = for_socket(target.host, target.port, self.family) if numeric(target) else None
        if where is None:
            self._give_up(attempt, "address")
            return
        quic = MutualQuicConnection(
            configuration=quic_configuration(
                self.identity, is_client=True, idle_timeout_s=self.settings.idle_timeout_us / 1_000_000
            )
        )
        carrier = QuicCarrier(quic, send=self.router.send, shape=self.router.shape, now_us=self.now_us, dialled=True)
        self._session(attempt, carrier)
        self.router.register(carrier, quic.host_cid)
        if attempt.expect is not None:
            carrier.shape(self.conditioner.link(attempt.expect, where[0]))
        carrier.connect(where)

    def _fall_back(self, attempt: Attempt) -> None:
        attempt.pending += 1
        attempt.tls = self.tasks.create_task(self._tls(attempt), name=f"tls to {attempt.address}")

    async def _tls(self, attempt: Attempt) -> None:
        counted = True
        try:
            target = parse_address(attempt.address)
            reader, writer = await self.lane.open_control((target.host, target.port))
            proven = peer_of(writer)
            carrier = TlsCarrier(reader, writer, now_us=self.now_us, idle_s=self.settings.idle_timeout_us / 1_000_000)
            session = self._session(attempt, carrier)
            self._less(attempt, "")
            counted = False
            session.established(proven[1] if proven is not None else None)
            await carrier.run()
        except PEER_FAULTS:
            if counted:
                self._less(attempt, "tls_failed")
        except asyncio.CancelledError:
            if counted:
                self._less(attempt, "")
            raise

    def _session(self, attempt: Attempt, carrier: QuicCarrier | TlsCarrier) -> Session:
        session = Session(
            self.table, carrier, dialled=True, target=attempt.address, expect=attempt.expect, trial=attempt.trial
        )
        if attempt.trial and attempt.expect is not None:
            self.table.trials.begin(attempt.expect, session)
        carrier.conversation = session
        self._by_session[session] = attempt
        attempt.pending += 1
        self.table.counters.handshakes["started"] += 1
        self.table.add(session)
        return session

    def _less(self, attempt: Attempt, reason: str) -> None:
        """One way less. What QUIC met is the telling reason: a TLS failure only says that this did not help either."""
        attempt.pending -= 1
        if reason and attempt.reason in {"", "tls_failed"}:
            attempt.reason = reason
        if attempt.pending <= 0:
            self._finish(attempt)

    def _give_up(self, attempt: Attempt, reason: str) -> None:
        attempt.reason = reason
        self.table.counters.reject(reason)
        self._finish(attempt)

    def _finish(self, attempt: Attempt) -> None:
        if self._attempts.get(attempt.address) is attempt:
            del self._attempts[attempt.address]
            if not attempt.quiet and attempt.reason:
                self.table.emit(DialFailed(attempt.address, attempt.reason))
