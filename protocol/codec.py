"""Bytes ⇄ ``Message``: the only place where msgpack meets pydantic on the control plane.

Envelope: a msgpack map ``{"v": 1, "type": str, "body": map}``. On a stream every envelope is preceded by its length as
an unsigned 32-bit big-endian integer; ``FrameReader`` refuses a length before a byte of the frame is buffered.

What is refused, and with which reason: ``oversized`` (over the bound), ``malformed`` (not msgpack, not a map, does not
validate), ``version`` (a higher major version), ``truncated`` (the stream ended inside a frame). An unknown *type* is
not an error: ``decode`` returns ``None`` and the caller counts it, so that newer peers can say more.
"""

from typing import Any, get_args

import msgpack
from pydantic import BaseModel, TypeAdapter, ValidationError

from protocol.errors import WireError
from protocol.messages import Message
from protocol.rows import NodeRow

VERSION = 1
MAX_FRAME_BYTES = 8 * 1024 * 1024
"""Any frame of any lane; checked against the length prefix before allocation."""
MAX_CONTROL_BYTES = 1024 * 1024
"""A control message; larger things belong on the bulk lane."""
MAX_GREETING_BYTES = 65_536
"""The first message of a connection, before it is known whether the peer belongs to the mesh."""
MAX_DATAGRAM_BYTES = 1100
"""aioquic sends at most 1,170 bytes and wedges on more; keep a margin."""
LENGTH_BYTES = 4

_ADAPTER: TypeAdapter[Message] = TypeAdapter(Message)
_KNOWN = frozenset(model.model_fields["type"].default for model in get_args(get_args(Message)[0]))


def encode(message: BaseModel) -> bytes:
    """The envelope of ``message``. Raises ``WireError('oversized')`` above ``MAX_CONTROL_BYTES``: split it or use bulk."""
    body = message.model_dump(exclude_defaults=True)
    kind = message.type  # type: ignore[attr-defined]
    body.pop("type", None)
    raw: bytes = msgpack.packb({"v": VERSION, "type": kind, "body": body}, use_bin_type=True)
    if len(raw) > MAX_CONTROL_BYTES:
        raise WireError("oversized", f"a {kind} message of {len(raw)} bytes is over the {MAX_CONTROL_BYTES} byte bound")
    return raw


def decode(raw: bytes) -> Message | None:
    """The message in ``raw``; ``None`` if its type is unknown. Raises ``WireError``; never anything else."""
    if len(raw) > MAX_CONTROL_BYTES:
        raise WireError("oversized", f"a control message of {len(raw)} bytes is over {MAX_CONTROL_BYTES}")
    envelope = unpack(raw)
    if not isinstance(envelope, dict):
        raise WireError("malformed", "the envelope is not a map")
    version, kind, body = envelope.get("v"), envelope.get("type"), envelope.get("body")
    if type(version) is not int or version < 1:
        raise WireError("malformed", "the envelope has no version")
    if version > VERSION:
        raise WireError("version", f"the peer speaks version {version}, this node {VERSION}: upgrade this node")
    if not isinstance(kind, str) or not isinstance(body, dict):
        raise WireError("malformed", "the envelope has no type or body")
    if kind not in _KNOWN:
        return None
    body["type"] = kind
    try:
        return _ADAPTER.validate_python(body)
    except ValidationError as error:
        raise WireError("malformed", f"{kind}: {first_problem(error)}") from None


def encode_row(row: NodeRow) -> bytes:
    """The exact bytes that the row's owner signs."""
    raw: bytes = msgpack.packb(row.model_dump(exclude_defaults=True), use_bin_type=True)
    return raw


def decode_row(payload: bytes) -> NodeRow:
    """Inverse of ``encode_row`` for bytes whose signature the caller has checked. Raises ``WireError``."""
    try:
        return NodeRow.model_validate(unpack(payload))
    except ValidationError as error:
        raise WireError("malformed", f"row: {first_problem(error)}") from None


