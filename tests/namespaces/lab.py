"""Hosts on one machine: network namespaces, the hub between them, and real agents in them."""

import contextlib
import ctypes
import http.client
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from protocol.quic.identity import Identity
from protocol.quic.mesh_files import Membership, store_first
from protocol.quic.private_file import make_private_directory, write_private
from tests.integration.transport_mesh import identities
from tests.namespaces.priority import wake_promptly, weigh

_LIBC = ctypes.CDLL(None, use_errno=True)
_NEWNET = 0x40000000
_PDEATHSIG = 1
ROOT = Path(__file__).parents[2]
PORT, API_PORT = 7946, 7947


@cache
def why_not() -> str:
    """Why namespaces cannot be had here; empty when they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun"
    if shutil.which("ip") is None:
        return "`ip` (iproute2) is not installed"
    name = f"smtry{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return f"ip netns add: {made.stderr.strip()}" if made.returncode else ""


def enter(namespace: str) -> None:
    """Put the calling thread into a namespace; empty is the one where everything began."""
    path = f"/var/run/netns/{namespace}" if namespace else f"/proc/{os.getpid()}/ns/net"
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if _LIBC.setns(descriptor, _NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {path}")
    finally:
        os.close(descriptor)


@dataclass(slots=True)
class Host:
    """One namespace with its addresses, one state directory, at most one agent."""

    name: str
    namespace: str
    addresses: list[str]
    directory: Path
    identity: Identity
    niceness: int = 0
    """Of all that runs inside; below zero where it is timed on a machine that others use too."""
    advertises: bool = True
    process: subprocess.Popen[bytes] | None = None

    @property
    def id(self) -> str:
        """Its node id."""
        return self.identity.node_id

    def popen(self, *arguments: str, **options: Any) -> subprocess.Popen[Any]:
        """Start a program inside; it dies with the tests."""
        namespace, niceness = self.namespace, self.niceness

        def inside() -> None:
            enter(namespace)
            if niceness:
                weigh(niceness)
                wake_promptly()
            _LIBC.prctl(_PDEATHSIG, signal.SIGKILL)

        return subprocess.Popen(arguments, cwd=ROOT, preexec_fn=inside, **options)  # noqa: PLW1509 - no threads here

    def command(self, *arguments: str, limit_s: float = 90.0) -> subprocess.CompletedProcess[str]:
        """Run ``stagemesh …`` inside."""
        process = self.popen(
            sys.executable, "-m", "stage_agent", *arguments,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            out, errors = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return subprocess.CompletedProcess(arguments, process.returncode, out, errors)

    def start(self) -> None:
        """Start the agent."""
        with (self.directory / "agent.log").open("ab") as log:
            self.process = self.popen(
                sys.executable, "-m", "stage_agent", "run", "--config", str(self.config),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def readdress(self, network: int = 0) -> str:
        """Exchange its address for another one, as a new DHCP lease does; the new one."""
        device, old = f"net{network}", self.addresses[network]
        fresh = f"{old.rpartition('.')[0]}.{100 + int(old.rpartition('.')[2])}"
        for words in (("del", f"{old}/24"), ("add", f"{fresh}/24")):
            subprocess.run(["ip", "-n", self.namespace, "address", *words, "dev", device], check=True)
        if not self.advertises:
            self.route_out()
        return fresh

    def route_out(self) -> None:
        """Everything else by ``net0``, as on a machine with a router."""
        subprocess.run(["ip", "-n", self.namespace, "route", "replace", "default", "dev", "net0"], check=True)

    @property
    def config(self) -> Path:
        """Its configuration file."""
        return self.directory / "stagemesh.toml"

    def get(self, path: str) -> dict[str, Any]:
        """A document of its API."""
        enter(self.namespace)
        try:
            channel = socket.create_connection(("127.0.0.1", API_PORT), 5)
        finally:
            enter("")
        connection = http.client.HTTPConnection("127.0.0.1", API_PORT, timeout=5)
        connection.sock = channel
        with contextlib.closing(connection):
            connection.request("GET", path)
            document: dict[str, Any] = json.load(connection.getresponse())
        return document

    def try_get(self, path: str) -> dict[str, Any]:
        """The same; empty while the agent does not answer."""
        if self.process is not None and self.process.poll() is not None:
            raise AssertionError(f"{self.name} ended: {self.said()[-600:]}")
        try:
            return self.get(path)
        except (OSError, http.client.HTTPException):
            return {}

    def events(self, kind: str) -> list[dict[str, Any]]:
        """What it told of one kind, oldest first."""
        return [event for event in self.try_get("/api/v1/events").get("events", []) if event["kind"] == kind]

    def peer(self, other: "Host") -> dict[str, Any]:
        """How it sees another host; empty when it does not."""
        nodes = self.try_get("/api/v1/nodes").get("nodes", [])
        return next((node for node in nodes if node["node_id"] == other.id), {})

    def link(self, other: "Host") -> dict[str, Any]:
        """Its own measurement of the link to another host; empty without one."""
        links = self.try_get("/api/v1/links").get("links", [])
        return next((link for link in links if (link["source"], link["target"]) == (self.id, other.id)), {})

    def said(self) -> str:
        """The agent's log."""
        return (self.directory / "agent.log").read_text(errors="replace")

    def stop(self) -> None:
        """End the agent in order."""
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(8)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.process = None


