"""The traps of aioquic 1.7 that this project was built around, each as it was measured.

When one of these fails after an upgrade, the library changed and the code that works around it must be read again.
"""

import ssl

import pytest
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import (
    ConnectionTerminated,
    DatagramFrameReceived,
    HandshakeCompleted,
    StreamDataReceived,
)

from protocol.codec import MAX_DATAGRAM_BYTES
from protocol.errors import IdentityError
from protocol.quic import mutual
from protocol.quic.identity import Identity
from protocol.quic.mutual import (
    MutualQuicConnection,
    datagrams_waiting,
    peer_key,
    quic_configuration,
    self_test,
    takes_datagrams,
    unacknowledged_bytes,
)

ALICE, BOB = Identity.generate(), Identity.generate()


class Pair:
    """Two connections in memory, with a clock of their own."""

    def __init__(self, client_configuration=None, server_class=MutualQuicConnection, **server_options):
        self.now = 0.0
        self.client = MutualQuicConnection(
            configuration=client_configuration or quic_configuration(ALICE, is_client=True, idle_timeout_s=10)
        )
        self.server = server_class(
            configuration=quic_configuration(BOB, is_client=False, idle_timeout_s=10),
            original_destination_connection_id=self.client.original_destination_connection_id,
            **server_options,
        )
        self.events = {"client": [], "server": []}
        self.client_address = ("client", 1)
        self.sent_bytes = 0
        self.client.connect(("server", 1), now=self.now)

    def exchange(self, rounds=6, *, lose=lambda _: False):
        for _ in range(rounds):
            for source, target, address in (
                (self.client, self.server, self.client_address),
                (self.server, self.client, ("server", 1)),
            ):
                for packet, _ in source.datagrams_to_send(now=self.now):
                    self.sent_bytes += len(packet)
                    if not lose(packet):
                        target.receive_datagram(packet, address, now=self.now)
            for name in ("client", "server"):
                while (event := getattr(self, name).next_event()) is not None:
                    self.events[name].append(event)
            self.now += 0.01

    def seen(self, name, kind):
        return [event for event in self.events[name] if isinstance(event, kind)]


def test_both_ends_learn_the_others_key_and_the_event_order_lets_it_be_checked_first():
    pair = Pair()
    pair.client.send_stream_data(0, b"early")
    pair.exchange()
    assert peer_key(pair.client) == BOB.public_key
    assert peer_key(pair.server) == ALICE.public_key
    kinds = [type(event) for event in pair.events["server"]]
    assert kinds.index(HandshakeCompleted) < kinds.index(StreamDataReceived)


def test_without_the_private_switch_the_server_never_sees_a_certificate():
    pair = Pair(server_class=QuicConnection)
    pair.exchange()
    assert pair.seen("server", HandshakeCompleted)
    assert peer_key(pair.server) is None


def test_a_client_without_certificate_completes_the_handshake_so_the_application_must_look():
    bare = quic_configuration(ALICE, is_client=True, idle_timeout_s=10)
    bare.certificate = bare.private_key = None
    pair = Pair(bare)
    pair.exchange()
    assert pair.seen("server", HandshakeCompleted)
    assert peer_key(pair.server) is None


def test_a_certificate_with_somebody_elses_key_is_refused_after_the_client_believes_it_is_connected():
    stolen = quic_configuration(ALICE, is_client=True, idle_timeout_s=10)
    stolen.certificate = BOB.certificate
    pair = Pair(stolen)
    pair.exchange()
    assert pair.seen("client", HandshakeCompleted)
    assert not pair.seen("server", HandshakeCompleted)
    pair.now += 5
    pair.client.handle_timer(pair.now)
    pair.exchange(1)
    assert [event.error_code for event in pair.seen("client", ConnectionTerminated)] == [307]


class OddCertificate:
    """A certificate whose version number does not exist."""

    def public_bytes(self, encoding):
        return ALICE.certificate.public_bytes(encoding).replace(b"\xa0\x03\x02\x01\x02", b"\xa0\x03\x02\x01\x0c", 1)


def test_a_certificate_of_an_impossible_version_ends_the_connection_and_raises_nothing():
    odd = quic_configuration(ALICE, is_client=True, idle_timeout_s=10)
    odd.certificate = OddCertificate()
    pair = Pair(odd)
    pair.exchange()
    assert not pair.seen("server", HandshakeCompleted)
    pair.now += 5
    pair.server.handle_timer(pair.now)
    pair.exchange(1)
    assert [event.error_code for event in pair.seen("server", ConnectionTerminated)] == [0x100 + 42]