def unpack(raw: bytes) -> Any:
    """Unpack msgpack with every bound set. Raises ``WireError('malformed')``."""
    check_structure(raw)
    try:
        return msgpack.unpackb(
            raw,
            use_list=False,
            strict_map_key=True,
            max_str_len=MAX_CONTROL_BYTES,
            max_bin_len=MAX_CONTROL_BYTES,
            max_array_len=65_536,
            max_map_len=4_096,
            max_ext_len=0,
        )
    except (ValueError, msgpack.UnpackException, RecursionError, UnicodeDecodeError, TypeError) as error:
        raise WireError("malformed", f"not msgpack: {error}") from None


def check_structure(raw: bytes) -> None:
    """Refuse what would make the unpacker allocate more than the bytes can hold. Raises ``WireError('malformed')``.

    The unpacker allocates a container when it reads its header: 2.5 kB of nested array headers made it take 0.28 s and
    hundreds of MB before it noticed that the input ends. Every item needs at least one byte, so counting what is still
    owed to open containers while walking to the end finds out first. One pass, about 0.1 µs per item.
    """
    position, end, owed = 0, len(raw), 1
    try:
        while owed:
            head = raw[position]
            position += 1
            owed -= 1
            skip = _SKIP[head]
            if skip >= 0:
                position += skip
                continue
            if head < 0x90:
                owed += 2 * (head & 0x0F)
            elif head < 0xA0:
                owed += head & 0x0F
            else:
                width, per_item = _HEADERS[head]
                count = int.from_bytes(raw[position : position + width], "big")
                position += width
                if per_item:
                    owed += per_item * count
                else:
                    position += count
    except (IndexError, KeyError):
        owed = -1
    if owed or position != end:
        raise WireError("malformed", "not msgpack: it does not hold what it announces")


_SKIP = [-1] * 256
"""Payload bytes after a head byte; -1 for containers, long strings and what is not allowed (extensions, 0xc1)."""
for _head in (*range(0x80), *range(0xE0, 0x100), 0xC0, 0xC2, 0xC3):
    _SKIP[_head] = 0
for _head in range(0xA0, 0xC0):
    _SKIP[_head] = _head & 0x1F
for _head, _bytes in {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}.items():
    _SKIP[_head] = _bytes
_HEADERS = {
    0xC4: (1, 0),
    0xC5: (2, 0),
    0xC6: (4, 0),
    0xD9: (1, 0),
    0xDA: (2, 0),
    0xDB: (4, 0),
    0xDC: (2, 1),
    0xDD: (4, 1),
    0xDE: (2, 2),
    0xDF: (4, 2),
}
"""Head byte → (bytes of its length, items per unit of it; 0 for strings and binaries)."""


def first_problem(error: ValidationError) -> str:
    """``field.path: what is wrong`` of the first failure, without the offending value (it may be a secret)."""
    problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
    return f"{'.'.join(str(part) for part in problem['loc'])}: {problem['msg']}"


class FrameReader:
    """Cuts a byte stream into frames. Holds at most one frame plus what arrived with it.

    ``limit`` bounds the *declared* length, so an oversized frame raises before it is buffered. It may be changed: a
    stranger's greeting needs far less than a peer's messages.
    """

    def __init__(self, limit: int = MAX_CONTROL_BYTES) -> None:
        self.limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Frames completed by ``data``, in order. Raises ``WireError('oversized')``; the reader is then useless."""
        self._buffer += data
        frames: list[bytes] = []
        while len(self._buffer) >= LENGTH_BYTES:
            length = int.from_bytes(self._buffer[:LENGTH_BYTES], "big")
            if length > self.limit:
                raise WireError("oversized", f"a frame of {length} bytes is over the {self.limit} byte bound")
            if len(self._buffer) < LENGTH_BYTES + length:
                break
            frames.append(bytes(self._buffer[LENGTH_BYTES : LENGTH_BYTES + length]))
            del self._buffer[: LENGTH_BYTES + length]
        return frames

    @property
    def pending(self) -> int:
        """Bytes of an unfinished frame."""
        return len(self._buffer)


def frame(raw: bytes) -> bytes:
    """``raw`` with its length in front."""
    return len(raw).to_bytes(LENGTH_BYTES, "big") + raw
