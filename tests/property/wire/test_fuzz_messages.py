"""Hostile envelopes against codec and session: no crash, no growth, every refusal counted by reason."""

import random
from collections import Counter
from typing import get_args

import pytest

from protocol.codec import FrameReader, decode, encode, frame
from protocol.errors import WireError
from protocol.messages import Message
from protocol.quic.interface import REASONS, MessageReceived, PeerConnected
from protocol.quic.session import State
from tests.bench.rows import append
from tests.property.growth import growth
from tests.property.wire.hostile import VALID, hostile
from tests.property.wire.valid import MESSAGES
from tests.unit.quic.test_session import World

FAST, LONG = 15_000, 700_000
GROWTH_BYTES = 262_144


def outcome(raw):
    """What the codec makes of ``raw``; anything but a message or a ``WireError`` is a failure of the test."""
    try:
        message = decode(raw)
    except WireError as error:
        return error.reason if len(str(error)) < 600 else "long"
    return "unknown" if message is None else "valid"


def test_every_type_of_message_is_among_those_that_are_spoilt():
    assert {type(message) for message in MESSAGES} == set(get_args(get_args(Message)[0]))
    assert [decode(raw) for raw in VALID] == list(MESSAGES)
    lists = {name for message in MESSAGES for name in getattr(getattr(message, "gossip", None), "model_fields_set", ())}
    assert lists == {"rows", "accusations", "admissions", "refutations", "versions"}


def fuzz_codec(cases, seed):
    die, seen = random.Random(seed), Counter()
    for _ in range(cases):
        seen[outcome(hostile(die))] += 1
    assert set(seen) <= {"malformed", "version", "oversized", "unknown", "valid"}
    return seen


def test_the_codec_survives_hostile_envelopes():
    seen = fuzz_codec(FAST, 1)
    assert seen["malformed"] > FAST // 2
    assert seen["valid"] > 0


def test_frames_cut_anywhere_from_a_hostile_stream_are_whole_or_refused():
    die, refused = random.Random(2), Counter()
    for _ in range(400):
        reader, whole = FrameReader(), [hostile(die) for _ in range(5)]
        stream = b"".join(frame(raw) for raw in whole) + b"\xff" * 4
        out = []
        try:
            while stream:
                cut = die.randrange(1, 300)
                out += reader.feed(stream[:cut])
                stream = stream[cut:]
        except WireError as error:
            refused[error.reason] += 1
        assert out == whole[: len(out)]
    assert refused == {"oversized": 400}


class Books:
    """What was fed to sessions against what became of it: every input is delivered, rejected or dropped, once."""

    def __init__(self, world):
        self.world, self.inputs, self.paths = world, 0, 0
        self._echoed, self._taken = world.table.echoed, world.table.taken
        world.table.echoed, world.table.taken = self._on_echo, self._on_take

    def _on_echo(self, *given):
        self.paths += 1
        self._echoed(*given)

    def _on_take(self, session):
        taken = self._taken(session)
        self.paths += taken
        return taken

    def feed(self, session, raw, lane):
        before = self.outcomes()
        session.frame(raw, lane)
        self.inputs += 1
        assert self.outcomes() - before == 1, "one input, one outcome"

    def outcomes(self):
        """Messages handed up, comparisons of paths, greetings taken; refusals and what was dropped, by reason."""
        counters = self.world.table.counters
        taken = counters.messages["receive"] + self.paths + counters.handshakes["completed"]
        return taken + sum(counters.rejected.values()) + sum(counters.dropped.values())


def fuzz_sessions(cases, seed):
    die = random.Random(seed)
    world = World(known=2)
    books, ended_by_us = Books(world), 0
    while books.inputs < cases:
        admitted = die.random() < 0.6
        key = world.peer.public_key if admitted else world.third.public_key
        session, wire = world.session(key=key, dialled=False)
        if admitted and die.random() < 0.7:
            books.feed(session, greeting(world), "stream")
        for _ in range(die.randrange(1, 60)):
            books.feed(session, hostile(die), die.choice(["stream", "datagram"]))
            world.time_us += die.randrange(5_000)
            if session.state is State.CLOSED:
                break
        if not admitted:
            assert all(b"hello" not in raw for raw in wire.frames), "a stranger never hears a greeting"
            assert set(wire.shut_with) <= {"refused"}
        received = [event for event in world.events if isinstance(event, MessageReceived)]
        assert all(event.peer == world.peer.node_id for event in received)
        assert all(event.peer == world.peer.node_id for event in world.events if isinstance(event, PeerConnected))
        world.events.clear()
        ended_by_us += session.state is State.GREETING
        session.end("closed")
    counters = world.table.counters
    assert set(counters.rejected) | set(counters.dropped) <= REASONS
    assert books.outcomes() == books.inputs + ended_by_us
    assert world.table.strangers == 0
    assert not world.table.connected
    return counters


def greeting(world):
    return encode(world.hello("peer"))


def test_sessions_survive_hostile_messages_and_count_them():
    counters = fuzz_sessions(6_000, 3)
    assert counters.rejected["malformed"] > 100
    assert counters.rejected["unadmitted"] > 0 < counters.rejected["hello_first"]


@pytest.mark.nightly
@pytest.mark.timeout(3_600)
def test_a_million_hostile_messages_leave_no_growth():
    """Growth is measured over the second half: the first fills pydantic's cache of 16,384 short strings (2 MB)."""
    seen, rejected, dropped = Counter(), Counter(), Counter()
    with growth() as grown:
        for half in range(2):
            for part in range(5):
                seen += fuzz_codec(LONG // 10, 100 + 5 * half + part)
                counters = fuzz_sessions(30_000, 100 + 5 * half + part)
                rejected, dropped = rejected + counters.rejected, dropped + counters.dropped
            grown.mark()
    append("fuzz", "codec", cases=LONG, outcomes=dict(seen), growth_bytes=grown.bytes)
    append("fuzz", "sessions", cases=300_000, rejected=dict(rejected), dropped=dict(dropped), growth_bytes=grown.bytes)
    assert grown.bytes < GROWTH_BYTES, grown.keepers()