def test_session_tickets_break_mutual_authentication_and_are_never_issued():
    pair = Pair()
    pair.exchange()
    assert pair.server.tls.new_session_ticket_cb is None
    assert pair.client.tls.new_session_ticket_cb is None
    assert all(not event.session_resumed for event in pair.seen("server", HandshakeCompleted))


def test_an_oversized_datagram_blocks_every_later_one_so_the_bound_stands_well_below():
    pair = Pair()
    pair.exchange()
    pair.client.send_datagram_frame(bytes(MAX_DATAGRAM_BYTES))
    pair.exchange(2)
    assert [len(event.data) for event in pair.seen("server", DatagramFrameReceived)] == [MAX_DATAGRAM_BYTES]
    pair.client.send_datagram_frame(bytes(1_190))
    pair.client.send_datagram_frame(b"later")
    pair.exchange(4)
    assert len(pair.seen("server", DatagramFrameReceived)) == 1
    assert datagrams_waiting(pair.client) == 2


def test_datagrams_to_a_peer_that_did_not_negotiate_them_are_noticed_beforehand():
    silent = quic_configuration(ALICE, is_client=True, idle_timeout_s=10)
    silent.max_datagram_frame_size = None
    pair = Pair(silent)
    pair.exchange()
    assert not takes_datagrams(pair.server)
    assert takes_datagrams(pair.client)


def test_there_is_no_back_pressure_but_what_is_unacknowledged_can_be_counted():
    pair = Pair()
    pair.exchange()
    pair.client.send_stream_data(0, bytes(5_000_000))
    assert unacknowledged_bytes(pair.client, 0) == 5_000_000
    pair.exchange(40)
    assert unacknowledged_bytes(pair.client, 0) < 5_000_000
    assert unacknowledged_bytes(pair.client, 4) == 0


def test_a_handshake_fits_the_smallest_ipv6_mtu():
    too_large = []
    pair = Pair()
    pair.exchange(lose=lambda packet: too_large.append(packet) or True if len(packet) + 48 > 1_280 else False)
    assert too_large == []
    assert pair.seen("server", HandshakeCompleted)


def test_the_clients_address_may_change_but_the_server_must_hear_from_it_first():
    pair = Pair()
    pair.exchange()
    pair.client_address = ("client", 2)
    assert pair.server.get_peer_address() == ("client", 1)
    pair.client.send_ping(1)
    pair.exchange()
    assert pair.server.get_peer_address() == ("client", 2)


def test_a_client_drops_packets_from_an_address_it_did_not_dial():
    pair = Pair()
    for packet, _ in pair.client.datagrams_to_send(now=0):
        pair.server.receive_datagram(packet, ("client", 1), now=0)
    for packet, _ in pair.server.datagrams_to_send(now=0):
        pair.client.receive_datagram(packet, ("::ffff:server", 1), now=0)
    assert pair.client.next_event() is None


def test_chains_are_not_checked_so_that_pins_decide():
    assert quic_configuration(ALICE, is_client=True, idle_timeout_s=1).verify_mode == ssl.CERT_NONE


def test_the_self_test_passes_here_and_fails_closed_when_the_switch_stops_working(monkeypatch):
    self_test.cache_clear()
    self_test()
    monkeypatch.setattr(mutual, "MutualQuicConnection", QuicConnection)
    self_test.cache_clear()
    with pytest.raises(IdentityError, match="install aioquic"):
        self_test()
    monkeypatch.undo()
    self_test.cache_clear()


def test_the_self_test_fails_closed_when_a_private_attribute_is_gone(monkeypatch):
    monkeypatch.setattr(mutual, "peer_key", lambda connection: connection.tls._no_longer_there)
    self_test.cache_clear()
    with pytest.raises(IdentityError, match="install aioquic"):
        self_test()
    self_test.cache_clear()


def test_large_packets_are_not_used_whatever_the_configuration_default_becomes():
    configured = quic_configuration(ALICE, is_client=False, idle_timeout_s=1)
    assert isinstance(configured, QuicConfiguration)
    assert configured.max_datagram_size == 1_200
