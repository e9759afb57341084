"""Activation frames: what one stage hands to the next, byte for byte.

Layout, little-endian::

    fixed header   76 bytes   kind, pos_start, token_count, token sideband count, position sideband count     5 × i32
                              version, seq_id, phase, flags, checkpoint_generation, prompt_token_count,
                              decode_step, current_token, source_stage_index, dtype                          10 × i32
                              request_id, session_id                                                          2 × u64
    sampling       40 bytes + 8 per logit bias   when FLAG_SAMPLING
    chat metadata  u32 length + bytes            when FLAG_CHAT_METADATA
    token ids      4 bytes each                  as many as the header says
    position ids   4 bytes each                  as many as the header says
    payload        the rest: activations, or for a state import the raw state and nothing else before it

The payload's length is the frame's length minus everything before it; the stream's framing says where a frame ends.
``StageFrame.estimated_wire_bytes`` is computed from counts alone and equals ``len(encode())`` for every shape. It is the
only size that telemetry, the conditioner, bandwidth observation and the simulator use.

The frame says which *request* it belongs to (``RequestEpoch``, from the fixed header alone); which *plan* it belongs to
is said by the fixed-size ``FrameEnvelope`` in front of it (``protocol.frame_envelope``), which counts as framing.

Untrusted bytes: ``decode_frame`` raises ``WireError`` with reason ``truncated``, ``oversized``, ``version``,
``unknown_kind`` or ``malformed`` and nothing else, allocates no more than it was given, and copies no payload.
"""

import math
import struct
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple

from protocol.errors import WireError

FRAME_VERSION = 1
HEADER_BYTES = 76
SAMPLING_BYTES = 40
LOGIT_BIAS_BYTES = 8
MAX_LOGIT_BIASES = 256
MAX_CHAT_METADATA_BYTES = 8 * 1024 * 1024
MAX_PAYLOAD_BYTES = 512 * 1024 * 1024
MAX_FRAME_TOKENS = 1_048_576
"""Tokens, token ids and position ids of one frame: the largest context anybody serves today, as a chunk."""
MAX_FRAME_BYTES = MAX_PAYLOAD_BYTES + MAX_CHAT_METADATA_BYTES + 8 * MAX_FRAME_TOKENS + 4_096
"""Payload, metadata, both sidebands, header and sampling: a longer frame is refused before a byte of it is buffered."""
NO_TOKEN = -1

FLAG_SAMPLING = 1
FLAG_CHAT_METADATA = 2
FLAG_LAST_CHUNK = 4
"""The prompt ends with this chunk: the last stage samples from it."""
FLAG_RETRIABLE = 8
"""On a refusal: the request may be sent again, from its beginning, under the plan that is active by then."""
_KNOWN_FLAGS = FLAG_SAMPLING | FLAG_CHAT_METADATA | FLAG_LAST_CHUNK | FLAG_RETRIABLE

_HEADER = struct.Struct("<15i2Q")
_SAMPLING = struct.Struct("<6f2i2I")
_BIAS = struct.Struct("<if")
_LENGTH = struct.Struct("<I")
assert _HEADER.size == HEADER_BYTES
assert _SAMPLING.size == SAMPLING_BYTES
assert _BIAS.size == LOGIT_BIAS_BYTES


class FrameKind(IntEnum):
    """What a frame asks of the stage that gets it."""

    PREFILL = 1
    """Activations of a chunk of the prompt."""
    DECODE = 2
    """Activations of one generated token."""
    PREDICTION = 3
    """Last stage to stage 0: ``current_token`` is the prediction."""
    DISCARD = 4
    """Forget the session; every stage passes it on, also one that has nothing to forget."""
    STATE_IMPORT = 5
    """The payload is a session's raw state; no sideband precedes it."""
    REFUSED = 6
    """The sender of the original cannot be served: another plan is active, or a cache is missing."""


class FrameDtype(IntEnum):
    """Element type of the payload."""

    NONE = 0
    F32 = 1
    F16 = 2
    BF16 = 3


