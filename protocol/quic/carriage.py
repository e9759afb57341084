"""What a session stands on: a *carrier* below it, and what the carrier reports to. Implemented by QUIC, TLS and memory."""

from typing import Protocol

from protocol.quic.conditioner import ShapedLink
from protocol.quic.interface import Lane, Path


class Carrier(Protocol):
    """What a session needs from below. Never waits; ``shut`` may be called at any time and more than once."""

    @property
    def path(self) -> Path:
        """QUIC or the TLS fallback."""

    @property
    def address(self) -> str:
        """Where the peer is now."""

    @property
    def interface(self) -> str:
        """The local interface by which the peer's packets come; empty when that is not known."""

    @property
    def late_us(self) -> int:
        """How long what is being handed up lay in this machine before it was read."""

    @property
    def datagrams(self) -> bool:
        """Whether datagrams can be sent."""

    @property
    def sent_us(self) -> int:
        """When this end last sent something of its own accord."""

    @property
    def heard_us(self) -> int:
        """When anything at all last came from the peer."""

    @property
    def unanswered_since_us(self) -> int | None:
        """When the first thing was sent since anything was heard; None when nothing was."""

    def trust(self) -> None:
        """The peer is admitted: larger frames may come from now on."""

    def keep_alive(self) -> None:
        """Make the path carry something in both directions."""

    def shape(self, link: ShapedLink | None) -> None:
        """Send through ``link`` from now on."""

    def write(self, raw: bytes) -> None:
        """One frame on the control stream."""

    def write_datagram(self, raw: bytes) -> bool:
        """One datagram; False when it cannot be sent (the stream is used instead)."""

    def outstanding_bytes(self) -> int:
        """Bytes handed to ``write`` and not known to have arrived."""

    def pending_since_us(self) -> int | None:
        """When the unfinished incoming frame began; None when there is none."""

    def shut(self, reason: str) -> None:
        """Send what can be sent at once, then close, telling ``reason``."""


class Conversation(Protocol):
    """What a carrier reports to: a ``Session`` here, a ``Joining`` on the newcomer's side."""

    def established(self, public_key: bytes | None) -> None:
        """The handshake is over; the peer proved to own this key (None: it showed none)."""

    def frame(self, raw: bytes, lane: Lane) -> None:
        """A whole envelope arrived."""

    def broken(self, reason: str) -> None:
        """The peer violated framing; the conversation must end."""

    def closed(self, reason: str) -> None:
        """Nothing more will come or go. ``reason`` is one of ``REASONS``."""
