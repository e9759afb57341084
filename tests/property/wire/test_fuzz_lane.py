"""Hostile first bytes on the TCP lane: before the handshake from strangers, after it from a member."""

import asyncio
import contextlib
import random
import socket
import ssl
from collections import Counter

import msgpack
import pytest

from config.settings import QuicSettings
from protocol.codec import frame
from protocol.quic.identity import Identity
from protocol.quic.interface import REASONS, TransportCounters
from protocol.quic.limits import HandshakeGate
from protocol.quic.tcp_lane import BULK_TYPE, HEADER_MAX_BYTES, LaneHost, TcpLane
from protocol.quic.tcp_tunnel import TUNNEL_TYPE
from protocol.quic.tls import LaneContexts
from tests.bench.rows import append
from tests.integration.transport_mesh import identities, now_us
from tests.property.growth import growth

GROWTH_BYTES = 60 * 50_000
"""Sixty bytes a case: a table of the interpreter that doubles meanwhile takes 2 MB, a connection that stays 5 kB each."""
MEMBER_SHARE = 0.1
"""Of the cases, those that finish the handshake: each costs two milliseconds."""


class Besieged:
    """A lane without a listening socket; what it let through is counted beside what it counted itself."""

    def __init__(self):
        (own, peer), (book, other) = identities(2)
        self.counters, self.let_in = TransportCounters(), Counter()
        self.member, self.stranger = (
            LaneContexts(peer, other).client(),
            LaneContexts(Identity.generate(), other).client(),
        )
        host = LaneHost(
            contexts=LaneContexts(own, book),
            settings=QuicSettings(),
            gate=HandshakeGate(1_000_000),
            counters=self.counters,
            admitted=book.__contains__,
            strangers=lambda: 0,
            now_us=now_us,
            link=lambda _: None,
            observe=lambda _: lambda *_: None,
            control=self._control,
            tunnel=self._tunnel,
        )
        self.lane = TcpLane(host, None, self._bulk)

    async def _tunnel(self, tunnel):
        wrong = await tunnel.run(lambda _: None)  # what a packet says is another fuzz's
        self.let_in["tunnel"] += not wrong
        return wrong

    async def _control(self, *_):
        self.let_in["control"] += 1

    async def _bulk(self, _peer, kind, header, *_):
        assert 0 < len(kind) <= 32
        assert len(header) <= HEADER_MAX_BYTES
        self.let_in["bulk"] += 1

    @property
    def outcomes(self):
        return sum(self.let_in.values()) + sum(self.counters.rejected.values()) + sum(self.counters.dropped.values())


def client_hello(context):
    """What a client of this context says first."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing).do_handshake()
    return outgoing.read()


def first_bytes(die, hellos):
    """Before the handshake: noise, a hello that is cut, changed, continued or announces more than there may be."""
    hello = bytearray(die.choice(hellos))
    match die.randrange(6):
        case 0:
            raw = die.randbytes(die.randrange(600))
        case 1:
            raw = bytes(hello[: die.randrange(len(hello))])
        case 2:
            for _ in range(die.randrange(1, 6)):
                hello[die.randrange(len(hello))] = die.randrange(256)
            raw = bytes(hello)
        case 3:
            raw = bytes(hello) + die.randbytes(die.randrange(1, 400))
        case 4:
            raw = b"\x16\x03\x01" + die.choice([b"\xff\xff", b"\x40\x01", b"\x00\x00"]) + die.randbytes(20_000)
        case _:
            raw = die.choice([b"GET / HTTP/1.1\r\n\r\n", b"SSH-2.0-x\r\n", b"", b"\x80\x2e\x01\x03\x01" + bytes(40)])
    return raw if die.randrange(8) else TUNNEL_TYPE + raw


def first_words(die):
    """After the handshake: what begins neither a control nor a bulk stream, or a bulk stream with a hostile header."""
    match die.randrange(5):
        case 0:
            return die.randbytes(die.randrange(200))
        case 1:
            return BULK_TYPE + die.choice([HEADER_MAX_BYTES + 1, 2**31, 2**32 - 1]).to_bytes(4, "big") + b"x" * 100
        case 2:
            header = die.choice([["k" * 33, b""], ["", b""], ["k", "x"], [1, b""], [], None, {"k": b""}, ["k", b"", 1]])
            return BULK_TYPE + frame(msgpack.packb(header))
        case 3:
            return BULK_TYPE + frame(die.randbytes(die.randrange(300)))
        case _:
            whole = BULK_TYPE + frame(msgpack.packb(["k", die.randbytes(40)]))
            return whole[: die.randrange(len(whole) + 1)]


async def speak(channel, context, words):
    """Finish a handshake over ``channel``, say ``words``, and leave."""
    reader, writer = await asyncio.open_connection(sock=channel, ssl=context, server_hostname="")
    writer.write(words)
    await writer.drain()
    writer.close()
    del reader


async def one_case(die, besieged, hellos):
    ours, theirs = socket.socketpair()
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        tasks.create_task(besieged.lane._accepted(ours))
        if die.random() < MEMBER_SHARE:
            context = die.choice([besieged.member, besieged.member, besieged.stranger])
            with contextlib.suppress(OSError):  # turned away, as a stranger is
                await speak(theirs, context, first_words(die))
        else:
            theirs.setblocking(False)
            theirs.send(first_bytes(die, hellos))
            theirs.close()


def fuzz(cases, seed):
    async def main():
        die, besieged, errors = random.Random(seed), Besieged(), []
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: errors.append(context))
        hellos = [client_hello(besieged.member), client_hello(besieged.stranger)]
        for number in range(cases):
            await one_case(die, besieged, hellos)
            assert besieged.outcomes == number + 1, "one connection, one outcome"
        await asyncio.sleep(0)
        assert errors == []
        assert besieged.lane.strangers == 0
        assert set(besieged.counters.rejected) | set(besieged.counters.dropped) <= REASONS
        return besieged

    return asyncio.run(main())


def test_hostile_first_bytes_are_refused_and_counted_one_by_one():
    besieged = fuzz(300, 7)
    assert besieged.counters.rejected["unadmitted"] > 150
    assert besieged.counters.dropped["tls_failed"] + besieged.counters.rejected["unexpected_stream"] > 5


@pytest.mark.nightly
@pytest.mark.timeout(3_600)
def test_many_hostile_first_bytes_leave_no_growth():
    fuzz(500, 8)
    rejected, dropped, let_in, cases = Counter(), Counter(), Counter(), 0
    with growth() as grown:
        grown.mark()
        for part in range(10):
            besieged = fuzz(5_000, 80 + part)
            rejected, dropped = rejected + besieged.counters.rejected, dropped + besieged.counters.dropped
            let_in, cases = let_in + besieged.let_in, cases + 5_000
            del besieged
        grown.mark()
    counted = {"rejected": dict(rejected), "dropped": dict(dropped), "let_in": dict(let_in)}
    append("fuzz", "tls_lane", cases=cases, **counted, growth_bytes=grown.bytes)
    assert grown.bytes < GROWTH_BYTES, grown.keepers()
