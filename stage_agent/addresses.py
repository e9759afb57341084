"""Where others can dial this node."""

import ipaddress
import socket
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, suppress
from pathlib import Path

import psutil

from config.settings import ListenSettings
from protocol.errors import AddressError, ConfigurationError
from protocol.quic.address import HostPort

ADDRESSES_MAX = 8
NOWHERE = "127.0.0.1"
"""The host of a machine without a network."""
_ELSEWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Documentation addresses: connecting a UDP socket to them sends nothing, but names the interface that leads outside."""


def own_addresses(listen: ListenSettings) -> tuple[str, ...]:
    """What peers can dial: what is advertised, else the address listened on, else this machine's own.

    The outward address comes first, then that of every other network card: a cable that leads to one peer only may be
    the best way there.
    """
    if listen.advertise:
        return listen.advertise
    if listen.port == 0:
        raise ConfigurationError("listen.port is 0 (any free port): say where this node is with --address HOST:PORT")
    if listen.host not in {"0.0.0.0", "::", ""}:  # noqa: S104 - compared, not bound
        return (str(HostPort(listen.host, listen.port)),)
    families = (socket.AF_INET, socket.AF_INET6) if listen.host == "::" else (socket.AF_INET,)
    found = [host for family in families if (host := _outward(family))]
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    cards = {name: [each.address for each in held] for name, held in psutil.net_if_addrs().items() if name in up}
    found = list(dict.fromkeys((*found, *card_hosts(cards))))[:ADDRESSES_MAX]
    return tuple(str(HostPort(host, listen.port)) for host in found or [NOWHERE])


def card_hosts(cards: Mapping[str, Iterable[str]], may: Callable[[str], bool] | None = None) -> list[str]:
    """The IPv4 addresses of network cards, by name of the card.

    Bridges of containers and virtual machines are left out: their addresses are the same on every machine and lead
    nowhere. So are tunnels, which are never the better way, and addresses that a card gave itself.
    """
    hosts = []
    for name in sorted(filter(may or is_card, cards)):
        for text in cards[name]:
            with suppress(ValueError):
                ip = ipaddress.IPv4Address(text)
                if not (ip.is_loopback or ip.is_link_local or ip.is_unspecified):
                    hosts.append(str(ip))
    return hosts


def is_card(name: str) -> bool:
    """Whether there is hardware behind the interface."""
    known = Path("/sys/class/net")  # Linux
    return (known / name / "device").exists() if known.exists() else name.startswith(("en", "eth", "wl"))


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
