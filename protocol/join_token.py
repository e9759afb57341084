"""Join tokens: what ``invite`` prints and ``join`` proves.

The token holds a secret; the inviter keeps only the *verifier*, a hash of it. The newcomer never sends the secret: it
sends an HMAC under the verifier over the mesh, the token and **both ids of the connection**, which come from the
handshake. A proof that was overheard, replayed or relayed belongs to another connection and is worthless. The inviter's
id is in the token and pinned by the newcomer, so nobody can stand in for the inviter either.
"""

import base64
import binascii
import hashlib
import hmac
from dataclasses import dataclass

import msgpack

from protocol.errors import JoinError

PREFIX = "sm1_"
SECRET_BYTES = 32
MAX_TOKEN_CHARACTERS = 4_096
MAX_ADDRESSES = 16
_CHECK_BYTES = 4


@dataclass(frozen=True, slots=True, repr=False)
class JoinToken:
    """One invitation. ``secret`` is 32 random bytes; ``repr`` never shows it."""

    mesh_id: str
    inviter: str
    addresses: tuple[str, ...]
    token_id: str
    secret: bytes

    def __repr__(self) -> str:
        """Without the secret: representations end up in logs."""
        return f"JoinToken(mesh_id={self.mesh_id!r}, inviter={self.inviter!r}, token_id={self.token_id!r})"


def encode_token(token: JoinToken) -> str:
    """One opaque word that survives being pasted; its check sum tells a truncated one from a wrong one."""
    assert len(token.secret) == SECRET_BYTES
    raw = msgpack.packb(
        [token.mesh_id, token.inviter, list(token.addresses), token.token_id, token.secret], use_bin_type=True
    )
    return PREFIX + base64.urlsafe_b64encode(raw + _check(raw)).decode("ascii").rstrip("=")


def decode_token(text: str) -> JoinToken:
    """Inverse of ``encode_token``. Raises ``JoinError`` with what to do; the text is never repeated in it."""
    text = text.strip()
    if not text.startswith(PREFIX) or len(text) > MAX_TOKEN_CHARACTERS:
        raise JoinError(
            f"this is not a join token (it should start with {PREFIX}): copy it again from `stagemesh invite`"
        )
    word = text.removeprefix(PREFIX)
    damaged = JoinError("the join token is damaged or cut off: copy it again from `stagemesh invite`")
    try:
        raw = base64.b64decode(word + "=" * (-len(word) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise damaged from None
    raw, check = raw[:-_CHECK_BYTES], raw[-_CHECK_BYTES:]
    if check != _check(raw):
        raise damaged
    try:
        fields = msgpack.unpackb(raw, use_list=False, max_str_len=256, max_bin_len=64, max_array_len=MAX_ADDRESSES)
    except (ValueError, msgpack.UnpackException):
        raise damaged from None
    match fields:
        case (str(mesh_id), str(inviter), tuple(addresses), str(token_id), bytes(secret)) if (
            len(secret) == SECRET_BYTES and addresses and all(isinstance(address, str) for address in addresses)
        ):
            return JoinToken(mesh_id, inviter, addresses, token_id, secret)
        case _:
            raise damaged


def verifier_of(secret: bytes) -> bytes:
    """What the inviter keeps instead of the secret (32 bytes). Whoever reads it can join: the file is 0600."""
    return hashlib.sha256(b"stagemesh token verifier 1\0" + secret).digest()


def join_proof(verifier: bytes, *, mesh_id: str, token_id: str, joiner: str, inviter: str) -> bytes:
    """HMAC-SHA256 bound to the connection's two ids (32 bytes)."""
    text = msgpack.packb(["stagemesh join 1", mesh_id, token_id, joiner, inviter])
    return hmac.new(verifier, text, hashlib.sha256).digest()


def proof_holds(proof: bytes, expected: bytes) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(proof, expected)


def _check(raw: bytes) -> bytes:
    return hashlib.sha256(b"stagemesh token\0" + raw).digest()[:_CHECK_BYTES]
