"""The UDP socket of the control lane: where and when each packet came in, and answers that leave from there.

A machine with a cable and Wi-Fi has two addresses. A socket bound to all of them answers from whichever the routing table
prefers, and a QUIC peer drops an answer that comes from another address than it dialled. So every packet carries the
local address and interface it came by (``IP_PKTINFO``), and what is sent back to a peer that dialled leaves from there.
What this node dialled itself follows the routing table: when a cable is pulled, the next packet takes the way that is
left, and the peer follows (QUIC path validation).

The kernel also notes when a packet came (``SO_TIMESTAMPNS``). A process that shares two cores with an engine reads it
milliseconds later, and a round trip measured by the process would be that of its scheduler.

Elsewhere than on Linux nothing is known of arrivals, and answers leave as the system likes.
"""

import asyncio
import socket
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from protocol.errors import AddressError
from protocol.quic.address import SocketAddress

RECEIVE_BUFFER_BYTES = 1_048_576
PACKET_MAX_BYTES = 4_096
"""Ours are 1 200; what is longer is cut off and then refused."""
PACKETS_PER_TURN = 32
"""Taken in one turn of the loop; then others have theirs."""
ARRIVALS_MAX = 256
_IP_PKTINFO = 8
"""Linux; Python names it from 3.14 on."""
_SO_TIMESTAMPNS = 35
"""Linux, on every architecture that Python is built for by default; has no name in Python."""
_CONTROL_BYTES = socket.CMSG_SPACE(20) + socket.CMSG_SPACE(16)
_STAMP = struct.Struct("=qq")
LATE_MAX_US = 1_000_000
"""A packet that seems to have waited longer says that the wall clock was set meanwhile, or that the loop stood still."""
_V4 = struct.Struct("=I4s4s")
"""struct in_pktinfo: interface, the local address that was used, the destination as the header has it."""
_V6 = struct.Struct("=16sI")
"""struct in6_pktinfo."""

Control = tuple[int, int, bytes]


@dataclass(frozen=True, slots=True)
class Arrival:
    """Where a packet came in. ``answer`` is the ancillary data that makes a packet leave from the same address."""

    interface: str
    answer: Control


Take = Callable[[bytes, SocketAddress, Arrival | None, int], None]
"""A packet, whose it is, where it came in, and how many microseconds ago."""


class UdpSocket:
    """Reads on the running loop until ``close``. ``take`` gets each packet and must not raise."""

    def __init__(self, bound: socket.socket, take: Take) -> None:
        self._socket = bound
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._arrivals: dict[Control, Arrival] = {}
        self._loop.add_reader(bound.fileno(), self._readable)

    @property
    def address(self) -> SocketAddress:
        """What it is bound to."""
        bound: SocketAddress = self._socket.getsockname()
        return bound

    def send(self, data: bytes, address: SocketAddress, arrival: Arrival | None = None) -> str:
        """Send one packet; the reason when it is lost here. Never waits: QUIC sends lost packets again."""
        try:
            if arrival is None:
                self._socket.sendto(data, address)
            else:
                self._socket.sendmsg([data], [arrival.answer], 0, address)
        except (BlockingIOError, InterruptedError):
            return "send_buffer"
        except OSError:  # no route, a firewall, an address that this machine has no more: all pass, or deadlines decide
            return "unreachable"
        return ""

    def close(self) -> None:
        """Stop reading and close the socket."""
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()

    def _readable(self) -> None:
        for _ in range(PACKETS_PER_TURN):
            if self._socket.fileno() < 0:
                return
            try:
                data, control, _, address = self._socket.recvmsg(PACKET_MAX_BYTES, _CONTROL_BYTES)
            except OSError:  # nothing more, or ICMP said something that anybody can forge
                return
            arrival, late_us = None, 0
            for part in control:
                if part[1] == _SO_TIMESTAMPNS and part[0] == socket.SOL_SOCKET:
                    late_us = _late_us(part[2])
                else:
                    arrival = self._arrival(part)
            self._take(data, address, arrival, late_us)

    def _arrival(self, control: Control) -> Arrival | None:
        known = self._arrivals.get(control)
        if known is None and (known := _read(control)) is not None:
            if len(self._arrivals) >= ARRIVALS_MAX:
                self._arrivals.clear()
            self._arrivals[control] = known
        return known


def _read(control: Control) -> Arrival | None:
    level, kind, content = control
    if (level, kind) == (socket.IPPROTO_IP, _IP_PKTINFO) and len(content) >= _V4.size:
        index, local, _ = _V4.unpack_from(content)
        answer = _V4.pack(0, local, bytes(4))
    elif (level, kind) == (socket.IPPROTO_IPV6, socket.IPV6_PKTINFO) and len(content) >= _V6.size:
        local, index = _V6.unpack_from(content)
        # A link-local address means nothing without its interface.
        answer = _V6.pack(local, index if local[:2] == b"\xfe\x80" else 0)
    else:
        return None
    try:
        interface = socket.if_indextoname(index)
    except OSError:  # gone already
        interface = ""
    return Arrival(interface, (level, kind, answer))


def _late_us(stamp: bytes) -> int:
    if len(stamp) != _STAMP.size:
        return 0
    seconds, nanoseconds = _STAMP.unpack(stamp)
    late_us = (time.clock_gettime_ns(time.CLOCK_REALTIME) - seconds * 1_000_000_000 - nanoseconds) // 1_000
    return late_us if 0 <= late_us <= LATE_MAX_US else 0


def bind_udp(host: str, port: int) -> socket.socket:
    """A bound, non-blocking UDP socket; ``::`` takes IPv4 too. Raises ``AddressError`` in one line."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_DGRAM, flags=socket.AI_PASSIVE | socket.AI_NUMERICHOST
        )[0]
    except socket.gaierror:
        raise AddressError(f"listen.host {host!r} is not an IP address of this machine: use 0.0.0.0 or ::") from None
    bound = socket.socket(family, socket.SOCK_DGRAM)
    try:
        bound.setblocking(False)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        if sys.platform == "linux":
            bound.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, 1)
            else:
                bound.setsockopt(socket.IPPROTO_IP, _IP_PKTINFO, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise AddressError(
            f"cannot listen on UDP {host} port {port}: {error.strerror}; stop what uses it or set listen.port"
        ) from None
    return bound
