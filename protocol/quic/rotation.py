"""Rotating this node's key: the next key takes its place, on disk first, so that a crash at any moment loses nothing.

What a succession means stands in ``protocol.admission``. Three writes, each atomic and durable, make one:

1. ``identity.pem`` gets a third key, which may follow the next one;
2. ``mesh.json`` gets the succession: **from here on the node is its successor**, whatever else happens;
3. ``identity.pem`` loses its first key, for good (``settle``, at the next start of the daemon).

A crash before 2 leaves a spare key that the next attempt uses; after it ``settle`` finishes what was begun.
"""

from collections.abc import Iterable
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from protocol.admission import MAX_CHAIN, AdmissionBook
from protocol.errors import IdentityBarred
from protocol.quic.identity import FILE_NAME, Identity, key_id
from protocol.quic.mesh_files import save_statements
from protocol.quic.private_file import write_private
from protocol.rows import Admission


def why_not(identity: Identity, book: AdmissionBook) -> str:
    """Why the key cannot be rotated now, as one line; empty when it can."""
    held = book.statement(identity.node_id)
    if identity.node_id not in book or held is None:
        return "this node is not admitted in its mesh: `stagemesh doctor` says more"
    if not identity.successor or held.successor != identity.successor:
        return (
            "this node's admission names no key that may follow its own: `stagemesh leave`, then join with a new token"
        )
    if len(book.chain(identity.node_id)) >= MAX_CHAIN:
        return (
            f"{MAX_CHAIN} keys vouch for this one, one after the other: `stagemesh leave`, then join with a new token"
        )
    return ""


def rotate(state_dir: Path, identity: Identity, book: AdmissionBook, seeds: Iterable[str]) -> tuple[Admission, ...]:
    """Make the succession durable and return its statements, to be merged and spread; ``why_not`` must be empty.

    Raises ``StateError``; the node then goes on as it was.
    """
    assert not why_not(identity, book)
    following = identity.next_keys[0]
    if len(identity.next_keys) == 1:
        keys = (following, Ed25519PrivateKey.generate())
        write_private(state_dir / FILE_NAME, Identity(identity.private_key, keys).to_file())
        identity.next_keys = keys
    made = book.succeed(
        identity.public_key,
        following.public_key().public_bytes_raw(),
        sign=identity.sign,
        sign_new=following.sign,
        successor=key_id(identity.next_keys[1]),
    )
    save_statements(state_dir, book.mesh_id, (*book.statements, *made), seeds)
    return made


def settle(state_dir: Path, identity: Identity, book: AdmissionBook) -> Identity:
    """The identity that the book says this node has now; a key that was replaced is removed from the file.

    Raises ``IdentityBarred`` when the key that took its place is not here, ``StateError`` when the file cannot be written.
    """
    while (successor := book.successor(identity.node_id)) is not None:
        if identity.successor != successor:
            raise IdentityBarred(
                f"the key in {state_dir / FILE_NAME} was replaced by that of node {successor}: this is an old copy; remove"
                " it, or `stagemesh join` with a new token, which makes a new identity"
            )
        following, *rest = identity.next_keys
        identity = Identity(following, tuple(rest))
        write_private(state_dir / FILE_NAME, identity.to_file())
    return identity
