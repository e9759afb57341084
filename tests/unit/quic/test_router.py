"""The router's answers to first packets, before any connection exists."""

import pytest

from protocol.quic.identity import Identity
from protocol.quic.interface import TransportCounters
from protocol.quic.limits import HandshakeGate
from protocol.quic.mutual import MutualQuicConnection, quic_configuration
from protocol.quic.router import Router

OWN = Identity.generate()


class Door:
    """A router whose accepted connections are only counted."""

    def __init__(self, *, strangers=0, rate=100, accepts=True):
        self.counters, self.accepted, self.sent = TransportCounters(), [], []
        self.router = Router(
            configuration=quic_configuration(OWN, is_client=False, idle_timeout_s=5),
            accept=self._accept if accepts else None,
            strangers=lambda: strangers,
            strangers_max=8,
            gate=HandshakeGate(rate),
            counters=self.counters,
            now_us=lambda: 1_000_000,
        )
        self.router._put = lambda data, *_: self.sent.append(data)

    def _accept(self, quic):
        self.accepted.append(quic)
        return Mute()

    def knock(self, client=None):
        client = client or hopeful()
        for data, _ in client.datagrams_to_send(now=0.0):
            self.router.datagram_received(data, ("192.0.2.1", 5))
        return client


class Mute:
    def datagram_received(self, data, addr):
        pass


def hopeful():
    client = MutualQuicConnection(
        configuration=quic_configuration(Identity.generate(), is_client=True, idle_timeout_s=5)
    )
    client.connect(("server", 1), now=0.0)
    return client


def test_below_half_of_the_places_a_stranger_is_accepted_at_once():
    door = Door(strangers=3)
    door.knock()
    assert len(door.accepted) == 1
    assert door.sent == []


def test_from_half_of_the_places_on_an_address_must_be_proven_first_and_then_is_enough():
    door = Door(strangers=4)
    client = door.knock()
    assert door.accepted == []
    (retry,) = door.sent
    assert len(retry) < 150, "far less than the 1,200 bytes that asked for it"
    client.receive_datagram(retry, ("server", 1), now=0.1)
    door.knock(client)
    assert len(door.accepted) == 1


def test_a_retry_token_of_another_address_proves_nothing():
    door = Door(strangers=4)
    client = door.knock()
    client.receive_datagram(door.sent[0], ("server", 1), now=0.1)
    for data, _ in client.datagrams_to_send(now=0.1):
        door.router.datagram_received(data, ("198.51.100.9", 5))
    assert door.accepted == []
    assert door.counters.rejected["handshake_failed"] == 1


def test_when_all_places_are_taken_a_stranger_costs_nothing_not_even_an_answer():
    door = Door(strangers=8)
    door.knock()
    assert (door.accepted, door.sent) == ([], [])
    assert door.counters.rejected["unadmitted_limit"] == 1


def test_a_host_that_was_a_peer_finds_room_while_strangers_fill_theirs_and_must_prove_its_address():
    door = Door(strangers=8)
    door.router._gate.remember("192.0.2.1")
    client = door.knock()
    assert door.accepted == []
    (retry,) = door.sent
    client.receive_datagram(retry, ("server", 1), now=0.0)
    door.knock(client)
    assert len(door.accepted) == 1
    full = Door(strangers=12)
    full.router._gate.remember("192.0.2.1")
    full.knock()
    assert (full.accepted, full.sent) == ([], [])


def test_beyond_the_rate_nothing_begins():
    door = Door(rate=4)
    for _ in range(5):
        door.knock()
    assert len(door.accepted) == 2, "strangers have half of the rate"
    assert door.counters.rejected["handshake_rate"] == 3


def test_a_router_that_only_dials_accepts_nobody():
    door = Door(accepts=False)
    door.knock()
    assert door.counters.dropped["unknown_connection"] == 1


def test_an_unknown_version_is_answered_by_negotiation_and_a_small_packet_by_nothing():
    door = Door()
    data = bytearray(hopeful().datagrams_to_send(now=0.0)[0][0])
    data[1:5] = b"\x0a\x0a\x0a\x0a"
    door.router.datagram_received(bytes(data), ("192.0.2.1", 5))
    assert len(door.sent) == 1
    door.router.datagram_received(bytes(data[:1_199]), ("192.0.2.1", 5))
    assert len(door.sent) == 1, "an answer larger than the question would be an amplifier"
    assert door.accepted == []


@pytest.mark.parametrize("junk", [b"", b"\x00", b"\xff" * 30, bytes(1_200), b"\xc0" * 1_200])
def test_junk_is_counted_and_forgotten(junk):
    door = Door()
    door.router.datagram_received(junk, ("192.0.2.1", 5))
    assert sum(door.counters.dropped.values()) + len(door.sent) == 1
    assert door.router.connection_ids == 0
