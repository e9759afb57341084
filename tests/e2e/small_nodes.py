"""Nodes of a real mesh without models: one directory, configuration and process each, driven by the command line."""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from stage_agent.addresses import free_ports

PATIENCE_S = 90.0
"""A loaded machine takes half a minute for what takes a second otherwise."""


def stagemesh(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stage_agent", *arguments],
        input=stdin, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def until(what: str, holds: Callable[[], Any], patience_s: float = PATIENCE_S) -> Any:
    """What ``holds`` answers, as soon as it is true; the API has nothing to wait on."""
    deadline = time.monotonic() + patience_s
    while True:
        with contextlib.suppress(httpx.TransportError):
            if found := holds():
                return found
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


class SmallNode:
    """One node; ``log`` holds everything its daemons wrote."""

    def __init__(self, root: Path, name: str, extra: str = "") -> None:
        self.name = name
        self.root = root / name
        self.root.mkdir()
        self.state = self.root / "state"
        self.config = self.root / "stagemesh.toml"
        self.log = self.root / "log"
        self.port, self.api_port = free_ports(2)
        self.api = f"127.0.0.1:{self.api_port}"
        self.process: subprocess.Popen[bytes] | None = None
        self.said: list[str] = []
        """What commands other than ``invite`` printed."""
        self.tokens: list[str] = []
        self.config.write_text(
            f'[node]\nname = "{name}"\nstate_dir = "{self.state}"\ncache_dir = "{self.root / "cache"}"\n'
            f'[listen]\nhost = "127.0.0.1"\nport = {self.port}\n[api]\nport = {self.api_port}\n'
            f'[probe]\nbenchmark = false\n[log]\nlevel = "debug"\nformat = "json"\n{extra}'
        )

    def call(self, command: str, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """A command that works on the state directory."""
        return self._noted(command, stagemesh(command, *arguments, "--config", str(self.config), stdin=stdin))

    def ask(self, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A command to the running daemon."""
        return self._noted(command, stagemesh(command, *arguments, "--node", self.api))

    def _noted(self, command: str, done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
        self.said += [done.stderr] if command == "invite" else [done.stdout, done.stderr]
        return done

    def start(self, *, wait: bool = True) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "stage_agent", "run", "--config", str(self.config)], stdout=log, stderr=log
            )
        if wait:
            until(f"{self.name} answers: {self.log.read_text()[-2_000:]}", lambda: self.get("status"))

    def kill(self) -> None:
        """As a power cut would."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.process = None

    def stop(self) -> int:
        """In order; the exit code."""
        assert self.process is not None
        self.process.terminate()
        return self.ended()

    def ended(self, patience_s: float = PATIENCE_S) -> int:
        """Wait for the daemon to end by itself; its exit code."""
        assert self.process is not None
        code = self.process.wait(patience_s)
        self.process = None
        return code

    def get(self, what: str) -> Any:
        return httpx.get(f"http://{self.api}/api/v1/{what}").json()

    @property
    def node_id(self) -> str:
        return str(self.get("status")["node"]["node_id"])

    def alive(self) -> dict[str, str]:
        """Name → id of those alive, this node included."""
        return {node["name"]: node["node_id"] for node in self.get("nodes")["nodes"] if node["state"] == "alive"}

    def last_words(self) -> str:
        """The last line on standard error: what a person sees in a terminal."""
        return self.log.read_text().strip().splitlines()[-1]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.get("events")["events"] if event["kind"] == kind]


@contextlib.contextmanager
def small_mesh(root: Path, *names: str, extra: str = "") -> Iterator[list[SmallNode]]:
    """Running nodes that all see each other; the first founded the mesh and let the others in."""
    nodes = [SmallNode(root, name, extra) for name in names]
    first = nodes[0]
    try:
        assert first.call("init").returncode == 0
        first.start()
        for node in nodes[1:]:
            join(node, first)
            node.start(wait=False)
        until("all see each other", lambda: all(set(names) == set(node.alive()) for node in nodes))
        yield nodes
    finally:
        for node in nodes:
            if node.process is not None:
                node.kill()


def join(node: SmallNode, inviter: SmallNode) -> None:
    """``node`` joins by a token of ``inviter``, which runs."""
    token = json.loads(inviter.call("invite", "--json").stdout)["token"]
    inviter.tokens.append(token)
    done = node.call("join", "-", stdin=token)
    assert done.returncode == 0, done.stderr
