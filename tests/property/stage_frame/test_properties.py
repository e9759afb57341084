"""Every shape of frame: what is estimated is what is encoded, what is encoded comes back, hostile bytes only refuse."""

import struct

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from protocol.errors import WireError
from protocol.fencing import PlanEpoch
from protocol.frame_envelope import ENVELOPE_BYTES, FrameEnvelope, open_sealed
from protocol.ids import Instance, NodeId
from protocol.stage_frame import (
    FLAG_LAST_CHUNK,
    FLAG_RETRIABLE,
    FrameDtype,
    FrameKind,
    LogitBias,
    RequestEpoch,
    Sampling,
    StageFrame,
    decode_frame,
    request_epoch_of,
)

I32 = st.integers(0, 2**31 - 1)
SIGNED = st.integers(-(2**31), 2**31 - 1)
U64 = st.integers(0, 2**64 - 1)
F32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
SAMPLING = st.builds(
    Sampling,
    *[F32] * 6,
    SIGNED,
    SIGNED,
    st.integers(0, 2**32 - 1),
    st.lists(st.builds(LogitBias, SIGNED, F32), max_size=20).map(tuple),
)
IDS = st.lists(SIGNED, max_size=50).map(tuple)
HEADER = {
    "request_id": U64,
    "session_id": U64,
    "pos_start": I32,
    "token_count": st.integers(0, 1_048_576),
    "seq_id": I32,
    "phase": I32,
    "marks": st.sampled_from([0, FLAG_LAST_CHUNK, FLAG_RETRIABLE, FLAG_LAST_CHUNK | FLAG_RETRIABLE]),
    "checkpoint_generation": I32,
    "prompt_token_count": I32,
    "decode_step": I32,
    "current_token": st.integers(-1, 2**31 - 2),
    "source_stage_index": I32,
    "dtype": st.sampled_from(FrameDtype),
    "payload": st.binary(max_size=300),
}
WITH_SECTIONS = st.builds(
    StageFrame,
    kind=st.sampled_from([kind for kind in FrameKind if kind is not FrameKind.STATE_IMPORT]),
    sampling=st.none() | SAMPLING,
    chat_metadata=st.none() | st.binary(max_size=100),
    token_ids=IDS,
    position_ids=IDS,
    **HEADER,
)
STATE_IMPORTS = st.builds(StageFrame, kind=st.just(FrameKind.STATE_IMPORT), **HEADER)
FRAMES = WITH_SECTIONS | STATE_IMPORTS
EPOCHS = st.builds(RequestEpoch, *[st.integers(0, 2)] * 5)


@given(FRAMES)
def test_the_estimate_is_the_encoded_length_and_the_frame_comes_back(frame: StageFrame) -> None:
    raw = frame.encode()
    assert frame.estimated_wire_bytes() == len(raw)
    assert decode_frame(raw) == frame
    assert request_epoch_of(raw) == frame.request_epoch
    assert frame.telemetry()["llama_stage.message_wire_bytes"] == len(raw)


@given(FRAMES, U64, st.integers(0, 2**32 - 1), st.text("abcdefgh234567", min_size=1, max_size=32))
def test_sealing_adds_the_envelope_and_nothing_else(frame: StageFrame, term: int, cache: int, node: str) -> None:
    envelope = FrameEnvelope(PlanEpoch(term, NodeId(node), Instance("ab" * 16)), "default", cache)
    sealed = envelope.seal(frame)
    assert len(sealed) == ENVELOPE_BYTES + frame.estimated_wire_bytes()
    assert open_sealed(sealed) == (envelope, frame)


@given(FRAMES, st.data())
def test_a_cut_frame_is_refused_or_has_a_shorter_payload(frame: StageFrame, data: st.DataObject) -> None:
    raw = frame.encode()
    cut = data.draw(st.integers(0, len(raw)))
    payload_start = len(raw) - len(frame.payload)
    if cut < payload_start:
        with pytest.raises(WireError) as refused:
            decode_frame(raw[:cut])
        assert refused.value.reason == "truncated"
    else:
        assert decode_frame(raw[:cut]).payload == raw[payload_start:cut]


@settings(max_examples=300)
@given(st.binary(max_size=400))
@example(struct.pack("<15i2Q", 1, 0, 0, 2**31 - 1, 2**31 - 1, 1, *[0] * 9, 0, 0))
def test_arbitrary_bytes_give_a_frame_that_encodes_to_them_or_a_wire_error(raw: bytes) -> None:
    for attempt in (raw, struct.pack("<15i", 1, 0, 0, 1, 1, 1, *[0] * 9) + raw):
        try:
            frame = decode_frame(attempt)
        except WireError:
            continue
        assert frame.encode() == attempt
        assert frame.estimated_wire_bytes() == len(attempt)


@given(FRAMES, st.integers(0, 75), st.integers(0, 255))
def test_one_changed_header_byte_never_escapes_the_typed_error(frame: StageFrame, at: int, value: int) -> None:
    raw = bytearray(frame.encode())
    raw[at] = value
    try:
        decoded = decode_frame(raw)
    except WireError as refused:
        reason = refused.reason
    else:
        assert decoded.encode() == raw
        return
    assert reason in {"truncated", "oversized", "version", "unknown_kind", "malformed"}


@given(EPOCHS, EPOCHS, EPOCHS)
def test_staleness_is_a_strict_order_within_a_flow_and_nothing_across_flows(
    first: RequestEpoch, second: RequestEpoch, third: RequestEpoch
) -> None:
    assert not first.is_stale_for(first)
    if not first.same_flow(second):
        assert not first.is_stale_for(second)
        return
    assert first.is_stale_for(second) + second.is_stale_for(first) + (first == second) == 1
    if first.is_stale_for(second) and second.is_stale_for(third):
        assert first.is_stale_for(third)