class RequestEpoch(NamedTuple):
    """How far a request has come; from the fixed header alone.

    Comparable only within one flow (request and session equal); there the order is lexicographic on
    (checkpoint generation, prompt tokens, decode step).
    """

    request_id: int
    session_id: int
    checkpoint_generation: int
    prompt_token_count: int
    decode_step: int

    def same_flow(self, other: "RequestEpoch") -> bool:
        """Whether the two can be compared at all."""
        return self.request_id == other.request_id and self.session_id == other.session_id

    @property
    def progress(self) -> tuple[int, int, int]:
        """What is ordered within a flow."""
        return self.checkpoint_generation, self.prompt_token_count, self.decode_step

    def is_stale_for(self, newest: "RequestEpoch") -> bool:
        """True iff ``newest`` is of the same flow and strictly further. An equal epoch is not stale."""
        return self.same_flow(newest) and self.progress < newest.progress


class LogitBias(NamedTuple):
    """Added to one token's logit before sampling."""

    token: int
    bias: float


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the last stage chooses a token. Floats are IEEE single precision on the wire; NaN and infinity are refused."""

    temperature: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    top_k: int = 0
    penalty_last_n: int = 0
    seed: int = 0
    logit_biases: tuple[LogitBias, ...] = ()

    def wire_bytes(self) -> int:
        """Encoded length."""
        return SAMPLING_BYTES + LOGIT_BIAS_BYTES * len(self.logit_biases)


@dataclass(frozen=True, slots=True)
class StageFrame:
    """One frame. Integers without a stated bound are i32 ≥ 0; ids are u64.

    ``payload`` of a decoded frame is a view into the received bytes: copy it to keep it.
    """

    kind: FrameKind
    request_id: int
    session_id: int
    pos_start: int = 0
    token_count: int = 0
    seq_id: int = 0
    phase: int = 0
    marks: int = 0
    """``FLAG_LAST_CHUNK`` and ``FLAG_RETRIABLE``; the section flags follow from what is present."""
    checkpoint_generation: int = 0
    prompt_token_count: int = 0
    decode_step: int = 0
    current_token: int = NO_TOKEN
    source_stage_index: int = 0
    dtype: FrameDtype = FrameDtype.NONE
    sampling: Sampling | None = None
    chat_metadata: bytes | None = None
    token_ids: tuple[int, ...] = ()
    position_ids: tuple[int, ...] = ()
    payload: bytes | memoryview = b""

    @property
    def request_epoch(self) -> RequestEpoch:
        """Which request, and how far."""
        return RequestEpoch(
            self.request_id, self.session_id, self.checkpoint_generation, self.prompt_token_count, self.decode_step
        )

    @property
    def flags(self) -> int:
        """The header's flags: marks plus one flag per optional section."""
        sampling = FLAG_SAMPLING if self.sampling is not None else 0
        metadata = FLAG_CHAT_METADATA if self.chat_metadata is not None else 0
        return self.marks | sampling | metadata

    def estimated_wire_bytes(self) -> int:
        """The exact encoded length, without encoding."""
        size = HEADER_BYTES + len(self.payload)
        if self.sampling is not None:
            size += self.sampling.wire_bytes()
        if self.chat_metadata is not None:
            size += _LENGTH.size + len(self.chat_metadata)
        return size + 4 * (len(self.token_ids) + len(self.position_ids))

    def telemetry(self) -> dict[str, int]:
        """What is recorded about a sent or received frame, under the names that dashboards know."""
        return {
            "llama_stage.message_wire_bytes": self.estimated_wire_bytes(),
            "skippy.activation_bytes": len(self.payload),
            "skippy.checkpoint_generation": self.checkpoint_generation,
            "skippy.prompt_token_count": self.prompt_token_count,
            "skippy.decode_step": self.decode_step,
        }

    def encode(self) -> bytes:
        """The bytes of this frame. Raises ``WireError`` for a frame that no peer would accept."""
        return b"".join(self.parts())

    def parts(self) -> list[bytes | memoryview]:
        """``encode`` in pieces, the payload not copied: for whoever puts something in front."""
        _check_bounds(self)
        header = _HEADER.pack(
            *(self.kind, self.pos_start, self.token_count, len(self.token_ids), len(self.position_ids)),
            *(FRAME_VERSION, self.seq_id, self.phase, self.flags, self.checkpoint_generation),
            *(self.prompt_token_count, self.decode_step, self.current_token, self.source_stage_index, self.dtype),
            *(self.request_id, self.session_id),
        )
        parts: list[bytes | memoryview] = [header]
        if self.sampling is not None:
            parts.append(_encode_sampling(self.sampling))
        if self.chat_metadata is not None:
            parts += [_LENGTH.pack(len(self.chat_metadata)), self.chat_metadata]
        parts += [struct.pack(f"<{len(ids)}i", *ids) for ids in (self.token_ids, self.position_ids) if ids]
        parts.append(self.payload)
        return parts


