"""The TCP lane between real transports: bulk streams, the control fallback, and whom TLS lets in."""

import asyncio
import hashlib
import ssl

import pytest

from config.settings import QuicSettings
from protocol.messages import Ping
from protocol.quic.identity import Identity
from protocol.quic.interface import (
    DialFailed,
    MessageReceived,
    PeerConnected,
    PeerDisconnected,
    PeerMoved,
    TransferObserved,
)
from protocol.quic.tls import LaneContexts
from tests.integration.transport_mesh import Node, eventually, identities, mesh, run, running

LOOPS = pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
MIB = 1_048_576


async def echo_digest(peer, kind, header, reader, writer):
    """Answers what came with its digest."""
    digest, size = hashlib.sha256(header), int(header)
    for _ in range(0, size, MIB):
        digest.update(await reader.readexactly(min(MIB, size)))
    writer.write(peer.encode() + kind.encode() + digest.digest())
    await writer.drain()


@LOOPS
def test_a_bulk_stream_carries_bytes_both_ways_and_both_ends_report_a_sample(loop):
    async def main():
        alpha, beta = mesh("alpha", "beta")
        beta.transport.on_bulk = echo_digest
        async with running(alpha, beta):
            await alpha.meet(beta)
            content = bytes(range(256)) * (MIB // 256) * 8
            reader, writer = await alpha.transport.open_bulk(beta.id, "artifact", str(len(content)).encode())
            for start in range(0, len(content), MIB):
                writer.write(content[start : start + MIB])
                await writer.drain()
            expected = hashlib.sha256(str(len(content)).encode() + content).digest()
            assert await reader.readexactly(32 + 8 + 32) == alpha.id.encode() + b"artifact" + expected
            await writer.close()
            sent = await alpha.until(TransferObserved, lambda event: event.direction == "send")
            await beta.until(TransferObserved, lambda event: event.direction == "receive")
            for node, direction in ((alpha, "send"), (beta, "receive")):
                samples = [event for event in node.seen(TransferObserved) if event.direction == direction]
                assert 65_536 <= sum(sample.size for sample in samples) <= len(content)
                assert all(sample.duration_us > 0 for sample in samples)
            assert not sent.shaped

    run(main(), loop=loop)


def test_a_bulk_stream_needs_a_connected_peer_and_a_server_that_wants_it():
    async def main():
        alpha, beta = mesh("alpha", "beta")
        async with running(alpha, beta):
            with pytest.raises(ConnectionRefusedError, match="not connected"):
                await alpha.transport.open_bulk(beta.id, "artifact", b"")
            await alpha.meet(beta)
            reader, writer = await alpha.transport.open_bulk(beta.id, "artifact", b"")
            assert await reader.read(1) == b""
            writer.abort()

    run(main())


def test_a_slow_reader_holds_the_writer_back():
    async def main():
        alpha, beta = mesh("alpha", "beta")
        release = asyncio.Event()

        async def slow(_peer, _kind, _header, reader, _writer):
            await release.wait()
            while await reader.read(MIB):
                pass

        beta.transport.on_bulk = slow
        async with running(alpha, beta):
            await alpha.meet(beta)
            _, writer = await alpha.transport.open_bulk(beta.id, "artifact", b"")
            sent = 0

            async def pour():
                nonlocal sent
                while True:
                    writer.write(bytes(MIB))
                    await writer.drain()
                    sent += 1

            with pytest.raises(TimeoutError):
                await asyncio.wait_for(pour(), 0.5)
            assert sent < 32, "kernel buffers and ours are bounded"
            release.set()
            await writer.close()

    run(main())


def test_a_handler_that_meets_a_broken_peer_loses_one_stream_and_nothing_else():
    async def main():
        alpha, beta = mesh("alpha", "beta")
        started = asyncio.Event()

        async def wants_more(_peer, _kind, _header, reader, _writer):
            started.set()
            await reader.readexactly(10 * MIB)

        beta.transport.on_bulk = wants_more
        async with running(alpha, beta):
            await alpha.meet(beta)
            _, writer = await alpha.transport.open_bulk(beta.id, "artifact", b"")
            await started.wait()
            writer.abort()
            await eventually(lambda: beta.transport.counters.dropped["tls_failed"] == 1)
            assert alpha.transport.send(beta.id, Ping(seq=1), "datagram")
            await beta.until(MessageReceived)

    run(main())


def test_tls_refuses_whoever_is_not_admitted_inside_the_handshake():
    async def main():
        alpha, beta = mesh("alpha", "beta")
        stranger = Identity.generate()
        async with running(alpha):
            context = LaneContexts(stranger, alpha.book).client()

            async def knock():
                reader, writer = await asyncio.open_connection(
                    "127.0.0.1", alpha.transport.port, ssl=context, server_hostname=""
                )
                try:
                    writer.write(b"\x01")
                    await reader.readexactly(1)
                finally:
                    writer.transport.abort()

            with pytest.raises((ssl.SSLError, ConnectionError, asyncio.IncompleteReadError)):
                await knock()
            await eventually(lambda: alpha.transport.counters.rejected["unadmitted"] == 1)
        del beta

    run(main())


def test_a_client_refuses_a_tls_server_with_another_key_than_the_peers():
    async def main():
        (one, two, three), books = identities(3)
        alpha, gamma = Node(one, "alpha", books[0]), Node(three, "gamma", books[2])
        async with running(alpha, gamma):
            lane = alpha.transport._lane
            with pytest.raises(ConnectionRefusedError):
                await lane.open_bulk(two.node_id, ("127.0.0.1", gamma.transport.port), "artifact", b"")

    run(main())


def test_a_peer_admitted_while_running_can_use_tls_and_a_revoked_one_cannot():
    async def main():
        (one, two), books = identities(2)
        from protocol.admission import AdmissionBook

        alpha = Node(one, "alpha", AdmissionBook(books[0].mesh_id, books[0].statements[:1]))
        beta = Node(two, "beta", books[1])
        alpha.transport.on_bulk = beta.transport.on_bulk = echo_digest
        async with running(alpha, beta):
            await beta.meet(alpha)
            _, writer = await beta.transport.open_bulk(alpha.id, "artifact", b"0")
            await writer.close()
            alpha.book.revoke(beta.id, signer_public_key=one.public_key, sign=one.sign)
            with pytest.raises((OSError, EOFError)):
                await beta.transport._lane.open_bulk(alpha.id, ("127.0.0.1", alpha.transport.port), "artifact", b"0")

    run(main())


def block_udp(node):
    """The node's socket loses everything it gets and gives, as behind a firewall that drops UDP."""
    router = node.transport._router
    router.datagram_received = lambda *_: None
    router._put = lambda *_: None


@pytest.mark.parametrize("loop", [pytest.param("asyncio", marks=pytest.mark.nightly), "uvloop"])
def test_when_udp_is_blocked_control_runs_over_tls_and_is_marked(loop):
    async def main():
        alpha, beta = mesh("alpha", "beta")
        async with running(alpha, beta):
            block_udp(alpha)
            beta.transport.dial(alpha.address)
            met = await beta.until(PeerConnected)
            assert met.path == "tls"
            assert (await alpha.until(PeerConnected)).path == "tls"
            assert not beta.transport.connected[alpha.id].datagrams
            assert beta.transport.send(alpha.id, Ping(seq=1), "datagram")
            assert (await alpha.until(MessageReceived)).lane == "stream"
            await asyncio.sleep(2.5)
            assert beta.seen(DialFailed) == []
            assert beta.seen(PeerDisconnected) == alpha.seen(PeerDisconnected) == [], "degraded, not flapping"
            assert len(beta.seen(PeerConnected)) == len(alpha.seen(PeerConnected)) == 1

    run(main(), loop=loop)


def test_udp_that_dies_under_a_session_moves_it_to_tls_and_back_when_it_returns():
    async def main():
        alpha, beta = mesh("alpha", "beta", settings=QuicSettings(udp_retry_us=1_000_000))
        async with running(alpha, beta):
            await beta.meet(alpha)
            router = alpha.transport._router
            block_udp(alpha)
            for seq in range(60):
                beta.transport.send(alpha.id, Ping(seq=seq), "datagram")
                await asyncio.sleep(0.1)
                if beta.transport.connected[alpha.id].path == "tls":
                    break
            assert (await beta.until(PeerMoved)).path == "tls"
            assert alpha.transport.connected[beta.id].path == "tls"
            assert beta.transport.send(alpha.id, Ping(seq=1_000), "stream")
            await alpha.until(MessageReceived, lambda event: event.message == Ping(seq=1_000))
            del router.datagram_received, router._put
            await beta.until(PeerMoved, lambda event: event.path == "quic")
            assert beta.seen(PeerDisconnected) == alpha.seen(PeerDisconnected) == []
            assert beta.transport.send(alpha.id, Ping(seq=1_001), "datagram")
            await alpha.until(MessageReceived, lambda event: event.message == Ping(seq=1_001))

    run(main())
