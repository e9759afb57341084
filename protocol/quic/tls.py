"""TLS 1.3 contexts for the TCP lane: the same keys as QUIC, standard chain checks, pins on top.

OpenSSL checks that the peer's certificate is signed by a trust anchor. The anchors are minted here from the admission
book (``identity.trust_anchor``), one per admitted key, so that a stranger fails inside the handshake already. Anchors can
only be added to a context; a revoked node still passes the chain check and is refused by the pin right after it.
"""

import asyncio
import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from protocol.admission import AdmissionBook
from protocol.ids import NodeId, node_id_of
from protocol.quic.identity import Identity, certificate_key, trust_anchor
from protocol.quic.mutual import ALPN


class LaneContexts:
    """One server and one client context, kept in step with the book."""

    def __init__(self, identity: Identity, book: AdmissionBook) -> None:
        self._book = book
        self._anchored: set[NodeId] = set()
        self._version = -1
        self._server = _context(identity, ssl.PROTOCOL_TLS_SERVER)
        self._server.num_tickets = 0
        self._client = _context(identity, ssl.PROTOCOL_TLS_CLIENT)

    def server(self) -> ssl.SSLContext:
        """For accepting."""
        self._follow()
        return self._server

    def client(self) -> ssl.SSLContext:
        """For connecting."""
        self._follow()
        return self._client

    def _follow(self) -> None:
        if self._book.version == self._version:
            return
        self._version = self._book.version
        fresh = [node for node in self._book if node not in self._anchored]
        keys = [held.public_key for node in fresh if (held := self._book.statement(node)) is not None]
        if keys:
            anchors = b"".join(trust_anchor(key) for key in keys)
            self._server.load_verify_locations(cadata=anchors)
            self._client.load_verify_locations(cadata=anchors)
        self._anchored.update(fresh)


def peer_of(writer: asyncio.StreamWriter) -> tuple[NodeId, bytes] | None:
    """Id and key that the peer proved in the handshake; None when it showed no Ed25519 certificate."""
    channel: ssl.SSLObject | None = writer.get_extra_info("ssl_object")
    shown = channel.getpeercert(binary_form=True) if channel is not None else None
    key = certificate_key(x509.load_der_x509_certificate(shown)) if shown else None
    return (node_id_of(key), key) if key is not None else None


def _context(identity: Identity, side: int) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # names mean nothing here; the key is compared after the handshake
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.set_alpn_protocols([ALPN])
    with _key_file(identity.to_pem() + identity.certificate.public_bytes(Encoding.PEM)) as path:
        context.load_cert_chain(path)
    return context


@contextmanager
def _key_file(content: bytes) -> Iterator[str]:
    """OpenSSL reads keys from files only: a nameless one in memory where there is such a thing, else 0600 and gone."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("stagemesh-key", os.MFD_CLOEXEC)
        try:
            os.write(descriptor, content)
            yield f"/proc/self/fd/{descriptor}"
        finally:
            os.close(descriptor)
    else:
        import tempfile

        with tempfile.NamedTemporaryFile() as file:
            file.write(content)
            file.flush()
            yield file.name
