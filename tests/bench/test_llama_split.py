"""Closed loop with a real engine: three workers of really different speed over shaped links, three ways to split, one run.

Three nodes with the mesh's own transports and tunnels; the conditioner shapes their links. A worker's speed is its CPU quota
(a cgroup: root on Linux; skipped elsewhere), enforced every 2 or 4 ms, so that it is slow also when it works in short bursts.
These groups go before all others, and nothing is measured or written while the quotas do not hold: on a machine so busy
that every process gets a quarter of a core, all workers are equally fast.
First some plans run as they would live, and their times per token are fitted (``fit_live``: what `stagemesh calibrate live`
does). The planner splits with what that says, beside the split by memory and the equal one. Then all three serve at once
and are asked in turn, in rotating order, after a warm-up. Memory is pretended so that no worker can take all layers, and
the slowest has the most. Needs `make engine`.
"""

import asyncio
import contextlib
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest

from config.load import calibration_text
from coordinator.exporters.layer_split import output_override, split_flags
from coordinator.model.package import ModelPackage
from coordinator.planner.memory import Shape, ShapeMemory
from coordinator.planner.plan import Plan
from coordinator.planner.planning import plan
from coordinator.planner.problem import (
    Calibration,
    Edge,
    LockedStage,
    LockedTopology,
    Participant,
    PlanningProblem,
    PlanRequest,
)
from coordinator.planner.readout import as_placed
from coordinator.simulator.live_runs import LiveFit, LiveRun, fit_live
from coordinator.simulator.profiles import parse_profile
from stage_agent.addresses import free_ports
from stage_agent.cli.live_run import live_run
from stage_agent.model_source import open_model
from stage_agent.tunnel.tunnels import Door, Tunnels
from tests.e2e.real_engine import real_model, real_programs
from tests.integration.test_transport_shaped import echo_times
from tests.integration.transport_mesh import Node, mesh, run, running

pytestmark = [pytest.mark.bench, pytest.mark.timeout(900)]
RESULTS = Path(__file__).parent / "results" / "llama_split.jsonl"
CGROUP = Path("/sys/fs/cgroup/cpu")
NAMES = ("fast", "middle", "slow")
QUOTA_US = {"fast": (-1, 4_000), "middle": (2_000, 4_000), "slow": (1_000, 4_000)}
"""CPU time per period; -1 = all. The heads and this process run like ``fast``."""
CPU_SHARE = {name: quota_us / period_us if quota_us > 0 else 1.0 for name, (quota_us, period_us) in QUOTA_US.items()}
SHARE_TOLERANCE, SPREAD_MAX = 0.2, 0.15
"""Beyond these nothing is compared: quotas that do not hold, and hops that wait for a turn, hide what is measured."""
DELAY_MS = {("fast", "middle"): 1, ("fast", "slow"): 3, ("middle", "slow"): 3}
ROOM = {"fast": (0, 12), "middle": (10, 24), "slow": (4, 30)}
"""Each has room for exactly these layers, shared parts included."""
TRIED = ((30, 0, 0), (15, 15, 0), (15, 0, 15), (22, 8, 0), (22, 0, 8), (10, 10, 10), (6, 8, 16))
"""Plans whose times per token calibrate: the split by memory and the equal one are among them, the planner's is not."""
TOKENS, WARM_UP_TOKENS, TRIED_ROUNDS, ROUNDS, CONTEXT = 48, 16, 3, 9, 2_048
BANDWIDTH_BYTES_PER_S = 3_000_000_000
"""Of every worker, as a benchmark on the unthrottled machine would say: that the quotas differ must be learnt."""


class TooBusyError(Exception):
    """What was measured is the machine's other work."""


