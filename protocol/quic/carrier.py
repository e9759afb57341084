"""A session carried by QUIC: one long-lived bidirectional control stream (stream 0) and datagrams.

The dialler opens the stream and writes the stream type byte; from then on both directions carry frames. Any other stream
is refused. Sending never waits (aioquic buffers without bound), so the session bounds what is outstanding.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from aioquic.asyncio.protocol import QuicConnectionProtocol
from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import (
    ConnectionTerminated,
    DatagramFrameReceived,
    HandshakeCompleted,
    QuicEvent,
    StopSendingReceived,
    StreamDataReceived,
    StreamReset,
)

from protocol.codec import MAX_CONTROL_BYTES, MAX_GREETING_BYTES, FrameReader, frame
from protocol.errors import WireError
from protocol.quic.address import SocketAddress, shown
from protocol.quic.carriage import Conversation
from protocol.quic.conditioner import ShapedLink
from protocol.quic.interface import Path
from protocol.quic.mutual import (
    acknowledge_now,
    datagrams_waiting,
    forget_handshake,
    peer_key,
    takes_datagrams,
    unacknowledged_bytes,
)

if TYPE_CHECKING:
    import asyncio

CONTROL_STREAM = 0
CONTROL_TYPE = b"\x01"
"""First byte of a control stream, on QUIC as on the TLS lane."""
DATAGRAMS_WAITING_MAX = 64
"""Beyond this the path is stuck and newer probes take the stream, where they are counted and bounded."""
ELSEWHERE_MAX = 8
"""So many packets in a row by another interface are a move; a path that alternates between two is none."""
TOLD = {
    reason.encode(): reason
    for reason in (
        "duplicate", "replaced", "identity_conflict", "older_boot", "wrong_mesh", "revoked", "superseded", "closed",
        "hello_timeout", "read_timeout", "malformed", "oversized", "version", "self", "crash", "not_better",
    )
}  # fmt: skip
"""What a peer may say as it closes; anything else is ``peer_closed``: a peer's text never becomes a label."""
_TIMED_OUT = {"Idle timeout": "idle_timeout"}

SendDatagram = Callable[["QuicCarrier", bytes, Any], None]


