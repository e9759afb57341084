"""One UDP socket for accepting and dialling: packets find their connection by id, strangers find limits.

aioquic's own server can only accept. This router does what it does, dials from the same socket, and decides *before* a
connection object exists whether a handshake may begin: by rate (``HandshakeGate``), by the number of unfinished or
unadmitted connections, and, when half of these are taken, by a retry packet that makes the sender prove its address.
"""

import os
import socket
from collections.abc import Callable
from typing import Any

from aioquic._buffer import Buffer
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.packet import (
    QuicHeader,
    QuicPacketType,
    encode_quic_retry,
    encode_quic_version_negotiation,
    pull_quic_header,
)
from aioquic.quic.retry import QuicRetryTokenHandler

from protocol.quic.address import SocketAddress
from protocol.quic.carrier import QuicCarrier
from protocol.quic.conditioner import ShapedLink
from protocol.quic.interface import TransportCounters
from protocol.quic.limits import HandshakeGate
from protocol.quic.mutual import MutualQuicConnection
from protocol.quic.tcp_tunnel import Tunnel, TunnelAddress
from protocol.quic.udp_socket import Arrival, UdpSocket

SMALLEST_INITIAL = 1_200
CONNECTION_IDS_MAX = 16
"""Ids that one connection may have at once; aioquic issues eight."""

Accept = Callable[[MutualQuicConnection], QuicCarrier]


