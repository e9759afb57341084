"""How long a hundred thousand requests take, and why the core is not written on simpy."""

import json
import random
import resource
import time
from pathlib import Path

import pytest
import simpy

from coordinator.simulator.execution import simulate
from coordinator.simulator.outcome import Outcome
from tests.unit.simulator.scenarios import read

RESULTS = Path(__file__).parent / "results" / "simulator.jsonl"

FOUR_STAGES = """
[nodes.a]
vram_bytes = 12000000000
sustained_mem_bandwidth_mib_per_s = 800000
[nodes.b]
vram_bytes = 12000000000
sustained_mem_bandwidth_mib_per_s = 700000
[nodes.c]
vram_bytes = 12000000000
sustained_mem_bandwidth_mib_per_s = 600000
[nodes.d]
vram_bytes = 12000000000
sustained_mem_bandwidth_mib_per_s = 500000
[model]
layer_count = 40
weight_bytes_per_layer = 1000000000
kv_bytes_per_token = 40960
native_context_length = 4096
activation_frame_bytes = 8192
[locked]
stages = [
    { node = "a", layer_start = 0, layer_end = 10 },
    { node = "b", layer_start = 10, layer_end = 20 },
    { node = "c", layer_start = 20, layer_end = 30 },
    { node = "d", layer_start = 30, layer_end = 40 },
]
[workload]
parallel_lanes = 4
requests = 100000
"""

LINKS = "".join(f'[links."{a} -> {b}"]\nrtt_ms = 0.5\n' for a in "abcd" for b in "abcd" if a != b)


def record(**figures: object) -> None:
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(figures) + "\n")


@pytest.mark.bench
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "traffic",
    [
        "concurrency = 4",
        "concurrency = 16",
        'arrivals = "poisson"\nrate_per_s = 0.28',
        'arrivals = "burst"\nburst_size = 9\nburst_every_s = 60',
    ],
)
def test_a_hundred_thousand_requests_on_four_stages(traffic: str) -> None:
    scenario = read(FOUR_STAGES + traffic + "\n" + LINKS)
    began, cpu = time.perf_counter(), time.process_time()
    outcome = simulate(scenario, seed=1)
    wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    assert isinstance(outcome, Outcome)
    assert outcome.completed == 100_000
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1_024
    record(
        case="requests_100k",
        traffic=traffic,
        tokens=outcome.tokens,
        wall_s=round(wall_s, 2),
        cpu_s=round(cpu_s, 2),
        peak_rss_mb=round(peak_mb),
    )
    print(f"{traffic!r}: {outcome.tokens:,} tokens in {wall_s:.1f} s ({cpu_s:.1f} s CPU), {peak_mb:.0f} MB")
    assert cpu_s <= 30
    assert peak_mb <= 500


@pytest.mark.bench
def test_simpy_on_a_thousandth_of_it() -> None:
    """One process per request, four resources: the obvious way to write it."""
    requests, tokens, hold_us = 100, 128, (12_000, 13_000, 14_000, 15_000)
    world = simpy.Environment()
    lanes = simpy.Resource(world, 4)
    stages = [simpy.Resource(world, 1) for _ in hold_us]
    done = 0

    def request(start_us: int):
        nonlocal done
        yield world.timeout(start_us)
        with lanes.request() as lane:
            yield lane
            for _ in range(tokens):
                for stage, hold in zip(stages, hold_us, strict=True):
                    with stage.request() as turn:
                        yield turn
                        yield world.timeout(hold)
                done += 1

    rng = random.Random(1)
    for _ in range(requests):
        world.process(request(rng.randrange(10**8)))
    began = time.process_time()
    world.run()
    cpu_s = time.process_time() - began
    assert done == requests * tokens
    record(case="simpy", requests=requests, tokens=done, cpu_s=round(cpu_s, 3), cpu_s_for_100k=round(cpu_s * 1_000))
    print(f"simpy: {done:,} tokens in {cpu_s:.2f} s CPU, {cpu_s * 1000:,.0f} s for 100 000 requests")
