"""Hostile packets: a stranger can encrypt Initials (their keys are public), a peer can encrypt anything."""

import asyncio
import random
from collections import Counter

import pytest

from protocol.quic.carrier import QuicCarrier
from protocol.quic.identity import Identity
from protocol.quic.interface import REASONS, TransportCounters
from protocol.quic.limits import HandshakeGate
from protocol.quic.mutual import MutualQuicConnection, quic_configuration
from protocol.quic.router import Router
from tests.bench.rows import append
from tests.property.growth import growth
from tests.unit.quic.test_session import World

CLIENT = Identity.generate()


class Mesh:
    """A router with sessions behind it, fed by hand; what it sends comes back in a list."""

    def __init__(self, world):
        from protocol.quic.session import Session

        self.world = world
        self.sent = []
        self.now_s = 0.0
        self.router = Router(
            configuration=quic_configuration(world.own, is_client=False, idle_timeout_s=10),
            accept=self._accept,
            strangers=lambda: 0,
            strangers_max=1_000_000,
            gate=HandshakeGate(1_000_000),
            counters=world.table.counters,
            now_us=lambda: world.time_us,
        )
        self.router._put = lambda data, *_: self.sent.append(data)
        self._session = Session

    def _accept(self, quic):
        carrier = QuicCarrier(
            quic, send=self.router.send, shape=self.router.shape, now_us=lambda: self.world.time_us, dialled=False
        )
        carrier.conversation = session = self._session(self.world.table, carrier, dialled=False)
        self.world.table.add(session)
        self.carrier = carrier
        return carrier


class Mutator:
    """Spoils plain payloads of a client on their way into encryption."""

    def __init__(self, die, client, share):
        self.die, self.share, self.hits = die, share, 0
        for pair in (*client._cryptos_initial.values(), *client._cryptos.values()):
            self._wrap(pair)

    def _wrap(self, pair):
        plain = pair.encrypt_packet

        def encrypt(header, payload, number):
            if self.die.random() < self.share and payload:
                payload = bytearray(payload)
                for _ in range(self.die.randrange(1, 4)):
                    payload[self.die.randrange(min(len(payload), 300))] = self.die.randrange(256)
                payload = bytes(payload)
                self.hits += 1
            return plain(header, payload, number)

        pair.encrypt_packet = encrypt


def one_case(die, world):
    """A handshake, spoilt somewhere; whatever comes back is fed to the client, and so on."""
    mesh = Mesh(world)
    identity = world.peer if die.random() < 0.5 else CLIENT
    client = MutualQuicConnection(configuration=quic_configuration(identity, is_client=True, idle_timeout_s=10))
    client.connect(("server", 1), now=0.0)
    mutator = Mutator(die, client, die.choice([0.1, 0.5, 1.0]))
    if die.random() < 0.5:
        client.send_stream_data(0, b"\x01" + die.randbytes(die.randrange(300)))
    for step in range(6):
        for data, _ in client.datagrams_to_send(now=step / 10):
            kept = die.randrange(len(data) + 1) if die.random() < 0.1 else len(data)
            mesh.router.datagram_received(data[:kept], ("192.0.2.1", 9))
        answers, mesh.sent = mesh.sent, []
        for data in answers:
            client.receive_datagram(data, ("server", 1), now=step / 10)
        if step == 3 and die.random() < 0.5:
            client.send_datagram_frame(die.randbytes(die.randrange(1_100)))
            client.reset_stream(0, 7)
    world.table.close_all("closed")
    for carrier in list(mesh.router._ids):
        if carrier._timer is not None:
            carrier._timer.cancel()
        mesh.router._terminated(carrier)
    assert mesh.router.connection_ids == 0
    return mutator.hits


def fuzz(cases, seed):
    async def main():
        die, world, hits = random.Random(seed), World(known=2), 0
        errors = []
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: errors.append(context))
        for number in range(cases):
            hits += one_case(die, world)
            world.events.clear()
            if number % 50 == 0:
                await asyncio.sleep(0)
        assert errors == []
        counters = world.table.counters
        assert isinstance(counters, TransportCounters)
        assert set(counters.rejected) | set(counters.dropped) <= REASONS
        assert world.table.strangers == 0
        assert hits > cases // 4
        return Counter(counters.rejected)

    return asyncio.run(main())


def test_spoilt_handshakes_and_frames_raise_nothing_and_leave_nothing():
    assert sum(fuzz(120, 5).values()) > 60


@pytest.mark.nightly
@pytest.mark.timeout(3_600)
def test_many_spoilt_handshakes_leave_no_growth():
    fuzz(300, 6)
    with growth() as grown:
        grown.mark()
        seen = sum((fuzz(2_000, 60 + part) for part in range(10)), Counter())
        grown.mark()
    append("fuzz", "quic_handshake", cases=20_000, rejected=dict(seen), growth_bytes=grown.bytes)
    assert grown.bytes < 1_000_000, grown.keepers()
