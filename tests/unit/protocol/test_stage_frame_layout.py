"""One frame with every section, written by hand from PROTOCOL §6, and the bounds of what a frame may carry.

A round trip cannot see two fields that are swapped on both sides; another implementation would.
"""

import mmap

import pytest

from protocol.errors import WireError
from protocol.stage_frame import (
    FLAG_CHAT_METADATA,
    FLAG_LAST_CHUNK,
    FLAG_RETRIABLE,
    FLAG_SAMPLING,
    HEADER_BYTES,
    FrameDtype,
    FrameKind,
    LogitBias,
    Sampling,
    StageFrame,
    decode_frame,
)

MEBIBYTE = 1024 * 1024

GOLDEN = StageFrame(
    kind=FrameKind.PREFILL,
    pos_start=0x11,
    token_count=2,
    seq_id=0x12,
    phase=0x13,
    marks=FLAG_LAST_CHUNK | FLAG_RETRIABLE,
    checkpoint_generation=0x14,
    prompt_token_count=0x15,
    decode_step=0x16,
    current_token=0x17,
    source_stage_index=0x18,
    dtype=FrameDtype.BF16,
    request_id=0x1122334455667788,
    session_id=0x99AABBCCDDEEFF00,
    sampling=Sampling(
        temperature=0.5,
        top_p=0.75,
        min_p=0.25,
        repeat_penalty=2.0,
        presence_penalty=-1.0,
        frequency_penalty=1.5,
        top_k=40,
        penalty_last_n=64,
        seed=0xDEADBEEF,
        logit_biases=(LogitBias(5, 8.0), LogitBias(6, -0.5)),
    ),
    chat_metadata=b"{}",
    token_ids=(0x21, 0x22),
    position_ids=(0x31, 0x32, 0x33),
    payload=b"\xca\xfe\xf0\x0d",
)

GOLDEN_HEX = """
    01000000 11000000 02000000 02000000 03000000                     kind, pos_start, tokens, token ids, position ids
    01000000 12000000 13000000 0f000000 14000000                     version, seq_id, phase, flags, generation
    15000000 16000000 17000000 18000000 03000000                     prompt tokens, decode step, token, source, dtype
    8877665544332211 00ffeeddccbbaa99                                request_id, session_id
    0000003f 0000403f 0000803e                                       temperature, top_p, min_p
    00000040 000080bf 0000c03f                                       penalties: repeat, presence, frequency
    28000000 40000000 efbeadde 02000000                              top_k, penalty_last_n, seed, logit biases
    05000000 00000041 06000000 000000bf                              (token, bias) twice
    02000000 7b7d                                                    chat metadata: length, bytes
    21000000 22000000                                                token ids
    31000000 32000000 33000000                                       position ids
    cafef00d                                                         payload
"""


def golden_bytes() -> bytes:
    """The hexadecimal columns of ``GOLDEN_HEX``, without what they mean."""
    return b"".join(bytes.fromhex(line.strip().split("   ")[0]) for line in GOLDEN_HEX.strip().splitlines())


def test_a_frame_with_every_section_has_exactly_these_bytes() -> None:
    assert GOLDEN.encode() == golden_bytes()
    assert len(golden_bytes()) == 76 + 40 + 2 * 8 + 4 + 2 + 2 * 4 + 3 * 4 + 4


def test_these_bytes_are_read_as_that_frame_field_by_field() -> None:
    read = decode_frame(golden_bytes())
    assert read == GOLDEN
    assert read.sampling is not None
    assert (read.sampling.temperature, read.sampling.top_p, read.sampling.min_p) == (0.5, 0.75, 0.25)
    assert (read.sampling.top_k, read.sampling.penalty_last_n, read.sampling.seed) == (40, 64, 0xDEADBEEF)


def test_the_numbers_of_kinds_types_and_flags_are_those_of_the_wire() -> None:
    assert {kind.name: kind.value for kind in FrameKind} == {
        "PREFILL": 1,
        "DECODE": 2,
        "PREDICTION": 3,
        "DISCARD": 4,
        "STATE_IMPORT": 5,
        "REFUSED": 6,
    }
    assert {dtype.name: dtype.value for dtype in FrameDtype} == {"NONE": 0, "F32": 1, "F16": 2, "BF16": 3}
    assert (FLAG_SAMPLING, FLAG_CHAT_METADATA, FLAG_LAST_CHUNK, FLAG_RETRIABLE) == (1, 2, 4, 8)


def zeros() -> memoryview:
    """Header and more than 512 MiB of zeros; no page stands behind them until it is written."""
    return memoryview(mmap.mmap(-1, HEADER_BYTES + 512 * MEBIBYTE + 1))


def test_a_payload_of_512_mebibytes_is_the_largest_that_is_encoded() -> None:
    room = zeros()

    def encoded(size: int) -> int:
        frame = StageFrame(kind=FrameKind.STATE_IMPORT, request_id=1, session_id=1, payload=room[:size])
        return sum(len(part) for part in frame.parts())  # not joined: nothing is copied

    assert encoded(512 * MEBIBYTE) == HEADER_BYTES + 512 * MEBIBYTE
    with pytest.raises(WireError, match="payload") as refused:
        encoded(512 * MEBIBYTE + 1)
    assert refused.value.reason == "oversized"


def test_a_payload_of_512_mebibytes_is_the_largest_that_is_read() -> None:
    raw = zeros()
    raw[:HEADER_BYTES] = StageFrame(kind=FrameKind.STATE_IMPORT, request_id=1, session_id=1).encode()
    assert len(decode_frame(raw[:-1]).payload) == 512 * MEBIBYTE
    with pytest.raises(WireError, match="payload") as refused:
        decode_frame(raw)
    assert refused.value.reason == "oversized"


def test_chat_metadata_of_eight_mebibytes_is_the_largest_that_is_encoded() -> None:
    allowed = StageFrame(kind=FrameKind.DECODE, request_id=1, session_id=1, chat_metadata=bytes(8 * MEBIBYTE))
    assert sum(len(part) for part in allowed.parts()) == 76 + 4 + 8 * MEBIBYTE
    over = StageFrame(kind=FrameKind.DECODE, request_id=1, session_id=1, chat_metadata=bytes(8 * MEBIBYTE + 1))
    with pytest.raises(WireError, match="chat metadata") as refused:
        over.parts()
    assert refused.value.reason == "oversized"
