"""Which plan a stage frame belongs to: 128 fixed bytes in front of every frame on the bulk lane.

The frame's own 76-byte header has no room for a plan epoch and its layout is fixed, so the epoch travels as framing, like
the length prefix: per *frame*, not per stream, so that a replan needs no new streams, a stream needs no state, and each
frame can be judged alone. Little-endian::

    magic b"SMF1"   cache_epoch u32   term u64   node_id 32 bytes   instance 16 bytes   slot 64 bytes

Text fields are ASCII, padded with NUL; the instance's 32 hexadecimal digits travel as 16 bytes. ``cache_epoch`` is the
*sender's*: a receiver that sees it change within a session knows that the sender rebuilt its cache.

Accounting: sizes that are measured or priced are those of the frame (``StageFrame.estimated_wire_bytes``), which is
``len(sealed) - ENVELOPE_BYTES``.
"""

import struct
from dataclasses import dataclass

from protocol.errors import WireError
from protocol.fencing import PlanEpoch
from protocol.ids import Instance, NodeId
from protocol.stage_frame import FLAG_RETRIABLE, MAX_FRAME_BYTES, FrameKind, StageFrame, decode_frame

_LAYOUT = struct.Struct("<4sIQ32s16s64s")
_MAGIC = b"SMF1"
ENVELOPE_BYTES = _LAYOUT.size
assert ENVELOPE_BYTES == 128
MAX_SEALED_BYTES = ENVELOPE_BYTES + MAX_FRAME_BYTES
"""A bulk stream's length prefix above this is refused before a byte is buffered."""


@dataclass(frozen=True, slots=True)
class FrameEnvelope:
    """The plan epoch, slot and sender's cache epoch of a frame."""

    epoch: PlanEpoch
    slot: str
    cache_epoch: int = 0

    def seal(self, frame: StageFrame) -> bytes:
        """Envelope and frame as one message for the bulk lane. Raises ``WireError`` when either is out of bounds."""
        return b"".join([self.encode(), *frame.parts()])

    def encode(self) -> bytes:
        """Exactly ``ENVELOPE_BYTES``. Raises ``WireError('malformed')`` for ids that do not fit."""
        try:
            node_id, slot = self.epoch.node_id.encode("ascii"), self.slot.encode("ascii")
            instance = bytes.fromhex(self.epoch.instance)
        except ValueError:
            raise WireError("malformed", "the envelope's ids are not ASCII or hexadecimal") from None
        if len(node_id) > 32 or len(slot) > 64 or len(instance) not in (0, 16):
            raise WireError("malformed", "the envelope's ids are too long")
        if not (0 <= self.epoch.term < 2**64 and 0 <= self.cache_epoch < 2**32):
            raise WireError("malformed", "the envelope's term or cache epoch is out of range")
        return _LAYOUT.pack(_MAGIC, self.cache_epoch, self.epoch.term, node_id, instance, slot)


def open_envelope(sealed: bytes | memoryview) -> tuple[FrameEnvelope, memoryview]:
    """The envelope and the still encoded frame. Raises ``WireError('truncated' | 'malformed')``."""
    if len(sealed) < ENVELOPE_BYTES:
        raise WireError("truncated", f"{len(sealed)} bytes are shorter than an envelope of {ENVELOPE_BYTES}")
    magic, cache_epoch, term, node_id, instance, slot = _LAYOUT.unpack_from(sealed)
    if magic != _MAGIC:
        raise WireError("malformed", "not a stage frame")
    try:
        epoch = PlanEpoch(term, NodeId(_text(node_id)), Instance(instance.hex() if any(instance) else ""))
        envelope = FrameEnvelope(epoch, _text(slot), cache_epoch)
    except UnicodeDecodeError:
        raise WireError("malformed", "the envelope's ids are not ASCII") from None
    return envelope, memoryview(sealed)[ENVELOPE_BYTES:]


def open_sealed(sealed: bytes | memoryview) -> tuple[FrameEnvelope, StageFrame]:
    """Inverse of ``FrameEnvelope.seal``. Raises ``WireError``; never anything else."""
    envelope, raw = open_envelope(sealed)
    return envelope, decode_frame(raw)


def refusal_of(sealed: bytes | memoryview, active: PlanEpoch) -> bytes | None:
    """The answer to a frame that the fence refused: ``StaleEpoch(active)``, retriable, for the node that sent it.

    It goes back under the *refused* frame's own epoch, so that it passes the fence of a sender that still believes in it;
    its payload is an envelope with ``active``. ``None`` for frames that ask for nothing: they are only counted, and two
    nodes never refuse each other's refusals. Raises ``WireError`` for bytes that are no frame.
    """
    envelope, frame = open_sealed(sealed)
    if frame.kind in {FrameKind.PREDICTION, FrameKind.DISCARD, FrameKind.REFUSED}:
        return None
    answer = StageFrame(
        kind=FrameKind.REFUSED,
        request_id=frame.request_id,
        session_id=frame.session_id,
        marks=FLAG_RETRIABLE,
        checkpoint_generation=frame.checkpoint_generation,
        prompt_token_count=frame.prompt_token_count,
        decode_step=frame.decode_step,
        payload=FrameEnvelope(active, envelope.slot).encode(),
    )
    return envelope.seal(answer)


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode("ascii")
