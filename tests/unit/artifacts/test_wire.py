"""What is said on an artifact stream, and what is refused."""

import asyncio
import os
import random

import msgpack
import pytest

from protocol.ballots import ArtifactRef
from protocol.errors import WireError
from stage_agent.artifacts.wire import (
    MAX_FILES,
    MAX_REQUEST_BYTES,
    Complaint,
    FileRequest,
    Granted,
    Listed,
    ListRequest,
    Noted,
    Refused,
    decode_reply,
    decode_request,
    encode,
    framed,
    read_frame,
)

DIGEST = "ab" * 32
REQUESTS = [
    ListRequest(model_digest=DIGEST),
    FileRequest(model_digest=DIGEST, sha256=DIGEST, offset=2**40, length=2**41, paced=True),
    Complaint(model_digest=DIGEST, sha256=DIGEST),
]
REPLIES = [
    Granted(size_bytes=10, length=3, paced=True),
    Listed(form="layer_package", manifest_bytes=9),
    Listed(form="files", files=(ArtifactRef(path="a", sha256=DIGEST, size_bytes=1),)),
    Refused(reason="busy", retry_after_us=7),
    Noted(),
]


@pytest.mark.parametrize("message", REQUESTS)
def test_requests_arrive_as_they_were_sent(message):
    assert decode_request(encode(message)) == message
    assert len(encode(message)) < MAX_REQUEST_BYTES


@pytest.mark.parametrize("message", REPLIES)
def test_replies_arrive_as_they_were_sent(message):
    assert decode_reply(encode(message)) == message


def packed(**fields):
    return msgpack.packb(fields)


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"\xc1", b"\x00" * 2_000, packed(), packed(type="file"), packed(type="granted", size_bytes=1, length=1),
        packed(type="list", model_digest="AB" * 32), packed(type="list", model_digest="../../etc/passwd"),
        packed(type="file", model_digest=DIGEST, sha256=DIGEST, length=-1),
        packed(type="file", model_digest=DIGEST, sha256=DIGEST, length=2**60),
        packed(type="file", model_digest=DIGEST, sha256=DIGEST, length=1.5),
        packed(type="file", model_digest=DIGEST, sha256=DIGEST, length=True),
        packed(type="file", model_digest=DIGEST, sha256=DIGEST + "0", length=1),
    ],
)  # fmt: skip
def test_a_malformed_request_is_refused(raw):
    with pytest.raises(WireError):
        decode_request(raw)


@pytest.mark.parametrize(
    "raw",
    [
        packed(type="listed", form="files", files=[["a", DIGEST, 1]]),
        packed(type="listed", form="files", files=[{"path": "a", "sha256": DIGEST, "size_bytes": 1}] * (MAX_FILES + 1)),
        packed(type="listed", form="layer_package", manifest_bytes=2**25),
        packed(type="refused", reason="because"),
        packed(type="list", model_digest=DIGEST),
    ],
)
def test_a_malformed_reply_is_refused(raw):
    with pytest.raises(WireError):
        decode_reply(raw)


def test_random_and_damaged_bytes_are_refused_and_nothing_else_happens():
    die = random.Random(5)
    good = [encode(message) for message in [*REQUESTS, *REPLIES]]
    refused = 0
    for _ in range(20_000):
        raw = bytearray(die.choice(good)) if die.random() < 0.8 else bytearray(die.randbytes(die.randrange(60)))
        for _ in range(die.randrange(1, 4)):
            if raw:
                raw[die.randrange(len(raw))] = die.randrange(256)
        for decode in (decode_request, decode_reply):
            try:
                decode(bytes(raw))
            except WireError:
                refused += 1
    assert refused > 20_000


def read(raw, limit=100):
    async def main():
        reader = asyncio.StreamReader()
        reader.feed_data(raw)
        reader.feed_eof()
        return await read_frame(reader, limit)

    return asyncio.run(main())


def test_a_frame_is_read_within_its_limit_only():
    message = REQUESTS[0]
    assert decode_request(read(framed(message), 1_000)) == message
    with pytest.raises(WireError, match="over 100"):
        read((101).to_bytes(4, "big") + os.urandom(101))
    with pytest.raises(EOFError):
        read(framed(message)[:-1], 1_000)
    with pytest.raises(EOFError):
        read(b"")