@pytest.fixture
def groups() -> Iterator[dict[str, Path]]:
    """A CPU quota per name; this process is in the fast one's. Only version 1: the unified controller is seldom delegated."""
    made: dict[str, Path] = {}
    try:
        for name, (quota_us, period_us) in QUOTA_US.items():
            group = CGROUP / f"stagemesh-bench-{os.getpid()}-{name}"
            group.mkdir()
            made[name] = group
            (group / "cpu.cfs_period_us").write_text(str(period_us))
            (group / "cpu.cfs_quota_us").write_text(str(quota_us))
            (group / "cpu.shares").write_text("262144")
        (made["fast"] / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as error:
        pytest.skip(f"CPU quotas need a writable cgroup in {CGROUP}: {error.strerror}")
    else:
        yield made
    finally:
        (CGROUP / "cgroup.procs").write_text(str(os.getpid()))
        for group in made.values():
            group.rmdir()


def cpu_share(name: str, groups: dict[str, Path]) -> float:
    """What a busy process of this name's speed gets of a core, over half a second."""
    code = (
        "import sys, time; sys.stdin.read(1); a, c = time.monotonic(), time.process_time()\n"
        "while time.monotonic() < a + 0.5: pass\n"
        "print((time.process_time() - c) / (time.monotonic() - a))"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", code], **pipes, text=True)
    (groups[name] / "cgroup.procs").write_text(str(process.pid))
    return float(process.communicate("x", timeout=60)[0])


@dataclass
class Bench:
    """The nodes, and what is needed to start an engine on them."""

    nodes: dict[str, Node]
    tunnels: dict[str, Tunnels]
    groups: dict[str, Path]
    programs: dict[str, str]
    model: Path
    tasks: asyncio.TaskGroup
    seconds: dict[str, float]
    """What each part of the run took."""
    rtt_us: dict[tuple[str, str], int]


@contextlib.contextmanager
def timed(bench: Bench, part: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    bench.seconds[part] = round(time.monotonic() - began, 1)


class Serving:
    """One way to split, with its own workers and head."""

    def __init__(self, counts: dict[str, int], url: str) -> None:
        self.counts = counts
        self._url = url

    async def tpot_us(self, tokens: int = TOKENS) -> float:
        """llama-server's own time per token of one answer."""
        body = {
            "prompt": "Once upon a time",
            "n_predict": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": False,
        }
        async with httpx.AsyncClient(trust_env=False, timeout=120) as client:
            answer = await client.post(f"{self._url}/completion", json=body)
        return answer.json()["timings"]["predicted_per_token_ms"] * 1e3


@contextlib.asynccontextmanager
async def serving(bench: Bench, counts: dict[str, int]) -> AsyncIterator[Serving]:
    counts = {name: count for name, count in counts.items() if count}
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    async with contextlib.AsyncExitStack() as stack:

        def start(*command: str) -> subprocess.Popen:
            process = subprocess.Popen(command, **quiet)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        ports = free_ports(len(counts) + 1)
        endpoints, workers = [], []
        for name, port in zip(counts, ports[1:], strict=True):
            command = (bench.programs["llama_rpc_server"], "-H", "127.0.0.1", "-p", str(port), "-t", "1", "-d", "CPU")
            worker = start(*command)
            workers.append((name, worker.pid))
            if name == "fast":
                endpoints.append(f"127.0.0.1:{port}")
                continue
            door = f"rpc/{port}"
            bench.tunnels[name].open_door(door, Door(port))
            listener = await bench.tunnels["fast"].listen(bench.nodes[name].id, door, bench.tasks)
            stack.push_async_callback(listener.close)
            endpoints.append(f"127.0.0.1:{listener.port}")
        await asyncio.sleep(0.3)
        devices = ",".join(f"RPC{index}" for index in range(len(counts)))
        head = start(
            bench.programs["llama_server"], "-m", str(bench.model), "--port", str(ports[0]), "-c", str(CONTEXT), "-np", "1",
            "--rpc", ",".join(endpoints), "--device", devices, *split_flags(list(counts.values())).arguments(), "-t", "1",
            "-fit", "off", "--no-repack", "--no-warmup", "--offline", "-ot", output_override(tied_embeddings=True),
            "-fa", "off",  # on, the engine asks every remote layer for a size whenever its graph changes: a round trip each
        )  # fmt: skip
        url = f"http://127.0.0.1:{ports[0]}"
        async with httpx.AsyncClient(trust_env=False) as client, asyncio.timeout(180):
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.get(f"{url}/health")).status_code == 200:
                        break
                assert head.poll() is None, "llama-server ended while it loaded"
                await asyncio.sleep(0.1)
        for name, pid in workers:  # by now, so that throttled workers take their weights as fast as any
            (bench.groups[name] / "cgroup.procs").write_text(str(pid))
        found = Serving(counts, url)
        await found.tpot_us(WARM_UP_TOKENS)
        yield found


async def all_serving(stack: contextlib.AsyncExitStack, bench: Bench, splits: list[dict[str, int]]) -> list[Serving]:
    """All side by side, loaded at the same time."""
    return await asyncio.gather(*(stack.enter_async_context(serving(bench, split)) for split in splits))


def links_text(delays_ms: dict[tuple[str, str], float]) -> str:
    pairs = {**delays_ms, **{(b, a): delay for (a, b), delay in delays_ms.items()}}
    return "".join(f'[links."{a} -> {b}"]\ndelay_ms = {delay}\n' for (a, b), delay in pairs.items())


@contextlib.asynccontextmanager
async def shaped(groups: dict[str, Path], tmp_path: Path) -> AsyncIterator[Bench]:
    file = tmp_path / "links.toml"
    file.write_text(links_text(DELAY_MS))
    nodes = dict(zip(NAMES, mesh(*NAMES, shapes=file), strict=True))
    async with running(*nodes.values()), asyncio.TaskGroup() as tasks:
        rtt_us = {}
        for a, b in itertools.combinations(NAMES, 2):
            await nodes[a].meet(nodes[b])
            rtt_us[a, b] = rtt_us[b, a] = round(1_000 * min(await echo_times(nodes[a], nodes[b], 20)))
        tunnels = {}
        for name, node in nodes.items():
            tunnels[name] = Tunnels(node.transport)

            async def serve(peer, _kind, header, reader, writer, own=tunnels[name]):
                await own.serve(peer, header, reader, writer)

            node.transport.on_bulk = serve
        yield Bench(nodes, tunnels, groups, real_programs(), real_model(), tasks, {}, rtt_us)


def question(
    found: ModelPackage, bench: Bench, calibration: Calibration, slowness: dict[str, float]
) -> PlanningProblem:
    """The planner's input; every node is taken for equally fast where nothing is known of it."""
    memory = ShapeMemory(found, Shape(CONTEXT, 1), "per_lane")
    participants = tuple(
        Participant(
            name, memory.required(*ROOM[name]), runtime_headroom_bytes=0,
            memory_bandwidth_bytes_per_s=round(BANDWIDTH_BYTES_PER_S / slowness.get(name, 1.0)),
        )
        for name in NAMES
    )  # fmt: skip
    edges = tuple(Edge(a, b, rtt_us) for (a, b), rtt_us in bench.rtt_us.items())
    request = PlanRequest(context_length=CONTEXT, parallel_lanes=1, pin_stage0="fast")
    return PlanningProblem(found, participants, edges, calibration, request)


def priced(problem: PlanningProblem, counts: dict[str, int]) -> Plan:
    """What the planner says of exactly this split, whatever it has room for."""
    stages, first = [], 0
    for name, count in counts.items():
        if count:
            stages.append(LockedStage(name, first, first + count))
            first += count
    roomy = tuple(replace(each, detected_memory_bytes=2**40) for each in problem.participants)
    locked = replace(problem.request, locked=LockedTopology(tuple(stages)), pin_stage0=None)
    answer = plan(replace(problem, participants=roomy, request=locked))
    assert isinstance(answer, Plan), answer
    return answer


async def calibrated(bench: Bench, problem: PlanningProblem) -> tuple[tuple[LiveRun, ...], LiveFit]:
    """Run the tried plans side by side, in turn, and fit."""
    names = {name: name for name in NAMES}
    times: dict[tuple[int, ...], list[float]] = {tried: [] for tried in TRIED}
    async with contextlib.AsyncExitStack() as stack:
        with timed(bench, "load what is tried"):
            ways = dict(
                zip(
                    TRIED,
                    await all_serving(stack, bench, [dict(zip(NAMES, tried, strict=True)) for tried in TRIED]),
                    strict=True,
                )
            )
        with timed(bench, "calibrate"):
            for _ in range(TRIED_ROUNDS):
                for tried, way in ways.items():
                    times[tried].append(await way.tpot_us())
    spreads = {tried: round((max(found) - min(found)) / statistics.median(found), 2) for tried, found in times.items()}
    if statistics.median(spreads.values()) > SPREAD_MAX:
        raise TooBusyError(f"the same plan's times differ by {spreads}")
    runs = tuple(
        live_run(
            priced(problem, dict(zip(NAMES, tried, strict=True))), problem.calibration, names,
            measured_us=round(statistics.median(found)), tokens=TOKENS * TRIED_ROUNDS,
        )
        for tried, found in times.items()
    )  # fmt: skip
    return runs, fit_live(runs, problem.calibration)


async def compared(bench: Bench, splits: dict[str, dict[str, int]]) -> dict[str, list[float]]:
    """Times per token of every way, round by round; each round begins with another way."""
    times: dict[str, list[float]] = {way: [] for way in splits}
    async with contextlib.AsyncExitStack() as stack:
        with timed(bench, "load what is compared"):
            ways = dict(zip(splits, await all_serving(stack, bench, list(splits.values())), strict=True))
        order = list(ways)
        with timed(bench, "compare"):
            for turn in range(ROUNDS):
                for way in order[turn % 3 :] + order[: turn % 3]:
                    times[way].append(await ways[way].tpot_us())
    return times


def quartiles(times: list[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles([1e6 / each for each in times], n=4)
    return {"median": round(median, 2), "q1": round(low, 2), "q3": round(high, 2)}


def test_a_plan_from_live_calibration_beats_splits_by_memory_and_in_equal_parts(groups, tmp_path) -> None:
    line: dict[str, object] = {}
    shares = {name: round(cpu_share(name, groups), 2) for name in NAMES}
    if any(abs(shares[name] / CPU_SHARE[name] - 1) > SHARE_TOLERANCE for name in NAMES):
        pytest.skip(f"the machine is too busy: of a core they get {shares}, the quotas say {CPU_SHARE}")

    async def main() -> None:
        async with shaped(groups, tmp_path) as bench:
            profile = parse_profile("llama-cpp-rpc", calibration_text("llama-cpp-rpc")).calibration
            found = as_placed(open_model(bench.model), profile)
            runs, fit = await calibrated(bench, question(found, bench, profile, {}))
            learnt = replace(
                profile,
                rtt_multiplier_milli=round(1_000 * fit.rtt_multiplier.after),
                per_hop_us=round(fit.per_hop_us.after),
            )
            problem = question(found, bench, learnt, {name: each.after for name, each in fit.slowness.items()})
            answer = plan(problem)
            assert isinstance(answer, Plan), answer
            rooms = {name: last - first for name, (first, last) in ROOM.items()}
            by_memory = {name: found.layer_count * room // sum(rooms.values()) for name, room in rooms.items()}
            by_memory["slow"] += found.layer_count - sum(by_memory.values())
            splits = {
                "plan": {stage.node_id: stage.layer_end - stage.layer_start for stage in answer.stages},
                "memory": by_memory,
                "equal": dict.fromkeys(NAMES, found.layer_count // 3),
            }
            times = await compared(bench, splits)
            predicted = {way: priced(problem, split).modeled.decode_tpot_us or 0 for way, split in splits.items()}
            uncalibrated = priced(question(found, bench, profile, {}), splits["plan"]).modeled.decode_tpot_us
            measured = {way: statistics.median(each) for way, each in times.items()}
            line.update(
                name="llama_split", at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), python=platform.python_version(),
                cpus=os.cpu_count(), load=round(os.getloadavg()[0], 1), rounds=ROUNDS, tokens=TOKENS,
                cpu_share=shares, seconds=bench.seconds,
                rtt_us={f"fast-{name}": bench.rtt_us["fast", name] for name in NAMES[1:]}, splits=splits,
                tokens_per_s={way: quartiles(each) for way, each in times.items()},
                rounds_won_by_plan={
                    way: sum(mine < other for mine, other in zip(times["plan"], times[way], strict=True))
                    for way in ("memory", "equal")
                },
                measured_tpot_us={way: round(each) for way, each in measured.items()}, predicted_tpot_us=predicted,
                prediction_error={way: round(predicted[way] / measured[way] - 1, 3) for way in splits},
                uncalibrated_tpot_us=uncalibrated,
                fitted={
                    **{f"slowness {name}": round(each.after, 2) for name, each in fit.slowness.items()},
                    "rtt_multiplier": round(fit.rtt_multiplier.after, 2), "per_hop_us": round(fit.per_hop_us.after),
                },
                calibration_runs={str(tried): [run.measured_us, round(error, 3)]
                                  for tried, (run, _, error) in zip(TRIED, fit.errors, strict=True)},
            )  # fmt: skip
            assert len(runs) == len(TRIED)

    try:
        run(main())
    except* TooBusyError as busy:
        pytest.skip(f"the machine is too busy: {busy.exceptions}")
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(f"\n{json.dumps(line, indent=1)}")
    for way in ("memory", "equal"):
        assert line["tokens_per_s"]["plan"]["median"] > line["tokens_per_s"][way]["median"]
        assert line["rounds_won_by_plan"][way] >= 0.8 * ROUNDS


HOP_DELAYS_MS = (0, 2.5, 10, 20)
HOP_TOKENS, HOP_ROUNDS = 24, 5


def test_round_trips_and_time_per_hop_of_the_engine_through_the_tunnel(groups, tmp_path) -> None:
    """Unthrottled workers, one remote stage: the slope of time per token over the round trip, and what is left at none."""
    line: dict[str, object] = {}

    async def main() -> None:
        unthrottled = dict.fromkeys(NAMES, groups["fast"])
        async with shaped(unthrottled, tmp_path) as bench, serving(bench, {"fast": 30}) as alone:
            solo_us = statistics.median([await alone.tpot_us(HOP_TOKENS) for _ in range(HOP_ROUNDS)])
            points = []
            async with serving(bench, {"fast": 15, "middle": 15}) as split:
                for delay in HOP_DELAYS_MS:
                    (tmp_path / "links.toml").write_text(links_text({**DELAY_MS, ("fast", "middle"): delay}))
                    await asyncio.sleep(3)  # the transports look at the file every second
                    rtt_us = 1_000 * min(await echo_times(bench.nodes["fast"], bench.nodes["middle"], 10))
                    assert rtt_us >= 2_000 * delay
                    times = [await split.tpot_us(HOP_TOKENS) for _ in range(HOP_ROUNDS)]
                    points.append((round(rtt_us), round(statistics.median(times))))
            slope, left_us = statistics.linear_regression(*zip(*points, strict=True))
            line.update(
                name="llama_hop", at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), load=round(os.getloadavg()[0], 1),
                solo_tpot_us=round(solo_us), rtt_and_tpot_us=points, rtt_multiplier=round(slope, 2),
                per_hop_us=round(left_us - solo_us),
            )  # fmt: skip

    run(main())
    with RESULTS.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(f"\n{line}")
    assert 0.8 < line["rtt_multiplier"] < 1.4
