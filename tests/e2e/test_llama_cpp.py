"""A real llama.cpp over a real mesh: three agents split a real model 10/12/8, answer like one machine, and survive losses.

Needs `make engine` (a hash-pinned build and model); skipped with the reason otherwise. The tests share one mesh and run in
order: later ones kill what earlier ones looked at. On two quiet cores they take 45 s; the limits allow for busy ones.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from stage_agent.addresses import free_ports
from stage_agent.cli.client import ApiRefused, get_json, post_json
from stage_agent.demo.mesh import DemoNode, demo_mesh
from stage_agent.demo.profile import DemoProfile, NodeShape, ShapedMachine, settings_text
from stage_agent.node import load_calibration
from tests.e2e.conftest import LiveMesh, told
from tests.e2e.real_engine import MISSING_INSTRUCTION, real_model, real_programs

pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("engine_time")]
PLACED_S = 180.0
"""From the wish to the first answer: 10 s on two quiet cores, a minute beside three busy processes."""

BANDWIDTH_BYTES_PER_S, FLOPS_PER_S = 10**12, 10**15
"""Pretended: so high that layers hardly count, and one plan already tells what a hop costs."""
COUNTS = {"alpha": 10, "beta": 12, "gamma": 8}
PROMPT = "The capital of France is"
QUESTION = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "logprobs": 1, "cache_prompt": False}


@pytest.fixture(scope="module")
def programs() -> dict[str, str]:
    return real_programs()


@pytest.fixture(scope="module")
def model() -> Path:
    return real_model()


def configure(mesh, name: str, programs: dict[str, str]) -> None:
    directory = mesh.root / name
    directory.mkdir(mode=0o700)
    port, api = free_ports(2)
    node = DemoNode(ShapedMachine(name, 2**31, 10**10), directory, port, api)
    sections = {
        "node": {"name": name, "state_dir": str(directory / "state"), "cache_dir": str(directory / "cache")},
        "listen": {"host": "127.0.0.1", "port": port},
        "api": {"port": api},
        "shape": {
            "memory_bytes": 2**31,
            "memory_bandwidth_bytes_per_s": BANDWIDTH_BYTES_PER_S,
            "compute_flops_per_s": FLOPS_PER_S,
        },
        "runtime": {
            "kind": "llama_cpp",
            "llama_threads": 1,
            "llama_devices": "CPU",
            "stop_grace_us": 2_000_000,
            **programs,
        },
        "planner": {"context_length": 1024, "parallel_lanes": 1},  # priced by the engine's own profile
        "election": {"settle_us": 3_000_000},
        "assignment": {"culprit_backoff_us": 1_000_000},
        "log": {"format": "json"},
    }
    node.config.write_text(settings_text(sections), "utf-8")
    mesh.nodes.append(node)


@pytest.fixture(scope="module")
def split(programs, model, unsplit) -> Iterator[LiveMesh]:
    assert unsplit  # first of all: it knows whether the engine runs on this CPU
    profile = DemoProfile(why="test", nodes={name: NodeShape(memory_ratio=1, model_read_ms=1) for name in COUNTS})
    with demo_mesh(profile, keep=bool(os.environ.get("KEEP"))) as mesh, told(mesh):
        for name in COUNTS:
            configure(mesh, name, programs)
        live = LiveMesh(mesh)
        mesh.form()
        live.watch.until("every agent sees every other", 120.0, live.watch.everybody_alive)
        live.watch.until("settled links", 120.0, live.watch.links_settled)  # without them no plan has a modelled time
        ids = {name: node_id for node_id, name in live.watch.names().items()}
        stages, first = [], 0
        for name, count in COUNTS.items():
            stages.append({"node": ids[name], "layer_start": first, "layer_end": first + count})
            first += count
        for node in mesh.nodes:
            post_json(node.api, "/api/v1/lock", {"slot": "default", "version": 1, "stages": stages})
        live.watch.serve(model)  # only now: nothing is loaded for a plan that the lock would end
        live.watch.until("the locked split serves", PLACED_S, lambda: locked_and_serving(live))
        yield live


def locked_and_serving(live: LiveMesh) -> bool:
    slot = live.watch.serving()
    return slot is not None and [s["layer_end"] - s["layer_start"] for s in slot["plan"]["stages"]] == [10, 12, 8]


def ask(node: DemoNode, **more) -> httpx.Response:
    return httpx.post(f"http://{node.api}/v1/completions", json={**QUESTION, **more}, timeout=120, trust_env=False)


def tokens_and_logprobs(choice: dict) -> list[tuple[str, float]]:
    return [(each["token"], each["logprob"]) for each in choice["logprobs"]["content"]]


def engines(node: DemoNode, name: str) -> list[psutil.Process]:
    assert node.process is not None
    found = psutil.Process(node.process.pid).children(recursive=True)
    return [each for each in found if each.name().startswith(name) and "-I" not in each.cmdline()[:3]]


@pytest.fixture(scope="module")
def unsplit(programs, model) -> Iterator[list[tuple[str, float]]]:
    (port,) = free_ports(1)
    command = [programs["llama_server"], "-m", str(model), "--port", str(port), "-c", "1024", "-np", "1", "-t", "1"]
    process = subprocess.Popen(
        [*command, "--no-repack", "--no-warmup", "--offline"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline and process.poll() is None:
            try:
                if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                    break
            except httpx.HTTPError:
                time.sleep(0.1)
        try:
            answer = httpx.post(f"{url}/v1/completions", json=QUESTION, timeout=120, trust_env=False)
        except httpx.HTTPError:
            if process.wait(10) == -signal.SIGILL:
                pytest.skip(MISSING_INSTRUCTION)
            raise
        yield tokens_and_logprobs(answer.json()["choices"][0])
    finally:
        process.kill()
        process.wait()


def test_three_machines_answer_with_the_tokens_and_logprobs_of_one(split, unsplit) -> None:
    for node in split.mesh.nodes:  # whichever node a client asks
        assert [slot["head"] for slot in split.watch.status(node)["slots"]] == ["alpha"]
        answer = ask(node)
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        assert choice["text"].startswith(" Paris.")
        assert tokens_and_logprobs(choice) == unsplit


def test_each_node_runs_one_worker_and_only_stage_0_the_head(split) -> None:
    running = {
        node.name: (len(engines(node, "ggml-rpc")), len(engines(node, "llama-server"))) for node in split.mesh.nodes
    }
    assert running == {"alpha": (1, 1), "beta": (1, 0), "gamma": (1, 0)}
    for node in split.mesh.nodes:
        for process in (*engines(node, "ggml-rpc"), *engines(node, "llama-server")):
            listening = [each.laddr.ip for each in process.net_connections() if each.status == psutil.CONN_LISTEN]
            assert listening == ["127.0.0.1"]


def test_the_plan_counts_what_the_engine_sends_across_a_boundary(split) -> None:
    boundaries = split.watch.serving()["plan"]["boundaries"]
    assert {each["wire_bytes_per_token"] for each in boundaries} == {4 * 576}  # float32, as seen on the wire


def test_every_row_tells_the_engine_s_build(split) -> None:
    told = {member["engine"] for member in get_json(split.mesh.nodes[0].api, "/api/v1/nodes")["nodes"]}
    assert told == {"llama.cpp 571d0d5 rpc 4.0.3"}


def test_the_head_takes_no_request_without_its_key(split) -> None:
    (head,) = engines(split.node("alpha"), "llama-server")
    port = next(each.laddr.port for each in head.net_connections() if each.status == psutil.CONN_LISTEN)
    assert httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=QUESTION, trust_env=False).status_code == 401


def test_a_stream_comes_in_pieces(split) -> None:
    pieces = []
    with httpx.stream(
        "POST",
        f"http://{split.node('gamma').api}/v1/completions",
        json={**QUESTION, "stream": True},
        timeout=60,
        trust_env=False,
    ) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        pieces = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
    assert len(pieces) >= 8
    assert "".join(piece["choices"][0]["text"] for piece in pieces if piece["choices"]).startswith(" Paris.")


def test_clients_that_leave_in_the_middle_cost_nobody_else_anything(split) -> None:
    body = {**QUESTION, "max_tokens": 900, "stream": True, "ignore_eos": True}
    for _ in range(10):  # more than the connections that one way to the head may hold
        with httpx.stream(
            "POST", f"http://{split.node('beta').api}/v1/completions", json=body, timeout=30, trust_env=False
        ) as answer:
            assert next(answer.iter_lines()).startswith("data:")
    began = time.monotonic()
    assert ask(split.node("beta")).status_code == 200
    assert time.monotonic() - began < 60  # ten abandoned answers of 900 tokens would take minutes


def test_the_live_plan_can_be_exported_as_the_engine_s_own_commands(split) -> None:
    command = [sys.executable, "-m", "stage_agent", "export", "live", "--to", "llama-cpp", "--json"]
    node = split.node("beta")
    done = subprocess.run([*command, "--node", node.api], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    hosts = json.loads(done.stdout)["hosts"]
    assert [host["name"] for host in hosts] == ["gamma", "beta", "alpha"]
    assert "-ts 10,12,9" in hosts[-1]["commands"][-1]
    assert all(host["address"] for host in hosts)


def test_the_measured_time_per_token_stands_beside_the_prediction(split) -> None:
    def measured() -> int | None:
        return split.watch.serving()["measured_tpot_us"]

    split.watch.until("a measured time per token", 60, lambda: measured() is not None)
    assert 0 < measured() < 20_000_000


MEASURED_US: list[int] = []
"""The time per token by which the mesh plans from then on."""


def orders(node: DemoNode) -> dict[tuple[str, str], dict]:
    """What stands, as this node knows it, by kind and subject."""
    told = get_json(node.api, "/api/v1/orders")["orders"]
    return {
        (each["kind"], each["subject"]): json.loads(each["value"])
        for each in told
        if each["kind"] != "lock" and not each["removed"]
    }


TRUE_SLOWNESS = {"alpha": 1.0, "beta": 5.0, "gamma": 1.0}


def test_what_live_runs_say_reaches_the_plans_of_the_mesh(split, tmp_path) -> None:
    """Runs of four plans, on whose cuts beta takes five times as long as its bandwidth says; then asked at another node."""
    runs = []
    for index, counts in enumerate(((28, 1, 1), (1, 28, 1), (1, 1, 28), (10, 10, 10))):
        stages = [
            {"node": name, "layers": count, "work_us": 1_000 * count, "rtt_us": None if not place else 2_000}
            for place, (name, count) in enumerate(zip(TRUE_SLOWNESS, counts, strict=True))
        ]
        measured_us = round(sum(TRUE_SLOWNESS[stage["node"]] * stage["work_us"] for stage in stages)) + 3_000
        runs.append(
            {"id": f"{index}", "profile": "llama-cpp-rpc", "stages": stages, "predicted_us": measured_us,
             "measured_us": measured_us, "tokens": 1_000}
        )  # fmt: skip
    file, alpha = tmp_path / "runs.json", split.node("alpha").api
    file.write_text(json.dumps({"live_runs": runs}))
    command = [sys.executable, "-m", "stage_agent", "calibrate", str(file), "--node", split.node("beta").api]

    def asked() -> tuple[str, int] | None:
        """Which profile prices a plan, and how slow it takes beta to be; ``None`` while a busy machine suspects beta."""
        try:
            planned = post_json(alpha, "/api/v1/plan:preview", {"exclude_nodes": ["alpha", "gamma"]})
        except ApiRefused:
            return None
        (stage,) = (each for each in planned["stages"] if each["node_id"] == beta)
        return planned["calibration"], stage.get("slowness_milli", 1_000)

    def planned_otherwise() -> bool:
        answer = asked()
        if answer is not None and answer[1] != as_shipped[1]:
            found.append(answer[1])
        return bool(found)

    beta = next(each["node_id"] for each in get_json(alpha, "/api/v1/nodes")["nodes"] if each["name"] == "beta")
    as_shipped, found = ("llama-cpp-rpc", 1_000), []
    split.watch.until("planned by benchmark and profile", 60, lambda: asked() == as_shipped)
    subprocess.run([*command, "--apply"], capture_output=True, timeout=90, check=True)
    split.watch.until("plans of another node by it", 60, planned_otherwise)
    assert 4_000 < found[0] < 6_000
    assert ("node_speed", beta) in orders(split.node("alpha"))
    subprocess.run([*command, "--reset"], capture_output=True, timeout=90, check=True)
    split.watch.until("planned by benchmark and profile again", 60, lambda: asked() == as_shipped)
    assert ("node_speed", beta) not in orders(split.node("alpha"))


def test_what_the_plan_measured_becomes_a_profile_and_what_the_mesh_plans_by(split, tmp_path) -> None:
    assert ask(split.node("gamma"), max_tokens=100, ignore_eos=True).status_code == 200

    def enough() -> bool:
        stages = get_json(split.node("beta").api, "/api/v1/stages")["stages"]
        return max(stage["tpot_tokens"] for stage in stages) >= 99

    split.watch.until("the tokens' times told to another node", 60, enough)
    kept, fitted = tmp_path / "runs.json", tmp_path / "here.toml"
    command = [sys.executable, "-m", "stage_agent", "calibrate", "live", "--json", "--node", split.node("beta").api]
    done = subprocess.run(
        [*command, "--keep", str(kept), "--out", str(fitted), "--apply"],
        capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(done.stdout)
    (run,) = document["runs"]
    assert set(document["slowness"]) == set(COUNTS)
    # Pretended bandwidths may be right by chance; the fit explains the run in any case.
    assert abs(run["error_after"]) <= max(0.01, min(0.05, abs(run["error"])))
    assert [stage["layers"] for stage in json.loads(kept.read_text())["live_runs"][0]["stages"]] == [10, 12, 8]
    calibration = load_calibration(str(fitted))
    assert (calibration.name, calibration.topology) == ("here", "star")
    order, alpha = ("hop_costs", "llama-cpp-rpc"), split.node("alpha")
    split.watch.until("what a hop costs told to another node", 20, lambda: order in orders(alpha))
    told = orders(alpha)[order]
    estimates = document["estimates"]
    assert told["rtt_multiplier_milli"] == pytest.approx(1_000 * estimates["rtt_multiplier"]["after"], abs=1)
    assert told["per_hop_us"] == pytest.approx(estimates["per_hop_us"]["after"], abs=1)
    assert told["per_hop_us"] > 0
    MEASURED_US.append(run["measured_us"])


def test_a_killed_worker_ends_the_request_with_a_clear_error_and_the_next_plan_answers(split, unsplit) -> None:
    before = split.watch.serving()["term"]
    (worker,) = engines(split.node("beta"), "ggml-rpc")
    lines = []
    with (
        ThreadPoolExecutor(1) as beside,
        httpx.stream(
            "POST", f"http://{split.node('gamma').api}/v1/completions",
            json={**QUESTION, "max_tokens": 900, "stream": True, "ignore_eos": True}, timeout=120, trust_env=False,
        ) as answer,
    ):  # fmt: skip
        for line in answer.iter_lines():
            lines.append(line)
            if len(lines) == 6:
                waiting = beside.submit(ask, split.node("beta"), max_tokens=900)  # the engine has one lane: it queues
                time.sleep(0.5)
                worker.send_signal(signal.SIGKILL)
        whole = waiting.result()
    assert any("plan_lost" in line for line in lines[-3:]), lines[-3:]
    assert whole.status_code == 502
    assert whole.json()["error"]["code"] == "plan_lost"
    assert "send the request again" in whole.json()["error"]["message"]
    refused: list[tuple[int, str, bool]] = []

    def replaced() -> bool:
        answered = ask(split.node("beta"))
        if answered.status_code != 200:
            refused.append((answered.status_code, answered.json()["error"]["code"], "retry-after" in answered.headers))
            return False
        slot = split.watch.serving()
        return slot is not None and slot["term"] > before

    split.watch.until("a new plan that answers", PLACED_S, replaced)
    # The dying head's own error at most at first; from then on the mesh says that it is replanning, and when to ask again.
    replanning = refused[[status for status, _, _ in refused].index(503) :]
    assert {(503, "replanning", True)} == set(replanning), refused
    assert {(502, "plan_lost", True)} >= set(refused[: -len(replanning)]), refused
    assert tokens_and_logprobs(ask(split.node("beta")).json()["choices"][0]) == unsplit


def test_the_next_plan_of_the_same_cuts_is_priced_at_what_the_last_one_took(split) -> None:
    plan = split.watch.serving()["plan"]
    assert plan["calibration"].startswith("llama-cpp-rpc+live.")
    assert plan["modeled"]["decode_tpot_us"] == pytest.approx(MEASURED_US[0], rel=0.1)


def test_nothing_is_left_when_the_agents_end(split) -> None:
    left = [
        process for node in split.mesh.nodes for name in ("ggml-rpc", "llama-server") for process in engines(node, name)
    ]
    assert left
    codes = split.mesh.stop()
    assert codes == dict.fromkeys(codes, 0)
    _, alive = psutil.wait_procs(left, timeout=10)
    assert not alive
    for node in split.mesh.nodes:
        assert "Traceback" not in node.log.read_text()


def test_a_missing_program_is_one_clear_line(tmp_path) -> None:
    config = tmp_path / "stagemesh.toml"
    config.write_text(
        f'[node]\nstate_dir = "{tmp_path / "state"}"\n[listen]\nhost = "127.0.0.1"\nport = 0\n[api]\nport = 0\n'
        '[runtime]\nkind = "llama_cpp"\nllama_server = "no-such-llama-server"\n'
    )
    subprocess.run(
        [sys.executable, "-m", "stage_agent", "init", "--config", str(config)], check=True, capture_output=True
    )
    done = subprocess.run(
        [sys.executable, "-m", "stage_agent", "run", "--config", str(config)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert "no-such-llama-server was not found on PATH" in done.stderr
    assert "Traceback" not in done.stderr
