"""A million hostile frames: cut, spliced, flipped, and headers that lie about everything that follows."""

import random
import struct

import psutil
import pytest

from protocol.errors import WireError
from protocol.fencing import PlanEpoch
from protocol.frame_envelope import FrameEnvelope, open_sealed
from protocol.ids import Instance, NodeId
from protocol.stage_frame import FrameDtype, FrameKind, LogitBias, Sampling, StageFrame

REASONS = {"truncated", "oversized", "version", "unknown_kind", "malformed"}
ENVELOPE = FrameEnvelope(PlanEpoch(3, NodeId("n" * 32), Instance("ab" * 16)), "default", 7)
SEEDS = [
    ENVELOPE.seal(frame)
    for frame in (
        StageFrame(kind=FrameKind.DISCARD, request_id=1, session_id=2),
        StageFrame(
            kind=FrameKind.PREFILL,
            request_id=2**64 - 1,
            session_id=2,
            token_count=3,
            sampling=Sampling(logit_biases=(LogitBias(1, 0.5), LogitBias(2, 1.5))),
            chat_metadata=b"{}",
            token_ids=(1, 2, 3),
            position_ids=(0, 1, 2),
            dtype=FrameDtype.F32,
            payload=bytes(48),
        ),
        StageFrame(kind=FrameKind.STATE_IMPORT, request_id=1, session_id=1, payload=b"state"),
    )
]
EXTREMES = (0, 1, -1, 2**31 - 1, -(2**31), 256, 257, 1_048_576, 1_048_577, 8 * 2**20, 8 * 2**20 + 1)


def hostile(source: random.Random) -> bytes:
    """One mutated frame; the envelope is sometimes left whole so that the frame behind it is reached."""
    raw = bytearray(source.choice(SEEDS))
    for _ in range(source.randint(1, 4)):
        start = source.choice((0, 128, 128, 128))
        match source.randrange(5):
            case 0 if len(raw) > start:
                raw[source.randrange(start, len(raw))] = source.randrange(256)
            case 1 if len(raw) > start:
                del raw[source.randrange(start, len(raw)) :]
            case 2:
                raw += source.randbytes(source.randrange(64))
            case 3 if len(raw) >= 204:
                struct.pack_into("<i", raw, 128 + 4 * source.randrange(19), source.choice(EXTREMES))
            case 4 if len(raw) > start:
                other = source.choice(SEEDS)
                raw[source.randrange(start, len(raw)) :] = other[source.randrange(len(other)) :]
            case _:
                pass
    return bytes(raw)


def survive(count: int, seed: int) -> tuple[int, int]:
    source = random.Random(seed)
    accepted = refused = 0
    for _ in range(count):
        raw = hostile(source)
        try:
            envelope, frame = open_sealed(raw)
        except WireError as error:
            if error.reason not in REASONS:
                raise
            refused += 1
        else:
            assert envelope.seal(frame) == raw
            assert frame.estimated_wire_bytes() + 128 == len(raw)
            accepted += 1
    return accepted, refused


def test_hostile_frames_are_refused_by_reason_or_are_exactly_what_they_say() -> None:
    accepted, refused = survive(20_000, seed=1)
    assert accepted > 1_000
    assert refused > 5_000


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_million_hostile_frames_crash_nothing_and_cost_no_memory() -> None:
    process = psutil.Process()
    survive(50_000, seed=2)
    before = process.memory_info().rss
    survive(1_000_000, seed=3)
    assert process.memory_info().rss - before < 10_000_000
