"""Membership detection, election, planning, loading and activation together, with the default settings."""

import itertools
import json
import statistics
import time
from pathlib import Path

import pytest

from coordinator.assignment.moment import ServedModelSpec
from coordinator.model.package import Layer, ModelPackage
from protocol.ids import Slot
from tests.simulation.ballot_whole_mesh import WholeMesh

GIB = 2**30
EACH = 10 * GIB // 8
MODEL = ModelPackage("m", "d" * 64, tuple(Layer(EACH, EACH, 64) for _ in range(8)), 0, 0, 4096, 8192)
RESULTS = Path(__file__).parents[1] / "bench" / "results"


def started(seed: int, nodes: int = 5) -> WholeMesh:
    mesh = WholeMesh(nodes, seed, 8 * GIB, (ServedModelSpec(Slot("default"), "/m", MODEL),))
    mesh.start_all()
    assert mesh.run_until(lambda: bool(mesh.serving()), 60) is not None, "no plan within a minute"
    mesh.run(15)
    return mesh


def number_of(mesh: WholeMesh, node_id: str) -> int:
    return mesh.ids.index(node_id)


def lose_a_stage(seed: int) -> float:
    mesh = started(seed)
    chief = mesh.chiefs()[0].name
    victim = next(node_id for node_id in mesh.serving() if node_id != chief)
    mesh.crash(number_of(mesh, victim))
    seconds = mesh.run_until(lambda: bool(mesh.serving()) and victim not in mesh.serving(), 60)
    assert seconds is not None, f"seed {seed}: no plan without {victim}"
    return seconds


def test_losing_a_stage_costs_at_most_twenty_seconds_detection_included():
    assert statistics.median(lose_a_stage(seed) for seed in range(3)) <= 20


def test_losing_the_coordinator_that_runs_a_stage_is_healed_by_another():
    meshes = (started(seed) for seed in range(7, 30))
    mesh = next(mesh for mesh in meshes if mesh.chiefs()[0].name in mesh.serving())
    chief = mesh.chiefs()[0].name
    mesh.crash(number_of(mesh, chief))
    seconds = mesh.run_until(lambda: bool(mesh.serving()) and chief not in mesh.serving(), 60)
    assert seconds is not None
    assert seconds <= 25


def test_a_rolling_restart_ends_with_one_coordinator_and_one_plan():
    mesh = started(3, nodes=4)
    for number in mesh.numbers:
        mesh.crash(number)
        mesh.run(4)
        mesh.start(number)
        mesh.run(30)
    assert mesh.run_until(lambda: bool(mesh.serving()), 90) is not None
    assert len(mesh.chiefs()) == 1


@pytest.mark.bench
def test_time_to_a_serving_plan_after_losing_a_stage():
    seconds = sorted(lose_a_stage(seed) for seed in range(20))
    row = {"what": "virtual seconds to a serving plan after losing a stage", "median": statistics.median(seconds)}
    row |= {"max": seconds[-1], "runs": len(seconds), "load_s": 3}
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / "recovery.jsonl").open("a") as results:
        results.write(json.dumps(row) + "\n")
    print(row)
    assert row["median"] <= 20


def test_an_hours_jump_of_the_wall_clock_changes_no_decision(monkeypatch):
    """Every reading of it is an hour off the last one, back and forth; the disk, the row and the plan do not care."""

    def story() -> list[tuple]:
        mesh = started(11, nodes=4)
        victim = next(node_id for node_id in mesh.serving() if node_id != mesh.chiefs()[0].name)
        mesh.crash(number_of(mesh, victim))
        mesh.run(40)
        return [(at_us, who, decision) for at_us, who, decision in mesh.decisions]

    steady = story()
    jumps = itertools.cycle((3_600, -3_600))
    now, now_ns = time.time, time.time_ns  # noqa: TID251 what is made to jump
    monkeypatch.setattr(time, "time", lambda: now() + next(jumps))
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() + next(jumps) * 10**9)
    assert story() == steady
    assert [decision.kind for *_, decision in steady][-1] == "activated"
