"""What coordination costs and how fast a plan reaches its stages, with real cores and the real codec on virtual time.

A node is what the daemon is made of: membership, links, coordinator, agent. The network is simulated with the delays of a
LAN (0.5–0.7 ms each way), a durable write takes 0.5 ms, loading takes none, so that a push is what messages and writes cost.
CPU is of the whole simulation, its network included: an upper bound for what the agents themselves need.
"""

import gc
import json
import os
import statistics
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import pytest

from coordinator.assignment.moment import ServedModelSpec
from coordinator.model.package import Layer, ModelPackage
from protocol.ids import Slot
from tests.simulation.ballot_whole_mesh import WholeMesh, WholePort
from tests.simulation.membership_measures import totals
from tests.simulation.membership_mesh import SECOND

RESULTS = Path(__file__).parent / "results" / "coordination.jsonl"
GIB = 2**30
MEMORY = 8 * GIB
LOSS_EVERY_S = 600
BACK_AFTER_S = 120

pytestmark = [pytest.mark.bench, pytest.mark.timeout(7_200)]


def record(case: str, **figures: Any) -> None:
    line = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),  # noqa: TID251 a date for readers
        "case": case,
        **figures,
        "load_average": round(os.getloadavg()[0], 1),
    }
    with RESULTS.open("a", encoding="utf-8") as results:
        results.write(json.dumps(line) + "\n")
    print(line)


def model(stages: int, name: str = "m") -> ServedModelSpec:
    """One that needs so many nodes of ``MEMORY`` each: two layers a node."""
    each = MEMORY * 4 // 10
    digest = f"{sum(name.encode()):064x}"
    return ServedModelSpec(
        Slot("default"),
        "/m",
        ModelPackage(name, digest, tuple(Layer(each, each, 64) for _ in range(2 * stages)), 0, 0, 4096, 8192),
    )


def serving_mesh(nodes: int, stages: int) -> WholeMesh:
    """Joined over a while, one plan active."""
    mesh = WholeMesh(nodes, nodes, MEMORY, (model(stages),), checked=False)
    mesh.load_us = mesh.unload_us = 0
    for number in mesh.numbers:
        at_us = mesh.network.now_us + number * 20 * SECOND // nodes
        mesh.network.at(at_us, lambda number=number: mesh.start(number))
    assert mesh.run_until(lambda: bool(mesh.serving()), 240, step=1.0) is not None, "no plan within four minutes"
    mesh.run(30)
    return mesh


def pushes_s(mesh: WholeMesh) -> list[float]:
    """Decision to ``every stage serves``, of every plan that was activated."""
    begun: dict[str, int] = {}
    taken = []
    for at_us, _, decision in mesh.decisions:
        if decision.kind == "planned":
            begun[decision.new_plan] = at_us
        elif decision.kind == "activated":
            taken.append((at_us - begun[decision.new_plan]) / SECOND)
    return taken


@pytest.mark.parametrize(("nodes", "stages"), [(3, 3), (10, 10), (100, 32)])
def test_a_plan_reaches_its_stages_within_a_second(nodes: int, stages: int) -> None:
    mesh = serving_mesh(nodes, stages)
    for turn in range(20):
        mesh.specs = (model(stages, f"turn {turn}"),)
        before = len(pushes_s(mesh))
        for port in mesh.ports.values():
            assert isinstance(port, WholePort)
            port.carry(port.coordinator.serve(mesh.specs, port.now_us))
        assert mesh.run_until(lambda before=before: len(pushes_s(mesh)) > before, 120, step=0.5) is not None
        mesh.run(12)
    taken = sorted(pushes_s(mesh))
    kinds = Counter(decision.kind for _, _, decision in mesh.decisions)
    record(
        f"plan push, {nodes} agents, {stages} stages",
        plans=len(taken),
        p50_ms=round(statistics.median(taken) * 1000, 1),
        max_ms=round(taken[-1] * 1000, 1),
        failed=kinds["attempt_failed"],
    )
    assert statistics.median(taken) <= 1.0


@pytest.mark.parametrize(("nodes", "stages", "seconds"), [(10, 5, 1_200), (100, 16, 3_600)])
def test_what_agents_cost_while_they_serve_and_lose_a_node_every_ten_minutes(
    nodes: int, stages: int, seconds: int
) -> None:
    mesh = serving_mesh(nodes, stages)
    random, losses, recovered_s = Random(1), 0, []
    before, events = totals(mesh), mesh.network.events
    gc.disable()
    begun_s = time.process_time()
    for turn in range(seconds // LOSS_EVERY_S):
        mesh.run(LOSS_EVERY_S / 2)
        serves = mesh.serving()
        assert serves
        chief = mesh.chiefs()[0].name
        victims = [each for each in (serves if turn % 2 == 0 else mesh.ids) if each != chief]
        victim = random.choice(victims)
        number = mesh.ids.index(victim)
        mesh.crash(number)
        losses += 1
        left_s = LOSS_EVERY_S / 2 - BACK_AFTER_S
        if victim in serves:
            took_s = mesh.run_until(
                lambda victim=victim: mesh.serving() and victim not in mesh.serving(), 100, step=0.5
            )
            assert took_s is not None
            recovered_s.append(took_s)
            left_s -= took_s
        mesh.run(BACK_AFTER_S)
        mesh.start(number)
        mesh.run(left_s)
    cpu_s = time.process_time() - begun_s
    gc.enable()
    datagrams, datagram_bytes, stream_messages, stream_bytes = (
        new - old for new, old in zip(totals(mesh), before, strict=True)
    )
    kinds = Counter(decision.kind for _, _, decision in mesh.decisions)
    agent_seconds = nodes * seconds
    record(
        f"control plane, {nodes} agents, a node lost every ten minutes",
        simulated_s=seconds,
        cpu_s_per_agent_hour=round(cpu_s * 3600 / agent_seconds, 2),
        messages_per_agent_s=round((datagrams + stream_messages) / agent_seconds, 2),
        bytes_per_agent_s=round((datagram_bytes + stream_bytes) / agent_seconds),
        stream_bytes_per_agent_s=round(stream_bytes / agent_seconds),
        losses=losses,
        plans=kinds["activated"],
        attempts_failed=kinds["attempt_failed"],
        recovery_p50_s=statistics.median(recovered_s) if recovered_s else None,
        recovery_max_s=max(recovered_s, default=None),
        events=mesh.network.events - events,
        cpu_s=round(cpu_s, 1),
    )
    assert mesh.serving()
    assert statistics.median(recovered_s) <= 20, "a lost stage is replaced, not withdrawn after the grace"
