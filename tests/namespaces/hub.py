"""A network in user space: every host is a namespace with TUN devices, and this process carries the packets between them.

Run as ``python -m tests.namespaces.hub PLAN SHAPES`` (root). PLAN is a JSON list of ports, each
``{"namespace", "device", "addresses": ["10.77.0.1/24", …], "spare": ["10.77.0.101"], "mtu"}``; the namespaces exist
already, the devices are made here and vanish with this process; spare addresses may be given to them later.
SHAPES is a JSON object, reread when it changes, of directed links between addresses:

    {"10.77.0.1 > 10.77.0.2": {"delay_ms": 10, "jitter_ms": 0, "loss": 0.05, "mtu": 1280, "cut": false, "udp": true},
     "*": {"delay_ms": 10}}

``*`` is every link that is not named. ``cut`` carries nothing, ``udp: false`` carries everything but UDP. A packet larger
than ``mtu`` is lost in silence, as on a path that eats ICMP. Prints ``ready`` once, and its totals at the end of input.

TCP segments come in bundles, as they do from a network card with segmentation offload: one look at each would cost more than
the hosts themselves. Where some link loses packets every segment comes alone, so that each has its own luck.
"""

import contextlib
import fcntl
import heapq
import ipaddress
import itertools
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.namespaces.priority import wake_promptly, weigh

_TUNSETIFF = 0x400454CA
_IFF_TUN_NO_PI_VNET_HDR = 0x5001
_TUNSETOFFLOAD = 0x400454D0
_CSUM_TSO4_TSO6 = 7
_BUNDLE = struct.Struct("=BBHHHH")
"""The kernel's ``virtio_net_hdr``: flags, kind of bundle, header length, segment size, checksum's start and place."""
_UDP = 17
PACKET_MAX_BYTES = 65_536
READ_BYTES = 2 * PACKET_MAX_BYTES
QUEUE_MAX = 20_000
LOOK_S = 0.05
"""How often the file of shapes is looked at."""
BATCH = 64


@dataclass(frozen=True, slots=True)
class Shape:
    """One directed link."""

    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    loss: float = 0.0
    mtu: int = PACKET_MAX_BYTES
    cut: bool = False
    udp: bool = True


def ip(*words: str) -> None:
    """Run ``ip`` from iproute2."""
    subprocess.run(["ip", *words], check=True, capture_output=True)


def open_port(port: dict[str, Any], number: int) -> int:
    """Make the TUN device of one port and move it into its namespace; the descriptor stays here."""
    name = f"sm{os.getpid() % 100_000}x{number}"
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN_NO_PI_VNET_HDR))
    inside, device = ("-n", port["namespace"]), port["device"]
    ip("link", "set", name, "netns", port["namespace"])
    ip(*inside, "link", "set", name, "name", device)
    for address in port["addresses"]:
        flags = ("nodad",) if ":" in address else ()
        ip(*inside, "address", "add", address, "dev", device, *flags)
    ip(*inside, "link", "set", device, "mtu", str(port.get("mtu", 1_500)), "txqueuelen", "2000", "up")
    ip(*inside, "link", "set", "lo", "up")
    return descriptor


def ends(packet: bytes) -> tuple[bytes, bytes, int]:
    """Source, destination and protocol of an IP packet."""
    if packet[0] >> 4 == 4:
        return packet[12:16], packet[16:20], packet[9]
    return packet[8:24], packet[24:40], packet[6]


def segment_bytes(bundle: bytes) -> int:
    """The largest packet that a wire would see of it."""
    _, kind, header, size, _, _ = _BUNDLE.unpack_from(bundle)
    return header + size if kind else len(bundle) - _BUNDLE.size


class Hub:
    """Packets in, packets out, and what lies between them."""

    def __init__(self, plan: list[dict[str, Any]], shapes: Path) -> None:
        self._file = shapes
        self._stamp = 0
        self._named: dict[tuple[bytes, bytes], Shape] = {}
        self._default = Shape()
        self._die = random.Random(1)
        self._waiting: list[tuple[float, int, int, bytes]] = []
        self._count = itertools.count()
        self._ports: dict[bytes, int] = {}
        self.carried = self.lost = 0
        for number, port in enumerate(plan):
            descriptor = open_port(port, number)
            for address in (*port["addresses"], *port.get("spare", ())):
                self._ports[ipaddress.ip_interface(address).ip.packed] = descriptor

    def run(self) -> None:
        """Until standard input ends."""
        descriptors = sorted(set(self._ports.values()))
        look_s = 0.0
        while True:
            now_s = time.monotonic()
            if now_s >= look_s:
                look_s = now_s + LOOK_S
                self._reread()
            until_s = min(look_s, self._waiting[0][0]) if self._waiting else look_s
            # select, because epoll rounds its patience to whole milliseconds
            ready, _, _ = select.select([0, *descriptors], [], [], max(0.0, until_s - now_s))
            if 0 in ready and not os.read(0, 1):
                return
            for descriptor in ready:
                if descriptor:
                    self._take(descriptor)
            self._deliver()

    def _reread(self) -> None:
        stamp = self._file.stat().st_mtime_ns
        if stamp == self._stamp:
            return
        self._stamp = stamp
        links = {name: Shape(**shape) for name, shape in json.loads(self._file.read_text()).items()}
        self._default = links.pop("*", Shape())
        losses = any(shape.loss for shape in (self._default, *links.values()))
        for descriptor in set(self._ports.values()):
            fcntl.ioctl(descriptor, _TUNSETOFFLOAD, 0 if losses else _CSUM_TSO4_TSO6)
        self._named = {}
        for name, shape in links.items():
            source, target = (ipaddress.ip_address(end.strip()).packed for end in name.split(">"))
            self._named[source, target] = shape

    def _take(self, descriptor: int) -> None:
        for _ in range(BATCH):
            try:
                bundle = os.read(descriptor, READ_BYTES)
            except BlockingIOError:
                return
            packet = bundle[_BUNDLE.size :]
            source, target, protocol = ends(packet)
            out = self._ports.get(target)
            if out is None:
                continue
            shape = self._named.get((source, target), self._default)
            blocked = shape.cut or (protocol == _UDP and not shape.udp)
            full = segment_bytes(bundle) > shape.mtu or len(self._waiting) >= QUEUE_MAX
            if blocked or full or (shape.loss and self._die.random() < shape.loss):
                self.lost += 1
                continue
            self.carried += 1
            delay_s = (shape.delay_ms + shape.jitter_ms * self._die.random()) / 1_000
            heapq.heappush(self._waiting, (time.monotonic() + delay_s, next(self._count), out, bundle))

    def _deliver(self) -> None:
        now_s = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now_s:
            _, _, out, bundle = heapq.heappop(self._waiting)
            with contextlib.suppress(OSError):  # the other end is down, or its queue is full
                os.write(out, bundle)


if __name__ == "__main__":
    weigh(-20)  # a late hub would be measured as a slow link
    wake_promptly()
    hub = Hub(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
    print("ready", flush=True)
    hub.run()
    print(json.dumps({"carried": hub.carried, "lost": hub.lost, "cpu_s": round(time.process_time(), 2)}), flush=True)
