"""What a mesh that does nothing costs: real processes on loopback, made by ``init``, ``invite`` and ``join``.

Bars for 32 agents on two cores: 25 % of one core in all, 60 MB each, 12 s from a join to all pairs settled.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.bench.idle_mesh import IdleAgent, IdleMesh, idle_mesh

RESULTS = Path(__file__).parent / "results" / "idle.jsonl"
WINDOW_S = 60.0
REST_S = 30.0
"""After the links have settled: rows that say so are still on their way."""
SETTLE_LIMIT_S = 180.0
RSS_MAX_MB = 85
"""28 MB of it are libraries that every agent of a machine maps: ``pss`` counts them once, and is what the bar is held to."""

pytestmark = [pytest.mark.bench, pytest.mark.timeout(1_800)]


def record(case: str, **figures: Any) -> dict[str, Any]:
    line = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),  # noqa: TID251 a date for readers
        "case": case,
        **figures,
        "load_average": round(os.getloadavg()[0], 1),
        "cores": len(os.sched_getaffinity(0)),
        "python": sys.version.split()[0],
    }
    with RESULTS.open("a", encoding="utf-8") as results:
        results.write(json.dumps(line) + "\n")
    print(line)
    return line


def machine_busy_s() -> float:
    """Processor time of the whole machine that was not idle: how much others did while we measured."""
    fields = Path("/proc/stat").read_text("ascii").splitlines()[0].split()[1:9]
    return (sum(map(int, fields)) - int(fields[3]) - int(fields[4])) / os.sysconf("SC_CLK_TCK")


def memory(agents: list[IdleAgent]) -> dict[str, float]:
    """Megabytes (10⁶ bytes): mean and worst resident, proportional and peak memory."""
    seen = [agent.memory_kib() for agent in agents]
    figures = {}
    for name, key in (("rss", "Rss"), ("pss", "Pss"), ("anonymous", "Anonymous"), ("peak", "VmHWM")):
        values = [each[key] * 1_024 / 1e6 for each in seen]
        figures |= {f"{name}_mb": round(statistics.mean(values), 1), f"{name}_worst_mb": round(max(values), 1)}
    return figures


@contextlib.contextmanager
def traffic(agents: list[IdleAgent], figures: dict[str, float]) -> Iterator[None]:
    """Adds what one agent said and heard per second; asked outside the time that is measured."""
    before, start_s = [agent.traffic() for agent in agents], time.monotonic()
    yield
    took_s = time.monotonic() - start_s
    after = [agent.traffic() for agent in agents]
    for key in after[0]:
        rates = [(b[key] - a.get(key, 0.0)) / took_s for a, b in zip(before, after, strict=True)]
        figures[f"{key.replace(' ', '_')}_per_node_per_s"] = round(statistics.mean(rates), 2)


def idle_cpu(mesh: IdleMesh) -> dict[str, float]:
    """Percent of one core over ``WINDOW_S`` in which nobody asks anything."""
    time.sleep(2)
    before, busy_s, start_s = [agent.cpu_s() for agent in mesh.agents], machine_busy_s(), time.monotonic()
    time.sleep(WINDOW_S)
    took_s = time.monotonic() - start_s
    shares = [100 * (agent.cpu_s() - spent) / took_s for agent, spent in zip(mesh.agents, before, strict=True)]
    others_s = machine_busy_s() - busy_s - sum(shares) * took_s / 100
    return {
        "cpu_percent_of_a_core": round(sum(shares), 1),
        "cpu_percent_each": round(statistics.mean(shares), 2),
        "cpu_percent_worst": round(max(shares), 2),
        "others_percent_of_a_core": round(100 * others_s / took_s, 0),
        "window_s": round(took_s, 1),
    }


@pytest.mark.parametrize("nodes", [1, 3, 8, 32])
def test_an_idle_mesh_costs_little_and_settles_in_seconds(tmp_path: Path, nodes: int) -> None:
    with idle_mesh(tmp_path, nodes) as mesh:
        started_s = mesh.start_to_settled_s(SETTLE_LIMIT_S) if nodes > 1 else 0.0
        settled_s = mesh.join_to_settled_s(SETTLE_LIMIT_S) if nodes > 1 else 0.0
        time.sleep(REST_S)
        rates: dict[str, float] = {}
        with traffic(mesh.agents, rates):
            cpu = idle_cpu(mesh)
        line = record(
            f"{nodes} idle agents",
            join_to_settled_s=round(settled_s, 1),
            start_to_settled_s=round(started_s, 1),
            **cpu,
            **memory(mesh.agents),
            **rates,
        )
    if nodes == 32:
        assert line["cpu_percent_of_a_core"] <= 25
    assert line["pss_worst_mb"] <= 60
    assert line["rss_worst_mb"] <= RSS_MAX_MB
    assert settled_s <= 12


def test_commands_and_the_daemon_start_quickly(tmp_path: Path) -> None:
    with idle_mesh(tmp_path, 1) as mesh:
        (agent,) = mesh.agents
        warm = [_started(agent) for _ in range(5)]
    seconds = [_run("--help") for _ in range(5)]
    figures = {
        name: round(statistics.median(values), 2)
        for name, values in (
            ("help_s", [wall for wall, _ in seconds]),
            ("help_cpu_s", [cpu for _, cpu in seconds]),
            ("run_to_answering_s", [wall for wall, _ in warm]),
            ("run_to_answering_cpu_s", [cpu for _, cpu in warm]),
        )
    }
    record("start", **figures)
    assert figures["help_cpu_s"] <= 2
    assert figures["run_to_answering_cpu_s"] <= 2.5


def _run(*arguments: str) -> tuple[float, float]:
    before, start_s = os.times(), time.monotonic()
    subprocess.run([sys.executable, "-m", "stage_agent", *arguments], check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    spent_s = after.children_user + after.children_system - before.children_user - before.children_system
    return time.monotonic() - start_s, spent_s


def _started(agent: IdleAgent) -> tuple[float, float]:
    """A restart, the benchmark's figures being kept: wall and processor seconds until the API answers."""
    assert agent.process is not None
    agent.process.terminate()
    agent.process.wait(20)
    start_s = time.monotonic()
    agent.start()
    while not agent.answers():
        time.sleep(0.02)
    return time.monotonic() - start_s, agent.cpu_s()
