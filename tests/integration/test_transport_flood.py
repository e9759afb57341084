"""What an attacker who knows an address but has no token costs: limits, retry packets, garbage."""

import asyncio
import os
import random

from aioquic.quic.configuration import QuicConfiguration

from config.settings import QuicSettings
from protocol.messages import Ping
from protocol.quic.carrier import QuicCarrier
from protocol.quic.identity import Identity
from protocol.quic.interface import (
    DialFailed,
    MessageReceived,
    PeerConnected,
    PeerDisconnected,
    Rejected,
    TransportCounters,
)
from protocol.quic.limits import HandshakeGate
from protocol.quic.mutual import MutualQuicConnection, quic_configuration
from protocol.quic.router import Router
from protocol.quic.udp_socket import bind_udp
from tests.integration.transport_mesh import Node, eventually, mesh, now_us, run, running


class Attacker(asyncio.DatagramProtocol):
    """One UDP socket that begins handshakes and never goes on, or sends what it likes."""

    def __init__(self, target):
        host, port = target.rsplit(":", 1)
        self._target = (host, int(port))
        self.received = []

    @classmethod
    async def against(cls, node):
        attacker = cls(node.address)
        attacker.transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
            lambda: attacker, local_addr=("127.0.0.1", 0)
        )
        return attacker

    def datagram_received(self, data, _addr):
        self.received.append(data)

    def send(self, data):
        self.transport.sendto(data, self._target)

    def begin(self, configuration=None):
        """The first flight of a handshake."""
        configuration = configuration or quic_configuration(Identity.generate(), is_client=True, idle_timeout_s=5)
        connection = MutualQuicConnection(configuration=configuration)
        connection.connect(self._target, now=0.0)
        for data, _ in connection.datagrams_to_send(now=0.0):
            self.send(data)
        return connection


def test_a_handshake_flood_is_bounded_in_connections_and_asked_to_prove_its_address():
    async def main():
        tight = QuicSettings(max_unadmitted_connections=8, handshakes_per_second=1_000, connect_timeout_us=500_000)
        (alpha,) = mesh("alpha", settings=tight)
        async with running(alpha):
            attacker = await Attacker.against(alpha)
            for _ in range(60):
                attacker.begin()
                await asyncio.sleep(0)
            await eventually(lambda: len(attacker.received) >= 50)
            assert alpha.transport.table.strangers <= 4, "half of the places; the rest must prove their address first"
            assert any(data[0] & 0xF0 in {0xF0, 0xC0} for data in attacker.received)
            assert max(len(data) for data in attacker.received if data[0] & 0xF0 == 0xF0) < 200, "a retry is small"
            await eventually(lambda: alpha.transport.table.strangers == 0)
            assert alpha.transport._router.connection_ids <= 4 * 16
            attacker.transport.close()

    run(main())


def test_a_peer_gets_in_while_strangers_knock():
    async def main():
        tight = QuicSettings(max_unadmitted_connections=8, handshakes_per_second=100, connect_timeout_us=1_000_000)
        alpha, beta = mesh("alpha", "beta", settings=tight)
        async with running(alpha, beta):
            attacker = await Attacker.against(alpha)
            for _ in range(6):
                attacker.begin()
            await eventually(lambda: alpha.transport.table.strangers == 4)
            beta.transport.dial(alpha.address, alpha.id)
            met = await beta.until(PeerConnected)
            assert met.path == "quic", "through a retry packet"
            attacker.transport.close()

    run(main())


def test_handshakes_beyond_the_rate_are_dropped_before_any_cryptography():
    async def main():
        slow = QuicSettings(handshakes_per_second=4, max_unadmitted_connections=1_000)
        (alpha,) = mesh("alpha", settings=slow)
        async with running(alpha):
            attacker = await Attacker.against(alpha)
            for _ in range(40):
                attacker.begin()
            await eventually(lambda: alpha.transport.counters.rejected["handshake_rate"] >= 35)
            assert alpha.transport.counters.handshakes["started"] <= 5
            attacker.transport.close()

    run(main())


def test_garbage_and_unknown_connections_are_counted_and_cost_no_connection():
    async def main():
        (alpha,) = mesh("alpha")
        die = random.Random(7)
        async with running(alpha):
            attacker = await Attacker.against(alpha)
            first = MutualQuicConnection(
                configuration=quic_configuration(Identity.generate(), is_client=True, idle_timeout_s=5)
            )
            first.connect(attacker._target, now=0.0)
            initial = first.datagrams_to_send(now=0.0)[0][0]
            for number in range(400):
                match number % 4:
                    case 0:
                        attacker.send(die.randbytes(die.randrange(1, 1_400)))
                    case 1:
                        attacker.send(bytes([0x40]) + die.randbytes(60))
                    case 2:
                        attacker.send(initial[: die.randrange(1, 1_199)])
                    case _:
                        attacker.send(b"")
                await asyncio.sleep(0)
            counters = alpha.transport.counters
            await eventually(lambda: sum(counters.dropped.values()) >= 200)
            assert set(counters.dropped) <= {"not_quic", "unknown_connection"}
            assert alpha.transport.table.strangers == 0
            attacker.transport.close()

    run(main())


