"""The layout is a contract with other implementations: it is pinned here byte by byte."""

import struct

import pytest

from protocol.errors import WireError
from protocol.fencing import NO_EPOCH, PlanEpoch
from protocol.frame_envelope import ENVELOPE_BYTES, FrameEnvelope, open_envelope, open_sealed, refusal_of
from protocol.ids import Instance, NodeId
from protocol.stage_frame import (
    FLAG_LAST_CHUNK,
    FLAG_RETRIABLE,
    HEADER_BYTES,
    FrameDtype,
    FrameKind,
    LogitBias,
    RequestEpoch,
    Sampling,
    StageFrame,
    decode_frame,
    request_epoch_of,
)

DECODE = StageFrame(
    kind=FrameKind.DECODE,
    request_id=7,
    session_id=9,
    pos_start=11,
    token_count=1,
    prompt_token_count=11,
    decode_step=1,
    dtype=FrameDtype.F32,
    payload=b"\x01\x02\x03\x04",
)
EPOCH = PlanEpoch(3, NodeId("n" * 32), Instance("0123456789abcdef" * 2))


def test_the_fixed_header_is_fifteen_i32_then_two_u64_little_endian() -> None:
    raw = StageFrame(
        kind=FrameKind.PREFILL,
        request_id=2**63 + 1,
        session_id=5,
        pos_start=100,
        token_count=2,
        seq_id=6,
        phase=1,
        marks=FLAG_LAST_CHUNK,
        checkpoint_generation=8,
        prompt_token_count=102,
        decode_step=0,
        current_token=-1,
        source_stage_index=3,
        dtype=FrameDtype.F16,
        token_ids=(41, 42),
        position_ids=(100,),
        payload=b"abcd",
    ).encode()
    header = struct.unpack("<iiiii iiiiiiiiii QQ", raw[:76])
    assert header == (1, 100, 2, 2, 1, 1, 6, 1, 4, 8, 102, 0, -1, 3, 2, 2**63 + 1, 5)
    assert struct.unpack("<2i", raw[76:84]) == (41, 42)
    assert struct.unpack("<i", raw[84:88]) == (100,)
    assert raw[88:] == b"abcd"


def test_sampling_takes_forty_bytes_and_eight_per_logit_bias_and_metadata_its_length_and_four() -> None:
    plain = StageFrame(kind=FrameKind.DISCARD, request_id=1, session_id=1)
    sampled = StageFrame(kind=FrameKind.DISCARD, request_id=1, session_id=1, sampling=Sampling())
    biased = Sampling(logit_biases=(LogitBias(1, 0.5), LogitBias(2, -0.5)))
    both = StageFrame(kind=FrameKind.DISCARD, request_id=1, session_id=1, sampling=biased, chat_metadata=b"{}")
    assert len(plain.encode()) == HEADER_BYTES == 76
    assert len(sampled.encode()) == 76 + 40
    assert len(both.encode()) == 76 + 40 + 16 + 4 + 2
    assert decode_frame(both.encode()) == both


def test_a_state_import_is_the_header_and_the_raw_bytes_alone() -> None:
    raw = StageFrame(kind=FrameKind.STATE_IMPORT, request_id=1, session_id=2, payload=b"state").encode()
    assert raw[76:] == b"state"
    with pytest.raises(WireError, match="raw bytes alone"):
        StageFrame(kind=FrameKind.STATE_IMPORT, request_id=1, session_id=2, token_ids=(1,)).encode()


def test_the_request_epoch_is_read_from_the_header_alone() -> None:
    assert request_epoch_of(DECODE.encode()[:76]) == RequestEpoch(7, 9, 0, 11, 1) == DECODE.request_epoch
    with pytest.raises(WireError) as refused:
        request_epoch_of(DECODE.encode()[:75])
    assert refused.value.reason == "truncated"


def test_epochs_of_different_requests_or_sessions_are_never_stale_for_each_other() -> None:
    newest = RequestEpoch(7, 9, 1, 20, 5)
    assert RequestEpoch(7, 9, 1, 20, 4).is_stale_for(newest)
    assert not newest.is_stale_for(newest)
    assert not RequestEpoch(6, 9, 0, 0, 0).is_stale_for(newest)
    assert not RequestEpoch(7, 8, 0, 0, 0).is_stale_for(newest)


def test_a_lower_checkpoint_generation_is_stale_however_many_tokens_it_has() -> None:
    assert RequestEpoch(7, 9, 0, 900, 900).is_stale_for(RequestEpoch(7, 9, 1, 1, 0))
    assert RequestEpoch(7, 9, 1, 19, 900).is_stale_for(RequestEpoch(7, 9, 1, 20, 0))


def test_telemetry_reports_the_encoded_length_and_the_activations() -> None:
    assert DECODE.telemetry() == {
        "llama_stage.message_wire_bytes": len(DECODE.encode()),
        "skippy.activation_bytes": 4,
        "skippy.checkpoint_generation": 0,
        "skippy.prompt_token_count": 11,
        "skippy.decode_step": 1,
    }