def wire_ms(one: Host, two: Host, *, network: int = 0, rounds: int = 40) -> float:
    """The least round trip that bare sockets see on that way now: the shape, and what this machine adds to it."""
    ends = []
    for host in (one, two):
        enter(host.namespace)
        try:
            end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        finally:
            enter("")
        end.bind((host.addresses[network], 0))
        end.settimeout(0.2)
        ends.append(end)
    near, far = ends
    best_s = math.inf
    with contextlib.closing(near), contextlib.closing(far):
        for number in range(rounds):
            begun_s = time.perf_counter()
            with contextlib.suppress(TimeoutError):  # lost, as it may be
                near.sendto(number.to_bytes(2, "big"), far.getsockname())
                far.recv(64)
                far.sendto(number.to_bytes(2, "big"), near.getsockname())
                if near.recv(64) == number.to_bytes(2, "big"):
                    best_s = min(best_s, time.perf_counter() - begun_s)
    return best_s * 1_000


@dataclass(slots=True)
class Lab:
    """The hosts and the hub between them."""

    hosts: list[Host]
    shapes: Path
    hub: subprocess.Popen[str] = field(init=False)

    def shape(self, default: dict[str, Any], **links: dict[str, Any]) -> None:
        """Replace all shapes; ``default`` is every link that is not named."""
        fresh = self.shapes.with_suffix(".new")
        fresh.write_text(json.dumps({"*": default, **links}))
        fresh.rename(self.shapes)
        time.sleep(0.12)  # the hub looks every 50 ms


def wait(what: str, holds: Callable[[], object], limit_s: float) -> float:
    """Until ``holds``; the seconds that took. An ``AssertionError`` names what did not come."""
    begun_s = time.monotonic()
    while not holds():
        assert time.monotonic() - begun_s < limit_s, f"within {limit_s:g} s: {what}"
        time.sleep(0.1)
    return time.monotonic() - begun_s


@contextlib.contextmanager
def lab(
    root: Path,
    count: int,
    *,
    networks: int = 1,
    mtu: int = 1_500,
    admitted: bool = True,
    niceness: int = 0,
    advertise: bool = True,
    **quic: Any,
) -> Iterator[Lab]:
    """``count`` hosts, each with one address in every network (10.77.0.0/24 by ``net0``, 10.78.0.0/24 by ``net1``).

    All are admitted to one mesh whose seed is the first host; with ``admitted=False`` only the first is. ``quic`` are
    settings of every agent's transport. Without ``advertise`` the agents find their addresses themselves: by the default
    route, which leads to ``net0``.
    """
    made, books = identities(count)
    hosts, plan = [], []
    for number, identity in enumerate(made):
        host = _host(root, number, identity, networks, quic, advertise)
        host.niceness, host.advertises = niceness, advertise
        hosts.append(host)
        plan += [
            {
                "namespace": host.namespace, "device": f"net{each}", "mtu": mtu,
                "addresses": [f"{host.addresses[each]}/24", f"fd77:{each}::{number + 1}/64"],
                "spare": [f"10.{77 + each}.0.{100 + number + 1}"],
            }
            for each in range(networks)
        ]  # fmt: skip
        statements = books[0].statements if admitted else books[0].statements[:1]
        if admitted or number == 0:
            seeds = () if number == 0 else (f"{hosts[0].addresses[0]}:{PORT}",)
            store_first(host.directory / "state", Membership(books[0].mesh_id, statements, seeds))
        make_private_directory(host.directory / "state")
        write_private(host.directory / "state" / "identity.pem", identity.to_pem())
    made_lab = Lab(hosts, root / "shapes.json")
    (root / "plan.json").write_text(json.dumps(plan))
    made_lab.shapes.write_text("{}")
    try:
        for host in hosts:
            subprocess.run(["ip", "netns", "add", host.namespace], check=True)
        made_lab.hub = subprocess.Popen(
            [sys.executable, "-m", "tests.namespaces.hub", str(root / "plan.json"), str(made_lab.shapes)],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert made_lab.hub.stdout is not None
        assert made_lab.hub.stdout.readline() == "ready\n"
        for host in hosts:
            if not advertise:
                host.route_out()
        yield made_lab
    finally:
        for host in hosts:
            host.stop()
        if hasattr(made_lab, "hub"):
            made_lab.hub.communicate("", timeout=10)
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host.namespace], check=False, capture_output=True)


def _host(root: Path, number: int, identity: Identity, networks: int, quic: dict[str, Any], advertise: bool) -> Host:
    name = f"n{number + 1}"
    host = Host(
        name, f"sm{os.getpid()}{name}", [f"10.{77 + each}.0.{number + 1}" for each in range(networks)],
        root / name, identity,
    )  # fmt: skip
    host.directory.mkdir(mode=0o700)
    sections: dict[str, dict[str, Any]] = {
        "node": {"name": name, "state_dir": str(host.directory / "state"), "cache_dir": str(host.directory / "cache")},
        "listen": {
            "host": "0.0.0.0",
            "port": PORT,
            "advertise": [f"{address}:{PORT}" for address in host.addresses] if advertise else [],
        },
        "api": {"port": API_PORT},
        "shape": {"memory_bytes": 2**30, "memory_bandwidth_bytes_per_s": 10**10},
        "probe": {"benchmark": False},
        "quic": quic,
        "log": {"format": "json"},
    }
    host.config.write_text(
        "\n".join(
            "\n".join((f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())))
            for section, values in sections.items()
        )
    )
    return host
