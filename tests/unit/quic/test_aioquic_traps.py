"""The traps of aioquic 1.7 that this project was built around, each as it was measured.

When one of these fails after an upgrade, the library changed and the code that works around it must be read again.
"""

import asyncio
import ssl

import pytest
from aioquic.asyncio.server import QuicServer
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
    acknowledge_now,
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

    def __init__(
        self, client_configuration=None, server_class=MutualQuicConnection, client_options=None, **server_options
    ):
        self.now = 0.0
        self.client = MutualQuicConnection(
            configuration=client_configuration or quic_configuration(ALICE, is_client=True, idle_timeout_s=10),
            **(client_options or {}),
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
            self.take_events()
            self.now += 0.01

    def take_events(self):
        for name in ("client", "server"):
            while (event := getattr(self, name).next_event()) is not None:
                self.events[name].append(event)

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


def test_tickets_are_neither_issued_nor_kept():
    pair = Pair()
    pair.exchange()
    assert pair.server.tls.new_session_ticket_cb is None
    assert pair.client.tls.new_session_ticket_cb is None


def test_a_resumed_session_breaks_mutual_authentication_which_is_why_tickets_are_off():
    kept, issued = [], {}
    first = Pair(
        client_options={"session_ticket_handler": kept.append},
        session_ticket_handler=lambda ticket: issued.update({ticket.ticket: ticket}),
    )
    first.exchange()
    assert kept
    resuming = quic_configuration(ALICE, is_client=True, idle_timeout_s=10)
    resuming.session_ticket = kept[0]
    second = Pair(resuming, session_ticket_fetcher=issued.get)
    second.exchange()
    assert not second.seen("server", HandshakeCompleted)
    second.now += 5
    for connection in (second.client, second.server):
        connection.handle_timer(second.now)
    second.exchange(1)
    ends = second.seen("client", ConnectionTerminated) + second.seen("server", ConnectionTerminated)
    assert {event.error_code for event in ends} == {0x100 + 10}  # unexpected message


def test_round_trips_under_a_millisecond_are_not_seen_so_they_are_measured_by_our_own_echoes():
    pair = Pair()
    pair.exchange(20)
    pair.client.send_ping(1)
    for packet, _ in pair.client.datagrams_to_send(now=pair.now):
        pair.server.receive_datagram(packet, pair.client_address, now=pair.now)
    acknowledge_now(pair.server)
    pair.now += 0.000_2
    for packet, _ in pair.server.datagrams_to_send(now=pair.now):
        pair.client.receive_datagram(packet, ("server", 1), now=pair.now)
    assert pair.client._loss._rtt_latest == 0.001


def test_a_ping_is_answered_by_a_timer_so_it_says_nothing_about_the_round_trip():
    pair = Pair()
    pair.exchange(20)
    pair.client.send_ping(1)
    for packet, _ in pair.client.datagrams_to_send(now=pair.now):
        pair.server.receive_datagram(packet, pair.client_address, now=pair.now)
    assert pair.server.datagrams_to_send(now=pair.now) == []
    assert pair.server.get_timer() - pair.now == pytest.approx(0.001)


class Recorder(asyncio.DatagramTransport):
    """A socket that keeps what is sent."""

    def __init__(self):
        super().__init__()
        self.sent = []

    def sendto(self, data, addr=None):
        self.sent.append((data, addr))


def test_no_stateless_reset_tells_that_the_peer_was_restarted_only_the_idle_timeout_does():
    async def main():
        pair = Pair()
        pair.exchange()
        restarted, socket = (
            QuicServer(configuration=quic_configuration(BOB, is_client=False, idle_timeout_s=10)),
            Recorder(),
        )
        restarted.connection_made(socket)
        pair.client.send_datagram_frame(b"still there?")
        asked, packets = pair.now, 0
        while not pair.seen("client", ConnectionTerminated):
            for packet, _ in pair.client.datagrams_to_send(now=pair.now):
                packets += 1
                restarted.datagram_received(packet, pair.client_address)
            pair.now = max(pair.now, pair.client.get_timer())
            pair.client.handle_timer(pair.now)
            pair.take_events()
        assert packets > 1, "asked again"
        assert socket.sent == []
        assert 9 <= pair.now - asked <= 10
        assert pair.seen("client", ConnectionTerminated)[0].reason_phrase == "Idle timeout"

    asyncio.run(main())


def test_packets_of_1452_bytes_never_get_through_a_path_of_1280():
    def too_large(packet):
        return len(packet) + 28 > 1_280

    large = quic_configuration(ALICE, is_client=True, idle_timeout_s=10)
    large.max_datagram_size = 1_452
    pair, tried = Pair(large), []
    while not pair.seen("client", ConnectionTerminated):
        tried += [too_large(packet) for packet, _ in pair.client.datagrams_to_send(now=pair.now)]
        pair.now = max(pair.now, pair.client.get_timer())
        pair.client.handle_timer(pair.now)
        pair.take_events()
    assert len(tried) > 2
    assert all(tried), "it never tries a smaller one"
    assert not pair.seen("client", HandshakeCompleted)
    ours = Pair()
    ours.exchange(lose=too_large)
    assert ours.seen("server", HandshakeCompleted)


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