def request_epoch_of(raw: bytes | memoryview) -> RequestEpoch:
    """The request epoch of an encoded frame, from its first 76 bytes. Raises ``WireError('truncated')``."""
    fields = _header_of(raw)
    return RequestEpoch(fields[15], fields[16], fields[9], fields[10], fields[11])


def decode_frame(raw: bytes | memoryview) -> StageFrame:
    """Inverse of ``StageFrame.encode``. Raises ``WireError``; never anything else."""
    fields = _header_of(raw)
    kind, dtype = _kind_of(fields[0]), _dtype_of(fields[14])
    flags = fields[8]
    if fields[5] != FRAME_VERSION:
        raise WireError("version", f"the frame has version {fields[5]}, this node speaks {FRAME_VERSION}")
    if flags & ~_KNOWN_FLAGS:
        raise WireError("malformed", f"the frame sets unknown flags {flags:#x}")
    for count in fields[2:5]:
        if not 0 <= count <= MAX_FRAME_TOKENS:
            raise WireError("oversized", f"the frame declares {count} tokens, the bound is {MAX_FRAME_TOKENS}")
    body = _Body(memoryview(raw)[HEADER_BYTES:])
    frame = StageFrame(
        kind=kind,
        pos_start=fields[1],
        token_count=fields[2],
        seq_id=fields[6],
        phase=fields[7],
        marks=flags & (FLAG_LAST_CHUNK | FLAG_RETRIABLE),
        checkpoint_generation=fields[9],
        prompt_token_count=fields[10],
        decode_step=fields[11],
        current_token=fields[12],
        source_stage_index=fields[13],
        dtype=dtype,
        request_id=fields[15],
        session_id=fields[16],
        sampling=body.sampling() if flags & FLAG_SAMPLING else None,
        chat_metadata=body.chat_metadata() if flags & FLAG_CHAT_METADATA else None,
        token_ids=body.integers(fields[3]),
        position_ids=body.integers(fields[4]),
        payload=body.rest(),
    )
    _check_bounds(frame)
    return frame


class _Body:
    """Reads the sections behind the header in order; every read is bounded by what is there."""

    def __init__(self, view: memoryview) -> None:
        self._view = view

    def take(self, size: int) -> memoryview:
        if size > len(self._view):
            raise WireError("truncated", f"the frame ends {size - len(self._view)} bytes early")
        taken, self._view = self._view[:size], self._view[size:]
        return taken

    def rest(self) -> memoryview:
        return self.take(len(self._view))

    def integers(self, count: int) -> tuple[int, ...]:
        return struct.unpack(f"<{count}i", self.take(4 * count))

    def chat_metadata(self) -> bytes:
        (size,) = _LENGTH.unpack(self.take(_LENGTH.size))
        if size > MAX_CHAT_METADATA_BYTES:
            raise WireError("oversized", f"chat metadata of {size} bytes is over {MAX_CHAT_METADATA_BYTES}")
        return bytes(self.take(size))

    def sampling(self) -> Sampling:
        values = _SAMPLING.unpack(self.take(SAMPLING_BYTES))
        if values[9] > MAX_LOGIT_BIASES:
            raise WireError("oversized", f"{values[9]} logit biases are over {MAX_LOGIT_BIASES}")
        raw = self.take(LOGIT_BIAS_BYTES * values[9])
        biases = tuple(LogitBias(token, bias) for token, bias in _BIAS.iter_unpack(raw))
        return replace(Sampling(*values[:9]), logit_biases=biases)


