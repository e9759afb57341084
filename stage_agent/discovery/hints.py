"""Which announcements on the local network are worth a dial. Pure.

A node announces itself under a *tag*, a hash of mesh id and node id: whoever knows both recognises it, everybody else
learns that some stagemesh runs there and nothing about which. A tag that belongs to no admitted node is dropped by one
look into a table. What is left is a hint where a node that is admitted anyway might be: it is dialled with its key pinned,
so a lie costs one failed handshake; and no more than ``DIALS_PER_S`` on average, each address once a minute.
"""

import hashlib
import ipaddress
import re
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass

from protocol.admission import AdmissionBook
from protocol.ids import NodeId
from protocol.quic.limits import TokenBucket

SERVICE_TYPE = "_stagemesh._udp.local."
ADDRESSES_PER_NODE = 4
DIALS_PER_S = 1
DIALS_AT_ONCE = 8
AGAIN_US = 60_000_000
TRIED_MAX = 1_024
"""Addresses remembered as tried; the oldest is forgotten."""
_NAME = re.compile(rf"([0-9a-f]{{32}})\.{re.escape(SERVICE_TYPE)}")


def tag_of(mesh_id: str, node_id: str) -> str:
    """32 hexadecimal digits."""
    return hashlib.sha256(f"stagemesh lan 1\0{mesh_id}\0{node_id}".encode()).hexdigest()[:32]


def service_name(tag: str) -> str:
    """What is announced."""
    return f"{tag}.{SERVICE_TYPE}"


def tag_from(name: str) -> str | None:
    """The tag of a service name; ``None`` when it is none of ours."""
    found = _NAME.fullmatch(name)
    return found[1] if found else None


def usable_addresses(hosts: Iterable[str], port: int) -> tuple[str, ...]:
    """At most ``ADDRESSES_PER_NODE`` of them, as ``host:port``; only numeric unicast addresses that need no scope."""
    found: list[str] = []
    for host in hosts:
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            continue
        scoped = address.version == 6 and address.is_link_local
        if not (address.is_multicast or address.is_unspecified or address.is_reserved or scoped) and 0 < port < 65_536:
            found.append(f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}")
    return tuple(dict.fromkeys(found))[:ADDRESSES_PER_NODE]


@dataclass(frozen=True, slots=True)
class Hint:
    """``node_id`` may be at ``address``: dial it with its key pinned."""

    node_id: NodeId
    address: str


class Hints:
    """Heard addresses of admitted nodes, and which to dial now. ``book`` says who is admitted, ``own`` is this node."""

    def __init__(self, book: AdmissionBook, own: NodeId) -> None:
        self._book = book
        self._own = own
        self._version = -1
        self._tags: dict[str, NodeId] = {}
        self._heard: dict[str, tuple[str, ...]] = {}
        self._tried: OrderedDict[str, int] = OrderedDict()
        self._bucket = TokenBucket(DIALS_PER_S, DIALS_AT_ONCE)

    def knows(self, tag: str) -> bool:
        """Whether it is an admitted node's, and not this one's: only then is it worth to ask where it is."""
        self._follow()
        return tag in self._tags

    def heard(self, tag: str, addresses: tuple[str, ...]) -> None:
        """An announcement said so; it replaces what the same tag said before. At most one entry a known tag."""
        if self.knows(tag):
            self._heard[tag] = addresses[:ADDRESSES_PER_NODE]

    def gone(self, tag: str) -> None:
        """It is announced no longer."""
        self._heard.pop(tag, None)

    def due(self, connected: Container[str], now_us: int) -> list[Hint]:
        """What to dial now: addresses heard of nodes that are not connected, within the limits of the module."""
        self._follow()
        hints: list[Hint] = []
        for tag, addresses in list(self._heard.items()):
            node_id = self._tags.get(tag)
            if node_id is None:
                del self._heard[tag]
                continue
            for address in addresses:
                if node_id not in connected and self._rested(address, now_us) and self._bucket.take(now_us):
                    self._try(address, now_us)
                    hints.append(Hint(node_id, address))
        return hints

    def _rested(self, address: str, now_us: int) -> bool:
        tried_us = self._tried.get(address)
        return tried_us is None or now_us - tried_us >= AGAIN_US

    def _try(self, address: str, now_us: int) -> None:
        self._tried[address] = now_us
        self._tried.move_to_end(address)
        if len(self._tried) > TRIED_MAX:
            self._tried.popitem(last=False)

    def _follow(self) -> None:
        if self._version != self._book.version:
            self._version = self._book.version
            self._tags = {tag_of(self._book.mesh_id, node): node for node in self._book if node != self._own}


Dial = Callable[[str, NodeId], None]
"""Dial an address, expecting that node."""