class QuicCarrier(QuicConnectionProtocol):
    """See the module. ``conversation`` is set right after construction, before any packet is fed."""

    conversation: Conversation

    def __init__(
        self,
        quic: QuicConnection,
        *,
        send: SendDatagram,
        shape: Callable[["QuicCarrier", ShapedLink | None], None],
        now_us: Callable[[], int],
        dialled: bool,
    ) -> None:
        super().__init__(quic)
        self._shape = shape
        self.connection_made(cast("asyncio.BaseTransport", _Outlet(self, send)))
        self._now_us = now_us
        self._dialled = dialled
        self._reader = FrameReader(MAX_GREETING_BYTES)
        self._pending_since_us: int | None = None
        self._address: SocketAddress | None = None
        self._address_shown = ""
        self._interface = ""
        self._elsewhere = 0
        self._typed = dialled
        self._shut = False
        self.late_us = 0
        self._answering = self._prompt = False
        self.sent_us = self.heard_us = now_us()
        self.unanswered_since_us: int | None = None

    # ---- Carrier ----------------------------------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        """Always QUIC."""
        return "quic"

    @property
    def address(self) -> str:
        """Follows NAT rebinding."""
        present = self._quic.get_peer_address()
        if present != self._address:
            self._address, self._address_shown = present, shown(present)
        return self._address_shown

    @property
    def interface(self) -> str:
        """Follows the packets."""
        return self._interface

    @property
    def datagrams(self) -> bool:
        """Negotiated, and the queue moves."""
        return takes_datagrams(self._quic) and datagrams_waiting(self._quic) < DATAGRAMS_WAITING_MAX

    def write(self, raw: bytes) -> None:
        """One frame on the control stream."""
        if self._shut:
            return
        data = frame(raw)
        if self._dialled and self._quic.get_next_available_stream_id() == CONTROL_STREAM:
            data = CONTROL_TYPE + data
        self._mark_sent()
        self._quic.send_stream_data(CONTROL_STREAM, data)
        self._transmit_soon()

    def write_datagram(self, raw: bytes) -> bool:
        """One datagram, at once: it may be a probe, and the work of the rest of this turn is no time of the link."""
        if self._shut:
            return False
        self._mark_sent()
        self._quic.send_datagram_frame(raw)
        self.transmit()
        return True

    def outstanding_bytes(self) -> int:
        """Not acknowledged yet."""
        return unacknowledged_bytes(self._quic, CONTROL_STREAM)

    def pending_since_us(self) -> int | None:
        """When the unfinished frame began."""
        return self._pending_since_us

    def shut(self, reason: str) -> None:
        """Flush once, then close."""
        if self._shut:
            return
        self._shut = True
        self.transmit()
        self.close(reason_phrase=reason)

    def trust(self) -> None:
        """The peer is admitted: its frames may be as large as messages get."""
        self._reader.limit = MAX_CONTROL_BYTES

    def keep_alive(self) -> None:
        """Make the path carry something in both directions (NAT bindings; server→client is black-holed otherwise)."""
        self._mark_sent()
        self._quic.send_ping(0)
        self._transmit_soon()

    def shape(self, link: ShapedLink | None) -> None:
        """Every packet of this connection goes through ``link`` from now on."""
        self._shape(self, link)

    def arrived(self, interface: str, late_us: int) -> None:
        """The next packet came by this local interface, so long ago."""
        self.late_us = late_us
        if interface == self._interface:
            self._elsewhere = 0
            return
        self._elsewhere += 1
        if not self._interface or self._elsewhere >= ELSEWHERE_MAX:
            self._interface, self._elsewhere = interface, 0

    # ---- from aioquic -----------------------------------------------------------------------------------------------

    def datagram_received(self, data: bytes | str, addr: Any) -> None:
        """A packet for this connection (it may still be forged: liveness only decides between connections)."""
        self.heard_us, self.unanswered_since_us = self._now_us(), None
        self._answering = True
        try:
            super().datagram_received(data, addr)
        finally:
            self._answering = False

    def quic_event_received(self, event: QuicEvent) -> None:
        """Translate; nothing is believed before ``HandshakeCompleted``, which aioquic reports first."""
        match event:
            case HandshakeCompleted():
                forget_handshake(self._quic)
                self.conversation.established(peer_key(self._quic))
            case StreamDataReceived(stream_id=stream_id) if stream_id != CONTROL_STREAM:
                self.conversation.broken("unexpected_stream")
            case StreamDataReceived(data=data, end_stream=ended):
                self._stream(data, ended=ended)
            case DatagramFrameReceived(data=data):
                self._prompt = True
                self.conversation.frame(data, "datagram")
            case StreamReset() | StopSendingReceived():
                self.conversation.broken("truncated")
            case ConnectionTerminated(reason_phrase=phrase):
                self._shut = True
                reason = _TIMED_OUT.get(phrase) or TOLD.get(phrase.encode()) or "peer_closed"
                self.conversation.closed("unadmitted" if phrase == "refused" else reason)
            case _:
                pass

    def _transmit_soon(self) -> None:
        """Not while a packet is being taken in: everything goes out at its end, and a second look costs as much."""
        if not self._answering:
            super()._transmit_soon()

    def transmit(self) -> None:
        """Acknowledge with what is sent, and datagrams at once: an echo is three packets and three wakes, not four and six."""
        if self._prompt:
            self._prompt = False
            acknowledge_now(self._quic)
        super().transmit()

    def _mark_sent(self) -> None:
        self._prompt = True
        self.sent_us = self._now_us()
        self.unanswered_since_us = self.unanswered_since_us or self.sent_us

    def _stream(self, data: bytes, *, ended: bool) -> None:
        if not self._typed and data:
            if data[:1] != CONTROL_TYPE:
                self.conversation.broken("unexpected_stream")
                return
            self._typed, data = True, data[1:]
        try:
            frames = self._reader.feed(data)
        except WireError as error:
            self.conversation.broken(error.reason)
            return
        if not self._reader.pending:
            self._pending_since_us = None
        elif frames or self._pending_since_us is None:
            self._pending_since_us = self._now_us()
        for raw in frames:
            self.conversation.frame(raw, "stream")
        if ended:
            self.conversation.broken("truncated" if self._reader.pending else "peer_closed")


class _Outlet:
    """Stands where aioquic expects a datagram transport, so that every packet passes the router and its shaper."""

    def __init__(self, carrier: QuicCarrier, send: SendDatagram) -> None:
        self._carrier = carrier
        self._send = send

    def sendto(self, data: bytes, address: Any) -> None:
        """Called by aioquic for every packet."""
        self._send(self._carrier, data, address)