class Router:
    """See the module. ``strangers()`` says how many connections are not admitted yet."""

    def __init__(
        self,
        *,
        configuration: QuicConfiguration,
        accept: Accept | None,
        strangers: Callable[[], int],
        strangers_max: int,
        gate: HandshakeGate,
        counters: TransportCounters,
        now_us: Callable[[], int],
    ) -> None:
        self._configuration = configuration
        self._accept = accept
        self._strangers = strangers
        self._strangers_max = strangers_max
        self._gate = gate
        self._counters = counters
        self._now_us = now_us
        self._carriers: dict[bytes, QuicCarrier] = {}
        self._ids: dict[QuicCarrier, set[bytes]] = {}
        self._links: dict[QuicCarrier, ShapedLink] = {}
        self._retry = QuicRetryTokenHandler()
        self._sources: dict[QuicCarrier, Arrival] = {}
        """Where those who dialled this node reached it: answers leave from there."""
        self._tunnels: dict[SocketAddress, Tunnel] = {}
        self._udp: UdpSocket | None = None
        self._arrival: Arrival | None = None
        """Of the packet that is being handled."""
        self._late_us = 0

    # ---- socket -----------------------------------------------------------------------------------------------------

    def attach(self, bound: socket.socket) -> None:
        """Serve this socket on the running loop; ``close`` closes it."""
        self._udp = UdpSocket(bound, self._packet)

    @property
    def address(self) -> SocketAddress:
        """What the socket is bound to."""
        assert self._udp is not None
        return self._udp.address

    def close(self) -> None:
        """Close the socket; carriers were shut before."""
        if self._udp is not None:
            self._udp.close()
            self._udp = None

    def send(self, carrier: QuicCarrier, data: bytes, address: Any) -> None:
        """A packet of ``carrier``, through its shaped link when it has one."""
        link, source = self._links.get(carrier), self._sources.get(carrier)
        if link is None:
            self._put(data, address, source)
        elif (lost := link.packet(len(data), lambda: self._put(data, address, source))) is not None:
            self._counters.drop(lost)

    def shape(self, carrier: QuicCarrier, link: ShapedLink | None) -> None:
        """Send this carrier's packets through ``link`` from now on."""
        if link is None:
            self._links.pop(carrier, None)
        elif carrier in self._ids:
            self._links[carrier] = link

    def datagram_received(self, packet: bytes, addr: SocketAddress) -> None:
        """Find the connection, or let a new one begin."""
        self._counters.bytes["receive"] += len(packet)
        self._counters.packets["receive"] += 1
        try:
            header = pull_quic_header(Buffer(data=packet), host_cid_length=self._configuration.connection_id_length)
        except ValueError:
            self._counters.drop("not_quic")
            return
        carrier = self._carriers.get(header.destination_cid) or self._begin(header, packet, addr)
        if carrier is not None:
            if self._arrival is not None:
                carrier.arrived(self._arrival.interface, self._late_us)
            carrier.datagram_received(packet, addr)

    def _packet(self, data: bytes, address: SocketAddress, arrival: Arrival | None, late_us: int) -> None:
        self._arrival, self._late_us = arrival, late_us
        self.datagram_received(data, address)
        self._arrival = None

    async def serve_tunnel(self, tunnel: Tunnel) -> str:
        """Take the packets of a newcomer whom UDP does not reach, and answer there, until the tunnel ends: ``Tunnel.run``."""
        self._tunnels[tunnel.address] = tunnel
        try:
            return await tunnel.run(lambda packet: self.datagram_received(packet, tunnel.address))
        finally:
            del self._tunnels[tunnel.address]

    # ---- connections ------------------------------------------------------------------------------------------------

    def register(self, carrier: QuicCarrier, *ids: bytes) -> None:
        """Route packets with these connection ids to ``carrier``, and follow the ids it issues and retires."""
        self._ids[carrier] = set()
        for connection_id in ids:
            self._issued(carrier, connection_id)
        carrier._connection_id_issued_handler = lambda issued: self._issued(carrier, issued)  # noqa: SLF001
        carrier._connection_id_retired_handler = lambda retired: self._retired(carrier, retired)  # noqa: SLF001
        carrier._connection_terminated_handler = lambda: self._terminated(carrier)  # noqa: SLF001

    @property
    def connection_ids(self) -> int:
        """Routes held: bounded by connections × ``CONNECTION_IDS_MAX``."""
        return len(self._carriers)

    def _begin(self, header: QuicHeader, packet: bytes, address: SocketAddress) -> QuicCarrier | None:
        if header.packet_type is not QuicPacketType.INITIAL or len(packet) < SMALLEST_INITIAL:
            self._counters.drop("unknown_connection")
            return None
        if header.version not in self._configuration.supported_versions:
            self._put(
                encode_quic_version_negotiation(
                    source_cid=header.destination_cid,
                    destination_cid=header.source_cid,
                    supported_versions=self._configuration.supported_versions,
                ),
                address,
                self._arrival,
            )
            return None
        if self._accept is None:
            self._counters.drop("unknown_connection")
            return None
        strangers, host = self._strangers(), str(address[0])
        # Peers of before find room while strangers fill theirs; a forged address would have to be proven first.
        room = self._strangers_max * 3 // 2 if self._gate.knows(host) else self._strangers_max
        if strangers >= room:
            self._counters.reject("unadmitted_limit")
            return None
        original, retried = header.destination_cid, None
        if header.token:
            try:
                original, retried = (
                    self._retry.validate_token(
                        address=address, destination_cid=header.destination_cid, token=header.token, now=self._seconds()
                    ),
                    header.destination_cid,
                )
            except ValueError:
                self._counters.reject("handshake_failed")
                return None
        elif strangers >= self._strangers_max // 2:
            self._ask_for_proof(header, address)
            return None
        if not self._gate.admit(host, self._now_us()):
            self._counters.reject("handshake_rate")
            return None
        connection = MutualQuicConnection(
            configuration=self._configuration,
            original_destination_connection_id=original,
            retry_source_connection_id=retried,
        )
        carrier = self._accept(connection)
        if self._arrival is not None:
            self._sources[carrier] = self._arrival
        self.register(carrier, header.destination_cid, connection.host_cid)
        self._counters.handshakes["started"] += 1
        return carrier

    def _ask_for_proof(self, header: QuicHeader, address: SocketAddress) -> None:
        assert header.version is not None
        source = os.urandom(self._configuration.connection_id_length)
        self._put(
            encode_quic_retry(
                version=header.version,
                source_cid=source,
                destination_cid=header.source_cid,
                original_destination_cid=header.destination_cid,
                retry_token=self._retry.create_token(
                    address=address,
                    original_destination_connection_id=header.destination_cid,
                    retry_source_connection_id=source,
                    now=self._seconds(),
                ),
            ),
            address,
            self._arrival,
        )

    def _seconds(self) -> float:
        return self._now_us() / 1_000_000

    def _put(self, data: bytes, address: SocketAddress, source: Arrival | None = None) -> None:
        if self._udp is None:
            return
        self._counters.bytes["send"] += len(data)
        self._counters.packets["send"] += 1
        if isinstance(address, TunnelAddress):
            tunnel = self._tunnels.get(address)
            if tunnel is None or not tunnel.send(data):
                self._counters.drop("send_buffer")
        elif lost := self._udp.send(data, address, source):
            self._counters.drop(lost)

    def _issued(self, carrier: QuicCarrier, connection_id: bytes) -> None:
        held = self._ids.get(carrier)
        if held is not None and len(held) < CONNECTION_IDS_MAX:
            held.add(connection_id)
            self._carriers[connection_id] = carrier

    def _retired(self, carrier: QuicCarrier, connection_id: bytes) -> None:
        held = self._ids.get(carrier)
        if held is not None and connection_id in held:
            held.discard(connection_id)
            self._carriers.pop(connection_id, None)

    def _terminated(self, carrier: QuicCarrier) -> None:
        self._links.pop(carrier, None)
        self._sources.pop(carrier, None)
        for connection_id in self._ids.pop(carrier, ()):
            self._carriers.pop(connection_id, None)
