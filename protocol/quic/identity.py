"""This node's keys: one 0600 file, from which node id and certificate follow.

The first key of the file is in use, the second is the one that may follow it (``protocol.admission``). Only the hash of
the second ever leaves the machine before the keys are rotated; ``rotation`` says how the file changes then.

The certificate is *derived*: fixed dates, a serial number from the key, and Ed25519 signatures are deterministic, so it
is never stored and never expires. It is signed by its own key under the issuer name ``<node id> key``. aioquic peers
compare its public key with the admission book. OpenSSL insists on a chain, so for the TLS lane each node mints, from a
public key alone, a trust anchor of that issuer name (``trust_anchor``): the standard chain check then says exactly
"signed by the key that was admitted", and nothing but the admission book is needed to make it.
"""

import datetime as dt
import re
import stat
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID

from protocol.errors import IdentityError
from protocol.ids import NodeId, node_id_of
from protocol.quic.private_file import make_private_directory, read_private, write_private

FILE_NAME = "identity.pem"
KEYS_MAX = 3
"""In use, to follow, and, while the keys are being rotated, the one after that."""
_BLOCK = re.compile(rb"-----BEGIN [A-Z ]+-----.*?-----END [A-Z ]+-----\s*", re.DOTALL)
_FIRST_DAY = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_LAST_DAY = dt.datetime(9999, 12, 31, 23, 59, 59, tzinfo=dt.UTC)


class Identity:
    """An Ed25519 key and what follows from it. ``repr`` shows the id only. ``next_keys`` may take its place, in order."""

    def __init__(self, private_key: Ed25519PrivateKey, next_keys: tuple[Ed25519PrivateKey, ...] = ()) -> None:
        self.private_key = private_key
        self.next_keys = next_keys
        self.public_key: bytes = private_key.public_key().public_bytes_raw()
        self.node_id: NodeId = node_id_of(self.public_key)
        self.certificate = _certificate(
            subject=self.node_id, issuer=_issuer(self.node_id), public_key=self.public_key, signer=private_key
        )

    def __repr__(self) -> str:
        """The id; the key never ends up in a log."""
        return f"Identity({self.node_id})"

    @classmethod
    def generate(cls) -> "Identity":
        """A new one, in memory only."""
        return cls(Ed25519PrivateKey.generate(), (Ed25519PrivateKey.generate(),))

    @classmethod
    def create(cls, state_dir: Path) -> "Identity":
        """Make and store a new key. Raises ``IdentityError`` when there is one already: it is never overwritten."""
        make_private_directory(state_dir)
        identity = cls.generate()
        try:
            write_private(state_dir / FILE_NAME, identity.to_file(), replace=False)
        except FileExistsError:
            raise IdentityError(f"{state_dir / FILE_NAME} exists: this node has an identity; it is kept") from None
        return identity

    @classmethod
    def load(cls, state_dir: Path) -> "Identity":
        """Read the stored key. Raises ``IdentityError`` when it is missing, damaged, or readable by others."""
        path = state_dir / FILE_NAME
        content = read_private(path)
        if content is None:
            raise IdentityError(f"no identity in {state_dir}: run `stagemesh init` or `stagemesh join` first")
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise IdentityError(f"{path} can be read by others: run `chmod 600 {path}`")
        keys = []
        for block in _BLOCK.findall(content)[:KEYS_MAX] or [content]:
            try:
                key = load_pem_private_key(block, password=None)
            except (ValueError, TypeError, UnsupportedAlgorithm):
                raise IdentityError(
                    f"{path} is not a key: restore it from a backup, or remove it and join again"
                ) from None
            if not isinstance(key, Ed25519PrivateKey):
                raise IdentityError(
                    f"{path} holds another kind of key than Ed25519: restore it, or remove it and join again"
                )
            keys.append(key)
        return cls(keys[0], tuple(keys[1:]))

    @classmethod
    def exists(cls, state_dir: Path) -> bool:
        """Whether a key is stored there."""
        return (state_dir / FILE_NAME).exists()

    @property
    def successor(self) -> str:
        """The id of the key that may follow; empty when there is none."""
        return key_id(self.next_keys[0]) if self.next_keys else ""

    def sign(self, content: bytes) -> bytes:
        """Ed25519 signature (64 bytes)."""
        return self.private_key.sign(content)

    def to_pem(self) -> bytes:
        """The private key in use as PKCS 8."""
        return _pem(self.private_key)

    def to_file(self) -> bytes:
        """What stands in the file: every key, the one in use first."""
        return b"".join(_pem(key) for key in (self.private_key, *self.next_keys))


def key_id(key: Ed25519PrivateKey) -> NodeId:
    """The id of the node that uses ``key``."""
    return node_id_of(key.public_key().public_bytes_raw())


def certificate_key(certificate: x509.Certificate | None) -> bytes | None:
    """The raw Ed25519 key of a peer's certificate; None when there is no certificate or its key is of another kind."""
    if certificate is None:
        return None
    try:
        key = certificate.public_key()
    except (ValueError, UnsupportedAlgorithm):
        return None
    return key.public_bytes_raw() if isinstance(key, Ed25519PublicKey) else None


def trust_anchor(public_key: bytes) -> bytes:
    """DER of a certificate that makes OpenSSL accept what ``public_key`` signed under its own issuer name.

    Its own signature is by a throw-away key and means nothing: a trust anchor is believed because we put it there.
    """
    return _certificate(
        subject=_issuer(node_id_of(public_key)),
        issuer="stagemesh anchor",
        public_key=public_key,
        signer=Ed25519PrivateKey.generate(),
        authority=True,
    ).public_bytes(Encoding.DER)


def _pem(key: Ed25519PrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _issuer(node_id: NodeId) -> str:
    # Another name than the subject's: equal names would make OpenSSL look for the very same certificate in its store.
    return f"{node_id} key"


def _certificate(
    *, subject: str, issuer: str, public_key: bytes, signer: Ed25519PrivateKey, authority: bool = False
) -> x509.Certificate:
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(Ed25519PublicKey.from_public_bytes(public_key))
        .serial_number(int.from_bytes(public_key[:8], "big") | 1)
        .not_valid_before(_FIRST_DAY)
        .not_valid_after(_LAST_DAY)
    )
    if authority:
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    return builder.sign(signer, algorithm=None)