def test_another_application_protocol_or_no_certificate_is_refused():
    async def main():
        alpha, beta = mesh("alpha", "beta")
        async with running(alpha):
            attacker = await Attacker.against(alpha)
            attacker.begin(QuicConfiguration(alpn_protocols=["h3"], is_client=True, server_name="x"))
            assert (await alpha.until(Rejected)).reason == "handshake_failed"
            attacker.transport.close()
        bare = beta.identity
        beta_configuration = quic_configuration

        def anonymous(identity, *, is_client, idle_timeout_s):
            made = beta_configuration(identity, is_client=is_client, idle_timeout_s=idle_timeout_s)
            if is_client and identity is bare:
                made.certificate = made.private_key = None
            return made

        from protocol.quic import dialling

        before, dialling.quic_configuration = dialling.quic_configuration, anonymous
        try:
            again = Node(alpha.identity, "alpha", alpha.book)
            async with running(again, beta):
                beta.transport.dial(again.address)
                assert (await again.until(Rejected)).reason == "no_certificate"
                assert (await beta.until(DialFailed)).reason in {"unadmitted", "peer_closed"}
                assert not again.transport.connected
        finally:
            dialling.quic_configuration = before

    run(main())


class Silent:
    """A conversation that completes the handshake and says nothing."""

    def __init__(self):
        self.heard, self.ended = [], asyncio.Event()

    def established(self, public_key):
        self.heard.append(("established", public_key))

    def frame(self, raw, _lane):
        self.heard.append(("frame", raw))

    def broken(self, reason):
        self.heard.append(("broken", reason))

    def closed(self, _reason):
        self.ended.set()


async def connect_silently(node):
    """A stranger's QUIC connection to ``node``, below any session of its own."""
    silent = Silent()
    router = Router(
        configuration=quic_configuration(Identity.generate(), is_client=False, idle_timeout_s=5),
        accept=None,
        strangers=lambda: 0,
        strangers_max=1,
        gate=HandshakeGate(1),
        counters=TransportCounters(),
        now_us=now_us,
    )
    router.attach(bind_udp("127.0.0.1", 0))
    quic = MutualQuicConnection(configuration=quic_configuration(Identity.generate(), is_client=True, idle_timeout_s=5))
    carrier = QuicCarrier(quic, send=router.send, shape=router.shape, now_us=now_us, dialled=True)
    carrier.conversation = silent
    router.register(carrier, quic.host_cid)
    carrier.connect(("127.0.0.1", node.transport.port))
    return silent, router


def test_a_stranger_with_a_certificate_who_says_nothing_hears_nothing_and_is_gone_after_the_deadline():
    async def main():
        (alpha,) = mesh("alpha", settings=QuicSettings(connect_timeout_us=300_000))
        async with running(alpha):
            silent, router = await connect_silently(alpha)
            assert (await alpha.until(Rejected, patience_s=2)).reason == "hello_timeout"
            await asyncio.wait_for(silent.ended.wait(), 3)
            assert silent.heard == [("established", alpha.identity.public_key)]
            assert alpha.transport.table.strangers == 0
            router.close()

    run(main())


def test_an_admitted_peer_that_opens_other_streams_or_never_ends_a_frame_loses_its_connection():
    async def main():
        for spoil, reason in (
            (lambda quic: quic.send_stream_data(4, b"x"), "unexpected_stream"),
            (lambda quic: quic.send_stream_data(2, b"x"), "unexpected_stream"),
            (lambda quic: quic.send_stream_data(0, (2**31).to_bytes(4, "big")), "oversized"),
            (lambda quic: quic.send_stream_data(0, b"\x00\x00"), "read_timeout"),
            (lambda quic: quic.send_stream_data(0, b"", end_stream=True), "peer_closed"),
            (lambda quic: quic.reset_stream(0, 1), "truncated"),
        ):
            alpha, beta = mesh("alpha", "beta", settings=QuicSettings(read_timeout_us=200_000))
            async with running(alpha, beta):
                await beta.meet(alpha)
                carrier = beta.transport.table.peers[alpha.id].carrier
                spoil(carrier._quic)
                carrier.transmit()
                lost = await alpha.until(PeerDisconnected, patience_s=3)
                assert (lost.peer, lost.reason) == (beta.id, reason)

    run(main())


def test_a_peer_that_floods_is_limited_and_the_others_are_still_heard():
    async def main():
        (alpha, noisy, calm) = mesh("alpha", "noisy", "calm", settings=QuicSettings(messages_per_second_per_peer=20))
        async with running(alpha, noisy, calm):
            await noisy.meet(alpha)
            await calm.meet(alpha)
            for seq in range(300):
                noisy.transport.send(alpha.id, Ping(seq=seq), "stream")
            calm.transport.send(alpha.id, Ping(seq=7), "stream")
            await alpha.until(MessageReceived, lambda event: event.peer == calm.id)
            await eventually(lambda: alpha.transport.counters.dropped["rate"] >= 200)
            assert len([e for e in alpha.seen(MessageReceived) if e.peer == noisy.id]) < 80
            assert noisy.id in alpha.transport.connected

    run(main())


def test_random_bytes_over_tcp_reach_nothing():
    async def main():
        (alpha,) = mesh("alpha")
        async with running(alpha):
            for first in b"\x00\x16\x80G\xff":  # by chance alone one in 51 runs would open a tunnel
                reader, writer = await asyncio.open_connection("127.0.0.1", alpha.transport.port)
                writer.write(bytes([first]) + os.urandom(400))
                assert len(await reader.read(100)) < 100
                writer.close()
            rejected = alpha.transport.counters.rejected
            await eventually(lambda: rejected["unadmitted"] + rejected["tls_failed"] == 5)
            assert alpha.transport.table.strangers == 0

    run(main())
