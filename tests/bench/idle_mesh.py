"""Agents as processes on loopback for the idle measurement: made by ``init``, ``invite`` and ``join``, read in ``/proc``."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from protocol.errors import DaemonUnreachable
from stage_agent.addresses import free_ports
from stage_agent.cli.client import get_json

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
STARTED_S = 120.0
JOIN_TRIES = 5
_METRIC = re.compile(r"^stagemesh_gossip_(\w+)_total{(.*)} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'="([a-z]+)"')
_MEMORY = re.compile(r"^(Rss|Pss|Anonymous|VmHWM):\s+(\d+) kB", re.MULTILINE)
RUN = ("-m", "stage_agent", "run")


@dataclass(slots=True)
class IdleAgent:
    """One daemon; default settings except for where it is."""

    name: str
    config: Path
    log: Path
    api: str
    process: subprocess.Popen[bytes] | None = None
    launcher: tuple[str, ...] = RUN

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, *self.launcher, "--config", str(self.config)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text("utf-8", "replace")[-2_000:]
        try:
            get_json(self.api, "/api/v1/status")
        except DaemonUnreachable:
            return False
        return True

    def settled_peers(self) -> int:
        """Peers that this agent sees alive over a settled link."""
        nodes = get_json(self.api, "/api/v1/nodes")["nodes"]
        return sum(1 for node in nodes if node["state"] == "alive" and node["rtt_settled"] and not node["is_self"])

    def cpu_s(self) -> float:
        """Processor time so far."""
        assert self.process is not None
        fields = Path(f"/proc/{self.process.pid}/stat").read_text("ascii").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S

    def memory_kib(self) -> dict[str, int]:
        """``Rss``, ``Pss``, ``Anonymous`` of ``smaps_rollup``, and ``VmHWM``."""
        assert self.process is not None
        text = Path(f"/proc/{self.process.pid}/smaps_rollup").read_text("ascii")
        text += Path(f"/proc/{self.process.pid}/status").read_text("ascii")
        return {name: int(value) for name, value in _MEMORY.findall(text)}

    def traffic(self) -> dict[str, float]:
        """Totals of the agent's own counters: datagrams and stream messages both ways, packets, bytes."""
        return {
            " ".join((name, *_LABEL.findall(labels))): float(value)
            for name, labels, value in _METRIC.findall(self._metrics())
            if name in {"messages", "packets", "bytes"}
        }

    def _metrics(self) -> str:
        with urllib.request.urlopen(f"http://{self.api}/metrics", timeout=10) as answer:
            return answer.read().decode()


@dataclass(slots=True)
class IdleMesh:
    """All agents of one measurement. ``formed_s`` and ``joined_s`` are the monotonic moments at which all but the last
    answered, and at which the last one's ``join`` ended."""

    root: Path
    agents: list[IdleAgent] = field(default_factory=list)
    formed_s: float = 0.0
    joined_s: float = 0.0
    _token: str = ""

    def form(self, nodes: int) -> None:
        """Init, invite and join: all at once, but for the last one, which ``join_the_last`` lets in."""
        ports = free_ports(2 * nodes)
        for index in range(nodes):
            self.agents.append(self._agent(f"n{index:02}", ports[2 * index], ports[2 * index + 1]))
        first, *others = self.agents
        command("init", "--config", str(first.config))
        first.start()
        self.wait("the first agent answers", STARTED_S, first.answers)
        tokens = [json.loads(command("invite", "--json", "--config", str(first.config)))["token"] for _ in others]
        self._token = tokens.pop() if tokens else ""
        with ThreadPoolExecutor(max_workers=2) as pool:
            joins = [
                pool.submit(join_patiently, agent.config, token) for agent, token in zip(others, tokens, strict=False)
            ]
            for agent, join in zip(others, joins, strict=False):
                join.result()
                agent.start()
        for agent in others[:-1]:
            self.wait(f"{agent.name} answers", STARTED_S, agent.answers)
        self.formed_s = time.monotonic()

    def start_to_settled_s(self, limit_s: float) -> float:
        """Seconds from the last answer to all that run having settled: they started within the same minute."""
        self._wait_until_settled(self.agents[:-1], limit_s)
        return time.monotonic() - self.formed_s

    def join_to_settled_s(self, limit_s: float) -> float:
        """One more joins the mesh at rest; seconds from its ``join`` to every agent seeing every other settled."""
        last = self.agents[-1]
        join_patiently(last.config, self._token)
        self.joined_s = time.monotonic()
        last.start()
        self._wait_until_settled(self.agents, limit_s)
        return time.monotonic() - self.joined_s

    def _wait_until_settled(self, agents: list[IdleAgent], limit_s: float) -> None:
        """Every one itself sees every other alive over a settled link.

        Each is asked until it has settled, and not again: asking costs as much as what is measured.
        """
        for agent in reversed(agents):
            self.wait(
                f"{agent.name} has settled", limit_s,
                lambda agent=agent: agent.answers() and agent.settled_peers() == len(agents) - 1,
            )  # fmt: skip

    def wait(self, what: str, limit_s: float, condition: Callable[[], bool]) -> None:
        ends = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < ends, f"{what}: not within {limit_s:.0f} s"
            time.sleep(0.5)

    def stop(self) -> None:
        running = [agent.process for agent in self.agents if agent.process is not None]
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        ends = time.monotonic() + 10
        for process in running:
            try:
                process.wait(max(0.1, ends - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _agent(self, name: str, port: int, api_port: int) -> IdleAgent:
        directory = self.root / name
        directory.mkdir(mode=0o700)
        config = directory / "stagemesh.toml"
        # One machine has one cache: the first agent measures it, and keeps the figures however busy the machine was.
        config.write_text(
            f"""
            [node]
            name = "{name}"
            state_dir = "{directory / "state"}"
            cache_dir = "{self.root / "cache"}"
            [listen]
            host = "127.0.0.1"
            port = {port}
            [api]
            port = {api_port}
            [probe]
            busy_load_milli = 1000000
            [log]
            format = "json"
            """,
            "utf-8",
        )
        return IdleAgent(name, config, directory / "agent.log", f"127.0.0.1:{api_port}")


@contextlib.contextmanager
def idle_mesh(root: Path, nodes: int) -> Iterator[IdleMesh]:
    """A mesh of ``nodes`` agents; all are stopped on leaving."""
    mesh = IdleMesh(root)
    try:
        mesh.form(nodes)
        yield mesh
    finally:
        mesh.stop()


def join_patiently(config: Path, token: str) -> None:
    """A machine on which 32 agents start at once may not answer a newcomer within 3 s: it would try again, too."""
    for attempt in range(JOIN_TRIES):
        try:
            command("join", "-", "--config", str(config), stdin=token)
        except AssertionError:
            if attempt == JOIN_TRIES - 1:
                raise
        else:
            return


def command(*arguments: str, stdin: str = "") -> str:
    """Run one ``stagemesh`` command; its standard output."""
    done = subprocess.run(
        [sys.executable, "-m", "stage_agent", *arguments],
        input=stdin, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout
