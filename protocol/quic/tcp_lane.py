"""The TCP lane: TLS 1.3 on the port number of the UDP socket, with the same keys and the same pins.

A connection begins with one byte that says what it is: a control session (the fallback when UDP does not pass) or a bulk
stream, which then names its kind and header in one frame. Limits before the handshake are the QUIC router's: the
handshake gate and the number of strangers. A handler that raises what a peer can cause loses its connection only.
"""

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import msgpack

from config.settings import QuicSettings
from protocol.codec import LENGTH_BYTES, frame, unpack
from protocol.errors import AddressError, WireError
from protocol.ids import NodeId
from protocol.quic.address import SocketAddress, shown
from protocol.quic.bulk import BulkReader, BulkWriter, Observe
from protocol.quic.carrier import CONTROL_TYPE
from protocol.quic.conditioner import ShapedLink
from protocol.quic.interface import TransportCounters
from protocol.quic.limits import HandshakeGate
from protocol.quic.tcp_tunnel import Tunnel, begins_as_tunnel
from protocol.quic.tls import LaneContexts, peer_of
from protocol.quic.tls_socket import shake_hands, streams

BULK_TYPE = b"\x02"
ACCEPTED = b"\x06"
"""The accepting side's answer to a bulk header; a refusal is the end of the connection."""
HEADER_MAX_BYTES = 65_536
KIND_MAX = 32
BACKLOG = 64
STREAMS_PER_PEER = 16

PEER_FAULTS = (OSError, EOFError, TimeoutError, WireError)
"""What a peer or a path can cause (``ssl.SSLError`` is an ``OSError``)."""

BulkHandler = Callable[[NodeId, str, bytes, BulkReader, BulkWriter], Awaitable[None]]
"""Serves one incoming bulk stream: peer, kind, header. Runs as its own task; returning closes the stream."""
ControlHandler = Callable[[NodeId, bytes, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class LaneHost:
    """What the lane needs from its transport."""

    contexts: LaneContexts
    settings: QuicSettings
    gate: HandshakeGate
    counters: TransportCounters
    admitted: Callable[[NodeId], bool]
    strangers: Callable[[], int]
    now_us: Callable[[], int]
    link: Callable[[NodeId], ShapedLink | None]
    observe: Callable[[NodeId], Observe]
    control: ControlHandler
    tunnel: Callable[[Tunnel], Awaitable[str]]
    """Serves a newcomer whom UDP does not reach; what was wrong with it, if anything was."""


class TcpLane:
    """Accepts and opens connections. ``serve`` runs until cancelled; streams are tasks of the transport's group."""

    def __init__(self, host: LaneHost, tasks: asyncio.TaskGroup, on_bulk: BulkHandler) -> None:
        self._host = host
        self._tasks = tasks
        self._on_bulk = on_bulk
        self._shaking = 0
        self._streams: dict[NodeId, int] = {}
        self._carried: WeakKeyDictionary[asyncio.WriteTransport, NodeId] = WeakKeyDictionary()

    @property
    def strangers(self) -> int:
        """Connections whose handshake is not over."""
        return self._shaking

    def cut_strangers(self) -> None:
        """Break the bulk streams, both ways, of everybody who is not admitted any more."""
        for transport, peer in list(self._carried.items()):
            if not self._host.admitted(peer):
                transport.abort()

    async def serve(self, listening: socket.socket) -> None:
        """Accept for ever."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, address = await loop.sock_accept(listening)
            except OSError:  # the newcomer is gone already, or file descriptors ran out: both pass
                await asyncio.sleep(0.1)
                continue
            places = self._host.settings.max_unadmitted_connections
            if self._host.strangers() >= (places * 3 // 2 if self._host.gate.knows(str(address[0])) else places):
                self._host.counters.reject("unadmitted_limit")
                accepted.close()
            elif not self._host.gate.admit(str(address[0]), self._host.now_us()):
                self._host.counters.reject("handshake_rate")
                accepted.close()
            else:
                self._tasks.create_task(self._accepted(accepted), name=f"tls {shown(address)}")

    async def open_control(self, where: SocketAddress) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A control connection to ``where``; whose it is, the caller asks ``peer_of``. Raises ``OSError``."""
        reader, writer = await self._connect(where)
        writer.write(CONTROL_TYPE)
        return reader, writer

    async def open_bulk(
        self, peer: NodeId, where: SocketAddress, kind: str, header: bytes
    ) -> tuple[BulkReader, BulkWriter]:
        """A bulk stream of ``kind`` that the peer has accepted. Raises ``ConnectionError``, ``OSError``, ``TimeoutError``."""
        assert 0 < len(kind) <= KIND_MAX
        assert len(header) <= HEADER_MAX_BYTES - 64
        reader, writer = await self._connect(where)
        try:
            async with asyncio.timeout(self._host.settings.connect_timeout_us / 1_000_000):
                taken = await _ask(peer, kind, header, reader, writer)
        except BaseException:
            writer.transport.abort()
            raise
        if not taken:
            writer.transport.abort()
            raise ConnectionRefusedError(f"{shown(where)} is not {peer}, or takes no {kind} stream now")
        return self._bulk(peer, reader, writer)

    def _bulk(
        self, peer: NodeId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[BulkReader, BulkWriter]:
        self._carried[writer.transport] = peer
        observe, idle_s = self._host.observe(peer), self._host.settings.idle_timeout_us / 1_000_000
        return BulkReader(reader, observe, idle_s), BulkWriter(writer, observe, idle_s, self._host.link(peer))

    async def _connect(self, where: SocketAddress) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        seconds = self._host.settings.connect_timeout_us / 1_000_000
        host = where[0].removeprefix("::ffff:") if "." in where[0] else where[0]
        async with asyncio.timeout(seconds):
            plain = await _connected(host, where[1])
            context = self._host.contexts.client()
            return streams(await shake_hands(plain, context, server_side=False, seconds=seconds))

    async def _accepted(self, accepted: socket.socket) -> None:
        self._shaking += 1
        try:
            if await self._begins_as_tunnel(accepted):
                await self._serve_tunnel(accepted)
                return
            opened = await self._shake_hands(accepted)
        finally:
            self._shaking -= 1
        if opened is None:
            return
        reader, writer = opened
        try:
            await self._dispatch(reader, writer)
        except PEER_FAULTS:
            self._host.counters.drop("tls_failed")
            writer.transport.abort()
        finally:
            writer.close()  # lets what the kernel still holds arrive; an abort here could cut an answer off

    async def _serve_tunnel(self, accepted: socket.socket) -> None:
        try:
            tunnel = Tunnel(*await asyncio.open_connection(sock=accepted))
        except OSError:
            accepted.close()
            self._host.counters.reject("truncated")
            return
        if wrong := await self._host.tunnel(tunnel):
            self._host.counters.reject(wrong)

    async def _begins_as_tunnel(self, accepted: socket.socket) -> bool:
        try:
            return await begins_as_tunnel(accepted, self._host.settings.connect_timeout_us / 1_000_000)
        except OSError:
            return False  # the handshake, which comes next, says what is wrong

    async def _shake_hands(self, accepted: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        seconds = self._host.settings.connect_timeout_us / 1_000_000
        try:
            return streams(await shake_hands(accepted, self._host.contexts.server(), server_side=True, seconds=seconds))
        except ssl.SSLError:  # most often a stranger: its certificate has no anchor here
            self._host.counters.reject("unadmitted")
            return None
        except OSError:
            self._host.counters.reject("tls_failed")
            return None

    async def _dispatch(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        proven = peer_of(writer)
        if proven is None or not self._host.admitted(proven[0]):
            self._host.counters.reject("unadmitted")
            return
        async with asyncio.timeout(self._host.settings.connect_timeout_us / 1_000_000):
            kind = await reader.readexactly(1)
            if kind == BULK_TYPE:
                name, header = await _read_header(reader)
        if kind == CONTROL_TYPE:
            await self._host.control(*proven, reader, writer)
        elif kind == BULK_TYPE:
            await self._serve_bulk(proven[0], name, header, reader, writer)
        else:
            self._host.counters.reject("unexpected_stream")

    async def _serve_bulk(
        self, peer: NodeId, kind: str, header: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if self._streams.get(peer, 0) >= STREAMS_PER_PEER:
            self._host.counters.reject("connections")
            return
        self._streams[peer] = self._streams.get(peer, 0) + 1
        taking, giving = self._bulk(peer, reader, writer)
        try:
            writer.write(ACCEPTED)
            await self._on_bulk(peer, kind, header, taking, giving)
        finally:
            self._streams[peer] -= 1
            if not self._streams[peer]:
                del self._streams[peer]
            taking.meter.report()
        await giving.close()


async def _connected(host: str, port: int) -> socket.socket:
    """A TCP connection to the first address of ``host`` that answers. Raises ``OSError``."""
    loop = asyncio.get_running_loop()
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for position, (family, kind, proto, _, address) in enumerate(found):
        plain = socket.socket(family, kind, proto)
        try:
            plain.setblocking(False)
            await loop.sock_connect(plain, address)
        except BaseException as error:
            plain.close()
            if not isinstance(error, OSError) or position == len(found) - 1:
                raise
        else:
            return plain
    raise ConnectionRefusedError(f"{host} has no address")


async def _ask(
    peer: NodeId, kind: str, header: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> bool:
    """Offer a bulk stream to ``peer``, and to nobody else. Whether it was taken."""
    proven = peer_of(writer)
    if proven is None or proven[0] != peer:
        return False
    writer.write(BULK_TYPE + frame(msgpack.packb([kind, header])))
    await writer.drain()
    return await reader.read(1) == ACCEPTED


async def _read_header(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    """Kind and header of a bulk stream. Raises ``WireError``."""
    size = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
    if size > HEADER_MAX_BYTES:
        raise WireError("oversized", f"a bulk header of {size} bytes is over {HEADER_MAX_BYTES}")
    match unpack(await reader.readexactly(size)):
        case (str(kind), bytes(header)) if 0 < len(kind) <= KIND_MAX:
            return kind, header
        case _:
            raise WireError("malformed", "a bulk stream without kind and header")


def bind_tcp(host: str, port: int) -> socket.socket:
    """A listening, non-blocking TCP socket. Raises ``AddressError`` in one line."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setblocking(False)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind((host, port))
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        raise AddressError(
            f"cannot listen on TCP {host} port {port}: {error.strerror}; stop what uses it or set listen.port"
        ) from None
    return bound
