"""Where others can dial this node."""

import socket
from contextlib import closing, suppress

from config.settings import ListenSettings
from protocol.errors import AddressError, ConfigurationError
from protocol.quic.address import HostPort

_ELSEWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Documentation addresses: connecting a UDP socket to them sends nothing, but names the interface that leads outside."""


def own_addresses(listen: ListenSettings) -> tuple[str, ...]:
    """What newcomers can dial: what is advertised, else the address listened on, else this machine's outward ones."""
    if listen.advertise:
        return listen.advertise
    if listen.port == 0:
        raise ConfigurationError("listen.port is 0 (any free port): say where this node is with --address HOST:PORT")
    if listen.host not in {"0.0.0.0", "::", ""}:  # noqa: S104 - compared, not bound
        return (str(HostPort(listen.host, listen.port)),)
    families = (socket.AF_INET, socket.AF_INET6) if listen.host == "::" else (socket.AF_INET,)
    found = [host for family in families if (host := _outward(family))]
    return tuple(str(HostPort(host, listen.port)) for host in found or ["127.0.0.1"])


def _outward(family: socket.AddressFamily) -> str:
    """The address of the interface that leads outside; empty when there is none."""
    with closing(socket.socket(family, socket.SOCK_DGRAM)) as probe:
        try:
            probe.connect((_ELSEWHERE[family], 9))
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """``count`` different ports that are free for UDP and TCP on ``host`` right now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    held: list[socket.socket] = []
    ports: list[int] = []
    try:
        while len(ports) < count:
            stream = socket.socket(family, socket.SOCK_STREAM)
            held.append(stream)
            stream.bind((host, 0))
            port = stream.getsockname()[1]
            datagram = socket.socket(family, socket.SOCK_DGRAM)
            held.append(datagram)
            with suppress(OSError):
                datagram.bind((host, port))
                ports.append(port)
    finally:
        for each in held:
            each.close()
    return ports


def with_real_port(listen: ListenSettings) -> ListenSettings:
    """``listen`` with a free port in place of 0, so that the node can say where it is before it listens."""
    if listen.port != 0:
        return listen
    try:
        return listen.model_copy(update={"port": free_ports(1, listen.host)[0]})
    except OSError as error:
        raise AddressError(f"listen.host {listen.host!r}: {error.strerror}; use an address of this machine") from None
