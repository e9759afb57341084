"""Names of things that two nodes must agree on.

All are plain strings and integers so that they travel in msgpack without adapters; the aliases say which is which.

* ``NodeId``   base32 (lower case, no padding, 32 characters) of the first 160 bits of SHA-256 over the node's raw
  32-byte Ed25519 public key. It is *derived* from the handshake, never believed from a payload.
* ``Instance`` 32 hexadecimal digits, random for each process start.
* ``Term``     election term, ≥ 0; 0 means "never campaigned".
"""

import base64
import hashlib
from typing import NewType

NodeId = NewType("NodeId", str)
Instance = NewType("Instance", str)
MeshId = NewType("MeshId", str)
Slot = NewType("Slot", str)
"""A place for one served model on every agent; named by the operator (``default`` when only one model is served)."""

Term = int

NODE_ID_LENGTH = 32
PUBLIC_KEY_BYTES = 32


def node_id_of(public_key: bytes) -> NodeId:
    """The id of the node that owns ``public_key`` (raw Ed25519, exactly 32 bytes; anything else is our bug)."""
    assert len(public_key) == PUBLIC_KEY_BYTES, len(public_key)
    digest = hashlib.sha256(public_key).digest()[:20]
    return NodeId(base64.b32encode(digest).decode("ascii").lower())


def short(node_id: str) -> str:
    """The first 8 characters: enough for people to tell nodes apart, never used to decide anything."""
    return node_id[:8]
