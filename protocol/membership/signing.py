"""Opening what others signed: cheap checks first, the expensive signature last and once per row version.

A row that is not newer than the stored one is dropped after a bare unpack (about 10 µs), before validation and the
Ed25519 check (about 100 µs each).
"""

from collections.abc import Callable
from dataclasses import dataclass

import msgpack

from protocol.codec import decode_row
from protocol.errors import WireError
from protocol.ids import NodeId, node_id_of
from protocol.rows import NodeRow, Refutation, SignedRow

Sign = Callable[[bytes], bytes]
Verify = Callable[[bytes, bytes, bytes], bool]
"""(public key, signature, payload) → genuine?"""

Version = tuple[int, int]
"""(boot_counter, seq): the order of one node's rows."""


_LABEL = ("node_id", "boot_counter", "seq", "instance")
LABEL_FIELDS_MAX = 256


@dataclass(frozen=True, slots=True)
class RowLabel:
    """What an unverified row claims to be."""

    node_id: NodeId
    version: Version
    instance: str


def label_of(signed: SignedRow) -> RowLabel:
    """Read the label only, without unpacking the rest; proves nothing. Raises ``WireError('malformed')``."""
    found: dict[str, object] = {}
    unpacker = msgpack.Unpacker(max_buffer_size=len(signed.payload) + 1, strict_map_key=True, use_list=False)
    try:
        unpacker.feed(signed.payload)
        for _ in range(min(unpacker.read_map_header(), LABEL_FIELDS_MAX)):
            key = unpacker.unpack()
            if key in _LABEL:
                found[key] = unpacker.unpack()
                if len(found) == len(_LABEL):
                    break
            else:
                unpacker.skip()
    except (ValueError, msgpack.UnpackException, RecursionError, TypeError) as error:
        raise WireError("malformed", f"row: not msgpack: {error}") from None
    node_id, boot_counter, seq, instance = (found.get(key) for key in _LABEL)
    if isinstance(node_id, str) and isinstance(instance, str) and type(boot_counter) is int and type(seq) is int:
        return RowLabel(NodeId(node_id), (boot_counter, seq), instance)
    raise WireError("malformed", "row: no label")


def open_row(signed: SignedRow, verify: Verify) -> NodeRow:
    """The validated row, proven to be its owner's. Raises ``WireError`` with reason malformed, identity or signature."""
    row = decode_row(signed.payload)
    if label_of(signed) != RowLabel(NodeId(row.node_id), (row.boot_counter, row.seq), row.instance):
        raise WireError("malformed", "row: two labels")
    if node_id_of(row.public_key) != row.node_id:
        raise WireError("identity", "row: the public key is not that of the node id")
    if not verify(row.public_key, signed.signature, signed.payload):
        raise WireError("signature", "row: bad signature")
    return row


def refutation_bytes(node_id: str, boot_counter: int, incarnation: int, seq: int) -> bytes:
    """What the owner of a refutation signs; the prefix keeps it from being mistaken for a row (a msgpack map)."""
    body: bytes = msgpack.packb((node_id, boot_counter, incarnation, seq))
    return b"stagemesh refutation\0" + body


def refutation_is_genuine(refutation: Refutation, public_key: bytes, verify: Verify) -> bool:
    """Whether the owner of ``public_key`` signed it; that the key belongs to the node is the caller's knowledge."""
    payload = refutation_bytes(refutation.node_id, refutation.boot_counter, refutation.incarnation, refutation.seq)
    return verify(public_key, refutation.signature, payload)
