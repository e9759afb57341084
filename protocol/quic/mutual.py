"""Mutual TLS in aioquic: the few private attributes this project relies on, in one place, with a test at every start.

aioquic's server asks for a client certificate only through a private switch, accepts a client that has none, and checks
no chain: so the switch is set here, every caller must look at ``peer_key`` before it reads a byte, and ``self_test``
plays both handshakes in memory and refuses to start when the library does not behave as it was read (fail closed).
Tickets are never issued nor kept: a resumed session breaks mutual authentication (transport error 266).
"""

import functools
import ssl

from aioquic._buffer import Buffer
from aioquic.quic import connection as quic_connection
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import NetworkAddress, QuicConnection
from aioquic.quic.events import HandshakeCompleted
from aioquic.quic.packet import QuicErrorCode
from aioquic.tls import AlertDescription, Epoch
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm

from protocol.errors import IdentityError
from protocol.quic.identity import Identity, certificate_key

ALPN = "stagemesh/1"
MAX_DATAGRAM_SIZE = 1_200
"""QUIC packets; no path MTU discovery, so what any path carries. Initials are padded to it."""
WINDOW_BYTES = 1_048_576
"""Receive window: each ACK copies the list of packets in flight, larger windows only cost."""
_SERVER_NAME = "stagemesh"

# Every connection made 33 sets of epochs of its own, from five spellings: 7 KB.
quic_connection.EPOCHS = functools.cache(quic_connection.EPOCHS)


class MutualQuicConnection(QuicConnection):
    """A QUIC connection whose server side asks for the client's certificate.

    A certificate that ``cryptography`` refuses with something else than ``ValueError`` (version 12, say) comes through
    aioquic as that exception, in the middle of a packet of a stranger: here it ends the connection, as any bad one does.
    """

    def receive_datagram(self, data: bytes, addr: NetworkAddress, now: float) -> None:
        """Feed one packet; never raises for what a peer sent."""
        try:
            super().receive_datagram(data, addr, now)
        except (x509.InvalidVersion, UnsupportedAlgorithm):
            self.close(
                error_code=QuicErrorCode.CRYPTO_ERROR + AlertDescription.bad_certificate, reason_phrase="refused"
            )

    def _initialize(self, peer_cid: bytes) -> None:
        super()._initialize(peer_cid)
        if not self._is_client:
            self.tls._request_client_certificate = True  # noqa: SLF001 - no public switch exists (aioquic#541)


def quic_configuration(identity: Identity, *, is_client: bool, idle_timeout_s: float) -> QuicConfiguration:
    """ALPN, certificate, no chain check (pins instead), datagrams on, no tickets."""
    return QuicConfiguration(
        alpn_protocols=[ALPN],
        is_client=is_client,
        idle_timeout=idle_timeout_s,
        max_data=WINDOW_BYTES,
        max_stream_data=WINDOW_BYTES,
        max_datagram_size=MAX_DATAGRAM_SIZE,
        max_datagram_frame_size=65_535,
        certificate=identity.certificate,
        private_key=identity.private_key,
        server_name=_SERVER_NAME if is_client else None,
        verify_mode=ssl.CERT_NONE,
    )


def peer_key(connection: QuicConnection) -> bytes | None:
    """The peer's raw Ed25519 key after ``HandshakeCompleted``; None when it showed no such certificate."""
    return certificate_key(connection.tls._peer_certificate)  # noqa: SLF001 - not public


def forget_handshake(connection: QuicConnection) -> None:
    """Let go of what only the handshake wrote into: 24 KB. To be called from ``HandshakeCompleted`` on.

    What may still come on these streams (tickets, which nobody here keeps) is read and never answered.
    """
    buffers = connection._crypto_buffers  # noqa: SLF001 - not public
    buffers.update(dict.fromkeys(buffers, Buffer(capacity=0)))


def takes_datagrams(connection: QuicConnection) -> bool:
    """Whether the peer negotiated datagrams; aioquic queues them silently for ever when it did not."""
    return (connection._remote_max_datagram_frame_size or 0) >= MAX_DATAGRAM_SIZE  # noqa: SLF001 - not public


def datagrams_waiting(connection: QuicConnection) -> int:
    """Datagrams handed over and not sent yet."""
    return len(connection._datagrams_pending)  # noqa: SLF001 - not public


def unacknowledged_bytes(connection: QuicConnection, stream_id: int) -> int:
    """Stream bytes handed over and not acknowledged yet: aioquic has no back-pressure of its own."""
    stream = connection._streams.get(stream_id)  # noqa: SLF001 - not public
    return 0 if stream is None else len(stream.sender._buffer)  # noqa: SLF001 - not public


def acknowledge_now(connection: QuicConnection) -> None:
    """What has arrived is acknowledged with the next packet that leaves, not by one of its own a millisecond later."""
    space = connection._spaces[Epoch.ONE_RTT]  # noqa: SLF001 - not public
    if space.ack_at is not None:
        space.ack_at = 0.0


@functools.cache
def self_test() -> None:
    """Play a mutual and an anonymous handshake in memory (about 30 ms, once). Raises ``IdentityError``."""
    alice, bob = Identity.generate(), Identity.generate()
    problem = IdentityError("this aioquic does not authenticate both ends as expected: install aioquic>=1.7.2,<1.8")
    try:
        client, server = _handshake(alice, bob, anonymous=False)
        forget_handshake(client)
        forget_handshake(server)
        good = peer_key(client) == bob.public_key and peer_key(server) == alice.public_key
        client.send_stream_data(0, b"x")
        sound = takes_datagrams(client) and not datagrams_waiting(client) and unacknowledged_bytes(client, 0) == 1
        prompt = _is_acknowledged_at_once(client, server)
        client, server = _handshake(alice, bob, anonymous=True)
        refused = peer_key(server) is None
    except (AttributeError, TypeError, ConnectionError) as error:
        raise problem from error
    if not (good and sound and prompt and refused):
        raise problem


def _is_acknowledged_at_once(client: QuicConnection, server: QuicConnection) -> bool:
    server.datagrams_to_send(now=0.1)  # whatever the handshake left to be said
    client.send_datagram_frame(b"x")
    for packet, _ in client.datagrams_to_send(now=0.1):
        server.receive_datagram(packet, ("client", 1), now=0.1)
    waits = not server.datagrams_to_send(now=0.1)
    acknowledge_now(server)
    return waits and bool(server.datagrams_to_send(now=0.1))


def _handshake(client_identity: Identity, server_identity: Identity, *, anonymous: bool) -> tuple[QuicConnection, ...]:
    configuration = quic_configuration(client_identity, is_client=True, idle_timeout_s=10)
    if anonymous:
        configuration.certificate = configuration.private_key = None
    client = MutualQuicConnection(configuration=configuration)
    server = MutualQuicConnection(
        configuration=quic_configuration(server_identity, is_client=False, idle_timeout_s=10),
        original_destination_connection_id=client.original_destination_connection_id,
    )
    client.connect(("peer", 1), now=0.0)
    for _ in range(4):
        for source, target, name in ((client, server, "client"), (server, client, "peer")):
            for packet, _ in source.datagrams_to_send(now=0.0):
                target.receive_datagram(packet, (name, 1), now=0.0)
    for connection in (client, server):
        seen = []
        while (event := connection.next_event()) is not None:
            seen.append(event)
        if not any(isinstance(event, HandshakeCompleted) for event in seen):
            raise ConnectionError("the handshake did not complete")
    return client, server
