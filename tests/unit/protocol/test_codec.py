"""The codec: what it takes, what it refuses and how it says so."""

import tracemalloc

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import codec
from protocol.codec import FrameReader, check_structure, decode, decode_row, encode, encode_row, frame, unpack
from protocol.errors import WireError
from protocol.messages import Gossip, GossipPush, Hello, Ping
from protocol.rows import NodeRow, SignedRow

HELLO = Hello(mesh_id="home.x", instance="0" * 32, boot_counter=3, name="alpha", version="1")


def pack(value):
    return msgpack.packb(value, use_bin_type=True)


@pytest.mark.parametrize(
    "message", [HELLO, Ping(seq=7), GossipPush(gossip=Gossip(rows=(SignedRow(payload=b"x", signature=bytes(64)),)))]
)
def test_messages_come_back_equal(message):
    assert decode(encode(message)) == message


def test_defaults_are_not_sent():
    assert len(encode(Ping(seq=7))) < 32


def reason(raw):
    with pytest.raises(WireError) as caught:
        decode(raw)
    return caught.value.reason


@pytest.mark.parametrize(
    "value",
    [
        7,
        [],
        {},
        {"v": 1},
        {"v": True, "type": "ping", "body": {"seq": 1}},
        {"v": 0, "type": "ping", "body": {"seq": 1}},
        {"v": 1, "type": 5, "body": {}},
        {"v": 1, "type": "ping", "body": []},
        {"v": 1, "type": "ping", "body": {}},
        {"v": 1, "type": "ping", "body": {"seq": -1}},
        {"v": 1, "type": "ping", "body": {"seq": "1"}},
        {"v": 1, "type": "ping", "body": {"seq": 1.0}},
        {"v": 1, "type": "ping", "body": {"seq": 2**53 + 1}},
        {"v": 1, "type": "hello", "body": {"mesh_id": "../../etc"}},
        {"v": 1, "type": "ping", "body": {"seq": 1, "gossip": {"rows": [{"payload": b"", "signature": b""}]}}},
    ],
)
def test_a_wrong_envelope_or_body_is_malformed(value):
    assert reason(pack(value)) == "malformed"


def test_not_msgpack_is_malformed_and_does_not_echo_the_bytes():
    assert reason(b"\xc1secret") == "malformed"
    with pytest.raises(WireError) as caught:
        decode(pack({"v": 1, "type": "join_request", "body": {"token_id": "t", "proof": b"SECRET" * 9, "name": "n"}}))
    assert "SECRET" not in str(caught.value)


def test_a_higher_major_version_says_who_must_upgrade():
    with pytest.raises(WireError, match="upgrade this node") as caught:
        decode(pack({"v": 2, "type": "ping", "body": {"seq": 1}}))
    assert caught.value.reason == "version"


def test_unknown_types_and_fields_are_for_newer_peers():
    assert decode(pack({"v": 1, "type": "from_the_future", "body": {}})) is None
    assert decode(pack({"v": 1, "type": "ping", "body": {"seq": 1, "later": [1, 2]}, "x": 1})) == Ping(seq=1)


def test_a_body_cannot_claim_another_type_than_its_envelope():
    assert decode(pack({"v": 1, "type": "ping", "body": {"seq": 1, "type": "ack"}})) == Ping(seq=1)


def test_a_message_over_the_bound_is_refused_in_both_directions():
    assert reason(bytes(codec.MAX_CONTROL_BYTES + 1)) == "oversized"
    rows = tuple(SignedRow(payload=bytes(200_000), signature=bytes(64)) for _ in range(6))
    with pytest.raises(WireError) as caught:
        encode(GossipPush(gossip=Gossip(rows=rows)))
    assert caught.value.reason == "oversized"


@pytest.mark.parametrize("depth", [200, 2_000, 100_000])
def test_deep_nesting_is_malformed_not_a_crash(depth):
    assert reason(b"\x91" * depth + b"\x01") == "malformed"


@pytest.mark.parametrize(
    "raw", [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"]
)
def test_a_declared_size_allocates_nothing(raw):
    with pytest.raises(WireError):
        unpack(raw)


@pytest.mark.parametrize("head", [b"\xdc\xdc", b"\xde\xde", b"\xdd\x00\x00\xff", b"\xdf\x00\x00\x7f"])
def test_nested_headers_cannot_make_the_unpacker_allocate_more_than_the_input_holds(head):
    """2.5 kB of these took 0.28 s and hundreds of MB in the unpacker alone."""
    raw = head * (3_000 // len(head))
    tracemalloc.start()
    with pytest.raises(WireError):
        unpack(raw)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200_000


@settings(max_examples=300, deadline=None)
@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**64 - 1)
        | st.floats()
        | st.text(max_size=300)
        | st.binary(max_size=300),
        lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=5), inner, max_size=20),
        max_leaves=60,
    )
)
def test_the_structure_check_lets_every_valid_document_pass_and_no_truncated_one(value):
    raw = pack(value)
    check_structure(raw)
    for cut in {0, len(raw) // 2, len(raw) - 1} - {len(raw)}:
        with pytest.raises(WireError):
            check_structure(raw[:cut])
    with pytest.raises(WireError):
        check_structure(raw + b"\x00")


@pytest.mark.parametrize("raw", [b"\xd4\x05a", b"\xd6\xff\x00\x00\x00\x00", pack({1: 2}), b"\xa2\xff\xfe"])
def test_extension_types_timestamps_odd_keys_and_bad_text_are_malformed(raw):
    with pytest.raises(WireError):
        unpack(raw)


def test_trailing_bytes_are_malformed():
    assert reason(encode(Ping(seq=1)) + b"\x00") == "malformed"


def test_a_row_is_the_exact_bytes_that_are_signed():
    row = NodeRow(
        node_id="n", public_key=bytes(32), boot_counter=1, seq=2, instance="0" * 32, name="alpha", version="1"
    )
    assert decode_row(encode_row(row)) == row
    with pytest.raises(WireError):
        decode_row(pack({"node_id": "n"}))
    with pytest.raises(WireError):
        decode_row(pack([1]))


def test_frames_come_out_whole_however_they_were_cut():
    stream = frame(b"one") + frame(b"") + frame(b"three" * 100)
    for step in (1, 2, 3, 7, len(stream)):
        reader, out = FrameReader(), []
        for start in range(0, len(stream), step):
            out += reader.feed(stream[start : start + step])
        assert out == [b"one", b"", b"three" * 100]
        assert reader.pending == 0


def test_an_oversized_length_is_refused_before_its_frame_is_buffered():
    reader = FrameReader(limit=100)
    with pytest.raises(WireError) as caught:
        reader.feed((101).to_bytes(4, "big"))
    assert caught.value.reason == "oversized"
    assert reader.pending <= 4


def test_frames_before_an_oversized_one_are_still_judged_as_one_violation():
    with pytest.raises(WireError):
        FrameReader(limit=100).feed(frame(b"fine") + (2**32 - 1).to_bytes(4, "big"))


def test_many_small_frames_in_one_piece_take_linear_time():
    reader = FrameReader()
    assert len(reader.feed(frame(b"x") * 50_000)) == 50_000
