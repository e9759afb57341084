"""``host:port`` as people write it, and as a socket wants it."""

import ipaddress
import socket
from dataclasses import dataclass

from protocol.errors import AddressError

SocketAddress = tuple[str, int] | tuple[str, int, int, int]


@dataclass(frozen=True, slots=True)
class HostPort:
    """A parsed address; ``str()`` writes IPv6 in brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        """``host:port`` or ``[host]:port``."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> HostPort:
    """``host:port`` or ``[ipv6]:port``; port 1–65535. Raises ``AddressError`` that says what is expected."""
    host, colon, port = text.strip().rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise AddressError(f"{text!r}: write an IPv6 address in brackets, as in [::1]:7946")
    if (
        not colon
        or not host
        or len(host) > 120
        or not port.isascii()
        or not port.isdigit()
        or not 0 < int(port) < 65536
    ):
        raise AddressError(f"{text!r} is not an address: write host:port, as in 192.168.1.20:7946")
    return HostPort(host, int(port))


def numeric(address: HostPort) -> bool:
    """Whether no name service is needed."""
    try:
        ipaddress.ip_address(address.host.partition("%")[0])
    except ValueError:
        return False
    return True


def for_socket(host: str, port: int, family: socket.AddressFamily) -> SocketAddress | None:
    """The form in which a socket of ``family`` reports that peer; None when it cannot reach it.

    aioquic drops packets whose source differs from what was dialled, so the form must be exact: on a dual-stack socket
    an IPv4 peer is ``::ffff:a.b.c.d`` with flow and scope.
    """
    ip = ipaddress.ip_address(host.partition("%")[0])
    if family == socket.AF_INET:
        if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is None:
            return None
        return (str(ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else ip), port)
    if isinstance(ip, ipaddress.IPv4Address):
        return (f"::ffff:{ip}", port, 0, 0)
    scope = host.partition("%")[2]
    return (str(ip), port, 0, socket.if_nametoindex(scope) if scope else 0)


def shown(address: SocketAddress | tuple[object, ...] | None) -> str:
    """``host:port`` for people and rows: no mapped prefix, no zone."""
    if not address:
        return ""
    host, port = str(address[0]).partition("%")[0], int(str(address[1]))
    return str(HostPort(host.removeprefix("::ffff:") if host.startswith("::ffff:") and "." in host else host, port))
