"""What a tunnel says on its bulk stream: a question, an answer, then framed bytes both ways.

TLS over asyncio cannot close one direction, and an idle stream times out; so bytes travel as chunks of a u32 length
(big endian), where 0 ends this direction and ``KEEPALIVE`` says nothing.
"""

from typing import Annotated

import msgpack
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from protocol.codec import unpack
from protocol.errors import WireError

TUNNEL_KIND = "tunnel"
LENGTH_BYTES = 4
CHUNK_BYTES = 262_144
END = (0).to_bytes(LENGTH_BYTES, "big")
KEEPALIVE_LENGTH = 2**32 - 1
KEEPALIVE = KEEPALIVE_LENGTH.to_bytes(LENGTH_BYTES, "big")
ANSWER_MAX_BYTES = 4_096

Name = Annotated[str, Field(min_length=1, max_length=256)]


class _Told(BaseModel):
    """Unknown fields are ignored: a newer peer may say more."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class Question(_Told):
    """Which door of the peer; ``ask`` = only whether it is open, carry nothing."""

    door: Name
    ask: bool = False


class Answer(_Told):
    """``open`` = bytes may follow. ``engine`` is the build behind the door, ``secret`` what its users must present."""

    open: bool
    reason: Annotated[str, Field(max_length=256)] = ""
    engine: Annotated[str, Field(max_length=128)] = ""
    secret: Annotated[str, Field(max_length=128)] = ""
    direct: Annotated[str, Field(max_length=128)] = ""
    """``host:port`` at which the engine itself listens, for whoever trusts the network as well; else empty."""


def question_bytes(question: Question) -> bytes:
    """The bulk stream's header."""
    return bytes(msgpack.packb(question.model_dump()))


def question_of(header: bytes) -> Question:
    """Raises ``WireError`` for anything else."""
    try:
        return Question.model_validate(unpack(header))
    except ValidationError as error:
        raise WireError("malformed", f"not a tunnel's question: {error.error_count()} faults") from None


def answer_bytes(answer: Answer) -> bytes:
    """Length and body, as the first thing on the stream's way back."""
    body = bytes(msgpack.packb(answer.model_dump()))
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def answer_of(body: bytes) -> Answer:
    """Raises ``WireError`` for anything else."""
    try:
        return Answer.model_validate(unpack(body))
    except ValidationError as error:
        raise WireError("malformed", f"not a tunnel's answer: {error.error_count()} faults") from None