@pytest.mark.parametrize(
    ("offset", "value", "reason"),
    [
        (0, 99, "unknown_kind"),
        (4, -1, "malformed"),
        (8, 1_048_577, "oversized"),
        (8, -1, "oversized"),
        (12, 1_048_576, "truncated"),
        (16, -5, "oversized"),
        (20, 2, "version"),
        (32, 1 << 20, "malformed"),
        (32, 1, "truncated"),
        (36, -1, "malformed"),
        (56, 77, "malformed"),
    ],
)
def test_a_header_that_lies_is_refused_by_name(offset: int, value: int, reason: str) -> None:
    raw = bytearray(DECODE.encode())
    struct.pack_into("<i", raw, offset, value)
    with pytest.raises(WireError) as refused:
        decode_frame(bytes(raw))
    assert refused.value.reason == reason


def test_a_metadata_length_over_eight_mebibytes_is_refused_before_it_is_read() -> None:
    raw = bytearray(StageFrame(kind=FrameKind.DECODE, request_id=1, session_id=1, chat_metadata=b"x").encode())
    struct.pack_into("<I", raw, 76, 8 * 1024 * 1024 + 1)
    with pytest.raises(WireError) as refused:
        decode_frame(raw)
    assert refused.value.reason == "oversized"


def test_more_than_256_logit_biases_are_refused_on_both_sides() -> None:
    allowed = Sampling(logit_biases=tuple(LogitBias(token, 1.0) for token in range(256)))
    frame = StageFrame(kind=FrameKind.DECODE, request_id=1, session_id=1, sampling=allowed)
    raw = bytearray(frame.encode())
    assert len(raw) == 76 + 40 + 8 * 256
    struct.pack_into("<I", raw, 76 + 36, 257)
    for content in (bytes(raw), bytes(raw) + b"12345678"):
        with pytest.raises(WireError) as refused:
            decode_frame(content)
        assert refused.value.reason == "oversized"
    too_many = Sampling(logit_biases=tuple(LogitBias(token, 1.0) for token in range(257)))
    with pytest.raises(WireError):
        StageFrame(kind=FrameKind.DECODE, request_id=1, session_id=1, sampling=too_many).encode()


def test_sampling_that_is_not_a_number_is_refused() -> None:
    frame = StageFrame(kind=FrameKind.DECODE, request_id=1, session_id=1, sampling=Sampling(temperature=float("nan")))
    with pytest.raises(WireError, match="finite"):
        frame.encode()
    raw = bytearray(StageFrame(kind=FrameKind.DECODE, request_id=1, session_id=1, sampling=Sampling()).encode())
    struct.pack_into("<f", raw, 76, float("inf"))
    with pytest.raises(WireError, match="finite"):
        decode_frame(raw)


def test_decoding_copies_no_payload() -> None:
    raw = bytearray(DECODE.encode())
    frame = decode_frame(raw)
    raw[-1] = 0xFF
    assert frame.payload[-1] == 0xFF


def test_the_envelope_is_128_bytes_and_brings_the_plan_epoch_slot_and_cache_epoch_back() -> None:
    envelope = FrameEnvelope(EPOCH, "default", 4_000_000_000)
    sealed = envelope.seal(DECODE)
    assert len(sealed) == ENVELOPE_BYTES + DECODE.estimated_wire_bytes() == 128 + 80
    assert open_sealed(sealed) == (envelope, DECODE)


def test_an_envelope_without_a_plan_comes_back_as_no_plan() -> None:
    envelope, _ = open_envelope(FrameEnvelope(NO_EPOCH, "default").seal(DECODE))
    assert envelope.epoch == NO_EPOCH


@pytest.mark.parametrize(
    "envelope",
    [
        FrameEnvelope(PlanEpoch(1, NodeId("n" * 33), EPOCH.instance), "default"),
        FrameEnvelope(PlanEpoch(1, NodeId("ä"), EPOCH.instance), "default"),
        FrameEnvelope(PlanEpoch(1, NodeId("n"), Instance("not hexadecimal")), "default"),
        FrameEnvelope(PlanEpoch(2**64, NodeId("n"), EPOCH.instance), "default"),
        FrameEnvelope(EPOCH, "s" * 65),
        FrameEnvelope(EPOCH, "default", 2**32),
    ],
)
def test_an_envelope_that_does_not_fit_its_fields_is_refused(envelope: FrameEnvelope) -> None:
    with pytest.raises(WireError):
        envelope.encode()


def test_bytes_that_are_no_envelope_are_refused() -> None:
    sealed = bytearray(FrameEnvelope(EPOCH, "default").seal(DECODE))
    with pytest.raises(WireError, match="shorter"):
        open_envelope(sealed[:127])
    sealed[0] = 0
    with pytest.raises(WireError, match="not a stage frame"):
        open_envelope(sealed)


def test_a_refusal_names_the_request_and_the_active_plan_under_the_refused_frames_own_epoch() -> None:
    active = PlanEpoch(9, NodeId("m" * 32), EPOCH.instance)
    envelope = FrameEnvelope(EPOCH, "default", 5)
    sealed = refusal_of(envelope.seal(DECODE), active)
    assert sealed is not None
    answered, answer = open_sealed(sealed)
    assert answered == envelope
    assert (answer.kind, answer.request_epoch, answer.marks) == (
        FrameKind.REFUSED,
        DECODE.request_epoch,
        FLAG_RETRIABLE,
    )
    assert open_envelope(bytes(answer.payload))[0] == FrameEnvelope(active, "default")
    assert refusal_of(sealed, active) is None
