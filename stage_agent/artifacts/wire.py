"""What two nodes say on a bulk stream of kind ``artifact``.

The stream's header is the first request; further ones follow as frames on the same stream. Every request is answered by
one frame, ``Granted`` and ``Listed`` then by exactly as many raw bytes as they announce. Frames are msgpack with a
four-byte length, validated like every other message; what is not understood ends the stream.
"""

from typing import Annotated, Literal, Protocol

import msgpack
from pydantic import Field, TypeAdapter, ValidationError

from protocol.ballots import ArtifactRef
from protocol.codec import LENGTH_BYTES, first_problem, frame, unpack
from protocol.errors import WireError
from protocol.wire import Bytes, Digest, Micros, Wire

ARTIFACT_KIND = "artifact"
MAX_REQUEST_BYTES = 1_024
MAX_REPLY_BYTES = 1_048_576
MAX_FILES = 1_024

RefusalReason = Literal["mode_off", "not_allowed", "not_found", "busy", "preparing", "range"]
WAITING = frozenset({"busy", "preparing"})
"""The holder is at work: waiting for it counts as getting on."""


class ListRequest(Wire):
    """Which files make up the model?"""

    type: Literal["list"] = "list"
    model_digest: Digest


class FileRequest(Wire):
    """``length`` bytes from ``offset`` of a file of the model. ``paced``: the asker limits its own bandwidth."""

    type: Literal["file"] = "file"
    model_digest: Digest
    sha256: Digest
    offset: Bytes = 0
    length: Bytes
    paced: bool = False


class Complaint(Wire):
    """Your file had wrong bytes when it arrived here: look at it again. Answered by ``Noted``."""

    type: Literal["complaint"] = "complaint"
    model_digest: Digest
    sha256: Digest


class Granted(Wire):
    """``length`` raw bytes follow. ``size_bytes`` is the whole file's; ``paced``: the holder limits its bandwidth."""

    type: Literal["granted"] = "granted"
    size_bytes: Bytes
    length: Bytes
    paced: bool = False


class Listed(Wire):
    """The files of a model. A layer package says them in its manifest, whose raw bytes follow; others here, first file first."""

    type: Literal["listed"] = "listed"
    form: Literal["files", "layer_package"]
    files: Annotated[tuple[ArtifactRef, ...], Field(max_length=MAX_FILES)] = ()
    manifest_bytes: Annotated[int, Field(ge=0, le=16_777_216)] = 0


class Refused(Wire):
    """No. ``retry_after_us`` is a hint for reasons that pass."""

    type: Literal["refused"] = "refused"
    reason: RefusalReason
    retry_after_us: Micros = 0


class Noted(Wire):
    """The complaint was taken."""

    type: Literal["noted"] = "noted"


Request = ListRequest | FileRequest | Complaint
Reply = Granted | Listed | Refused | Noted
_REQUEST: TypeAdapter[Request] = TypeAdapter(Annotated[Request, Field(discriminator="type")])
_REPLY: TypeAdapter[Reply] = TypeAdapter(Annotated[Reply, Field(discriminator="type")])


class ExactReader(Protocol):
    """The part of ``BulkReader`` that frames need."""

    async def readexactly(self, size: int) -> bytes:
        """Exactly ``size`` bytes, or ``asyncio.IncompleteReadError``."""


def encode(message: Request | Reply) -> bytes:
    """Without a length."""
    raw: bytes = msgpack.packb(message.model_dump(), use_bin_type=True)
    return raw


def framed(message: Request | Reply) -> bytes:
    """With its length in front."""
    return frame(encode(message))


def decode_request(raw: bytes) -> Request:
    """Raises ``WireError``."""
    if len(raw) > MAX_REQUEST_BYTES:
        raise WireError("oversized", f"an artifact request of {len(raw)} bytes is over {MAX_REQUEST_BYTES}")
    try:
        return _REQUEST.validate_python(unpack(raw))
    except ValidationError as error:
        raise WireError("malformed", f"artifact request: {first_problem(error)}") from None


def decode_reply(raw: bytes) -> Reply:
    """Raises ``WireError``."""
    try:
        return _REPLY.validate_python(unpack(raw))
    except ValidationError as error:
        raise WireError("malformed", f"artifact reply: {first_problem(error)}") from None


async def read_frame(reader: ExactReader, limit: int) -> bytes:
    """One frame's content. Raises ``WireError`` above ``limit`` bytes, ``EOFError`` at the end."""
    size = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
    if size > limit:
        raise WireError("oversized", f"an artifact frame of {size} bytes is over {limit}")
    return await reader.readexactly(size)