def _header_of(raw: bytes | memoryview) -> tuple[int, ...]:
    if len(raw) < HEADER_BYTES:
        raise WireError("truncated", f"a frame of {len(raw)} bytes is shorter than its {HEADER_BYTES} byte header")
    return _HEADER.unpack_from(raw)


def _kind_of(value: int) -> FrameKind:
    try:
        return FrameKind(value)
    except ValueError:
        raise WireError("unknown_kind", f"frame kind {value} is unknown to this node") from None


def _dtype_of(value: int) -> FrameDtype:
    try:
        return FrameDtype(value)
    except ValueError:
        raise WireError("malformed", f"activation type {value} is unknown to this node") from None


def _encode_sampling(sampling: Sampling) -> bytes:
    fixed = _SAMPLING.pack(
        *(sampling.temperature, sampling.top_p, sampling.min_p),
        *(sampling.repeat_penalty, sampling.presence_penalty, sampling.frequency_penalty),
        *(sampling.top_k, sampling.penalty_last_n, sampling.seed, len(sampling.logit_biases)),
    )
    return fixed + b"".join(_BIAS.pack(token, bias) for token, bias in sampling.logit_biases)


def _check_bounds(frame: StageFrame) -> None:
    """One rule for both directions: what is encoded can be decoded, what is decoded can be encoded."""
    sizes = (
        ("payload", len(frame.payload), MAX_PAYLOAD_BYTES),
        ("chat metadata", len(frame.chat_metadata or b""), MAX_CHAT_METADATA_BYTES),
        ("tokens", frame.token_count, MAX_FRAME_TOKENS),
        ("token ids", len(frame.token_ids), MAX_FRAME_TOKENS),
        ("position ids", len(frame.position_ids), MAX_FRAME_TOKENS),
    )
    for name, size, bound in sizes:
        if size > bound:
            raise WireError("oversized", f"{name}: {size} is over the bound {bound}")
    numbers = (
        *(frame.pos_start, frame.token_count, frame.seq_id, frame.phase, frame.checkpoint_generation),
        *(frame.prompt_token_count, frame.decode_step, frame.source_stage_index, frame.current_token + 1),
    )
    if any(not 0 <= number < 2**31 for number in numbers):
        raise WireError("malformed", "a header number is negative or over 2147483647")
    if not (0 <= frame.request_id < 2**64 and 0 <= frame.session_id < 2**64):
        raise WireError("malformed", "request and session ids are unsigned 64-bit numbers")
    if frame.marks & ~(FLAG_LAST_CHUNK | FLAG_RETRIABLE):
        raise WireError("malformed", f"marks {frame.marks:#x} are not marks")
    sections = frame.sampling, frame.chat_metadata, frame.token_ids or None, frame.position_ids or None
    if frame.kind is FrameKind.STATE_IMPORT and any(section is not None for section in sections):
        raise WireError("malformed", "a state import carries raw bytes alone")
    if frame.sampling is not None:
        _check_sampling(frame.sampling)


def _check_sampling(sampling: Sampling) -> None:
    if len(sampling.logit_biases) > MAX_LOGIT_BIASES:
        raise WireError("oversized", f"{len(sampling.logit_biases)} logit biases are over {MAX_LOGIT_BIASES}")
    floats = (
        *(sampling.temperature, sampling.top_p, sampling.min_p),
        *(sampling.repeat_penalty, sampling.presence_penalty, sampling.frequency_penalty),
        *(bias.bias for bias in sampling.logit_biases),
    )
    # 3.4e38 is the largest single: anything above does not survive the wire.
    if not all(math.isfinite(value) and abs(value) <= 3.4028234663852886e38 for value in floats):
        raise WireError("malformed", "sampling values must be finite single-precision numbers")
    tokens = (sampling.top_k, sampling.penalty_last_n, *(bias.token for bias in sampling.logit_biases))
    if any(not -(2**31) <= token < 2**31 for token in tokens) or not 0 <= sampling.seed < 2**32:
        raise WireError("malformed", "sampling numbers must fit their 32-bit fields")
