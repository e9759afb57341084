"""The demo's agents: one directory, configuration and operating-system process each, joined by real tokens.

Everything goes through the command line that any user has (``init``, ``invite``, ``join``, ``run``). The processes die
with the demo, even when it is killed, and the directory is removed when the demo ends in order.
"""

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from protocol.errors import StagemeshError
from stage_agent.addresses import free_ports
from stage_agent.cli.client import get_json
from stage_agent.demo.profile import DemoProfile, ShapedMachine, conditioner_text, settings_text

STOP_GRACE_S = 8.0
COMMAND_LIMIT_S = 30.0
_PR_SET_PDEATHSIG = 1


class DemoError(StagemeshError):
    """A step of the demo did not happen in time; the text names the step and the log to read."""


@dataclass(slots=True)
class DemoNode:
    """One agent. ``process`` is ``None`` while it is stopped."""

    machine: ShapedMachine
    directory: Path
    port: int
    api_port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def name(self) -> str:
        """The profile's name of the machine."""
        return self.machine.name

    @property
    def api(self) -> str:
        """``host:port`` of its HTTP API."""
        return f"127.0.0.1:{self.api_port}"

    @property
    def config(self) -> Path:
        """Its configuration file."""
        return self.directory / "stagemesh.toml"

    @property
    def log(self) -> Path:
        """What it wrote to standard error."""
        return self.directory / "agent.log"


@dataclass(slots=True)
class DemoMesh:
    """The machines of a profile as processes on loopback."""

    profile: DemoProfile
    root: Path
    nodes: list[DemoNode] = field(default_factory=list)
    engine: str = "reference"

    def prepare(self, machines: tuple[ShapedMachine, ...], engine: str = "reference") -> None:
        """Write every node's configuration and the file of shaped links.

        ``engine`` is the runtime of every node; ``reference`` decodes real tokens and is priced by its own profile.
        """
        self.engine = engine
        links = self.root / "links.toml"
        links.write_text(conditioner_text(self.profile), "utf-8")
        ports = free_ports(2 * len(machines))
        for index, machine in enumerate(machines):
            directory = self.root / machine.name
            directory.mkdir(mode=0o700)
            node = DemoNode(machine, directory, ports[2 * index], ports[2 * index + 1])
            sections: dict[str, dict[str, Any]] = {
                "node": {
                    "name": machine.name,
                    "state_dir": str(directory / "state"),
                    "cache_dir": str(directory / "cache"),
                },
                "listen": {"host": "127.0.0.1", "port": node.port},
                "api": {"port": node.api_port},
                "quic": {"conditioner_file": str(links)},
                "shape": {
                    "memory_bytes": machine.memory_bytes,
                    "memory_bandwidth_bytes_per_s": machine.memory_bandwidth_bytes_per_s,
                },
                "probe": {"benchmark": False},  # memory and bandwidth are shaped; nothing is left to measure
                "runtime": {"kind": engine},
                "planner": {"calibration": "reference" if engine == "reference" else "skippy"},
                # A demo lasts a minute: it settles faster than the default 8 s (doubled after a loss), replans sooner than
                # 30 s after the last time, and does not wait five minutes before it goes back to the better plan.
                "election": {"settle_us": 4_000_000},
                "assignment": {"replan_spacing_us": 5_000_000},
                "replan": {"min_dwell_us": 5_000_000},
                "log": {"format": "json"},
            }
            node.config.write_text(settings_text(sections), "utf-8")
            self.nodes.append(node)

    def form(self) -> None:
        """Make the mesh: the first node founds it, the others join it by one-time tokens; all are running then."""
        first = self.nodes[0]
        _command("init", "--config", str(first.config))
        self.start(first)
        invitations = [json.loads(_command("invite", "--json", "--config", str(first.config))) for _ in self.nodes[1:]]
        self.wait_for_api(first)
        with ThreadPoolExecutor(max_workers=4) as pool:
            joins = [
                pool.submit(_command, "join", "-", "--config", str(node.config), stdin=invitation["token"])
                for node, invitation in zip(self.nodes[1:], invitations, strict=True)
            ]
            for node, join in zip(self.nodes[1:], joins, strict=True):
                join.result()
                self.start(node)

    def start(self, node: DemoNode) -> None:
        """Start the daemon of ``node``; returns at once."""
        with node.log.open("ab") as log:
            node.process = subprocess.Popen(  # noqa: S603 - our own program with our own arguments
                [sys.executable, "-m", "stage_agent", "run", "--config", str(node.config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONSAFEPATH": "1"},
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509 - no threads here
            )

    def kill(self, node: DemoNode) -> None:
        """End the daemon as a power cut would (SIGKILL)."""
        if node.process is not None:
            node.process.kill()
            node.process.wait()
            node.process = None

    def stop(self) -> dict[str, int]:
        """SIGTERM all daemons and wait; exit codes by name (negative = signal)."""
        codes: dict[str, int] = {}
        running = [node for node in self.nodes if node.process is not None]
        for node in running:
            assert node.process is not None
            with contextlib.suppress(ProcessLookupError):
                node.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_GRACE_S
        for node in running:
            assert node.process is not None
            try:
                codes[node.name] = node.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                node.process.kill()
                codes[node.name] = node.process.wait()
            node.process = None
        return codes

    def wait_for_api(self, node: DemoNode, limit_s: float = 15.0) -> None:
        """Until the daemon of ``node`` answers. Raises ``DemoError`` when it ended or never does."""
        deadline = time.monotonic() + limit_s
        while True:
            self.check_alive(node)
            with contextlib.suppress(StagemeshError):
                get_json(node.api, "/api/v1/status")
                return
            if time.monotonic() > deadline:
                raise DemoError(f"{node.name} did not answer on {node.api} within {limit_s:.0f} s; its log: {node.log}")
            time.sleep(0.05)

    def check_alive(self, node: DemoNode) -> None:
        """Raise ``DemoError`` with the daemon's last words when it ended by itself."""
        if node.process is not None and node.process.poll() is not None:
            words = node.log.read_text("utf-8", "replace").strip().splitlines()[-1:] or ["nothing was logged"]
            raise DemoError(f"{node.name} ended with code {node.process.returncode}: {words[0]}")


@contextlib.contextmanager
def demo_mesh(profile: DemoProfile, *, keep: bool) -> Iterator[DemoMesh]:
    """A mesh in a new directory; on leaving all processes are stopped and the directory is removed (unless ``keep``)."""
    root = Path(tempfile.mkdtemp(prefix="stagemesh-demo-"))
    mesh = DemoMesh(profile, root)
    try:
        yield mesh
    finally:
        mesh.stop()
        if not keep:
            shutil.rmtree(root, ignore_errors=True)


def _command(*arguments: str, stdin: str = "") -> str:
    """Run one ``stagemesh`` command; its standard output. Raises ``DemoError`` with its one line of error."""
    try:
        done = subprocess.run(  # noqa: S603 - our own program with our own arguments
            [sys.executable, "-m", "stage_agent", *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            timeout=COMMAND_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        raise DemoError(f"`stagemesh {arguments[0]}` did not end within {COMMAND_LIMIT_S:.0f} s") from None
    if done.returncode:
        words = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise DemoError(f"`stagemesh {arguments[0]}` failed: {words[0]}")
    return done.stdout


def _die_with_parent() -> None:
    """Ask the kernel to kill this process when the demo is gone, however it went."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
