"""What a user of a real three-node mesh sees: one plan, fenced, measured, replaced after a loss, resumed after a restart.

The tests of this module share one mesh and run in order: later ones kill what earlier ones looked at.
"""

import itertools
import json
import re
import subprocess
import sys

import httpx
import pytest

from stage_agent.cli.client import get_json

pytestmark = pytest.mark.timeout(240)


def stagemesh(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stage_agent", *arguments],
        input=stdin, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def metrics(node) -> dict[str, float]:
    text = httpx.get(f"http://{node.api}/metrics").text
    samples = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, value in samples}


def refusals(node) -> float:
    """Connections that ``node`` refused because nobody admitted whoever made them."""
    return metrics(node)['stagemesh_gossip_rejected_total{reason="unadmitted"}']


def test_all_agents_agree_on_coordinator_plan_and_epoch(live) -> None:
    seen = set()
    live.watch.until("the plan on every node", 10, lambda: all(live.watch.slot(node) for node in live.mesh.nodes))
    for node in live.mesh.nodes:
        status, slot = live.watch.status(node), live.watch.slot(node)
        seen.add((status["coordinator"]["node_id"], slot["epoch"], slot["plan"]["plan_id"]))
    assert len(seen) == 1
    stages = slot["plan"]["stages"]
    assert stages[0]["layer_start"] == 0
    assert stages[-1]["layer_end"] == slot["plan"]["model"]["layer_count"] == 28
    assert all(a["layer_end"] == b["layer_start"] for a, b in itertools.pairwise(stages))
    assert all(stage["required_bytes"] <= stage["usable_bytes"] for stage in stages)
    assert slot["plan"]["placement"] == "performance_aware"
    assert {hop["basis"] for hop in slot["plan"]["hops"]} <= {"measured", "reverse"}


def test_stage_0_serves_last_and_is_routable_after_that(live) -> None:
    names, slot = live.watch.names(), live.watch.serving()
    first = names[slot["plan"]["stages"][0]["node_id"]]
    served = {}
    for node in live.mesh.nodes:
        for event in get_json(node.api, "/api/v1/events")["events"]:
            if event["kind"] == "stage_serving" and event["fields"]["epoch"] == slot["epoch"]:
                served[node.name] = event["at"]
    coordinator = live.watch.coordinator()
    events = get_json(coordinator.api, "/api/v1/events")["events"]
    routed = [event["at"] for event in events if event["kind"] == "route" and event["fields"]["node_id"]]
    assert set(served) == {names[stage["node_id"]] for stage in slot["plan"]["stages"]}
    assert served[first] == max(served.values())
    assert routed[-1] >= served[first]


def test_the_split_model_answers_what_the_whole_one_does(live) -> None:
    assert live.story.tokens[0][: len(live.whole)] == live.whole
    assert len(set(live.whole)) > 5


def test_measured_round_trips_follow_the_shaped_delays(live) -> None:
    shapes = live.mesh.profile.links
    for link in live.watch.links(live.mesh.nodes[0]):
        a, b = link["source_name"], link["target_name"]
        shaped_us = 1_000 * (shapes[f"{a} -> {b}"].delay_ms + shapes[f"{b} -> {a}"].delay_ms)
        assert link["shaped"]
        assert shaped_us - 1_000 <= link["rtt_us"] <= shaped_us + 15_000, link


def test_health_readiness_and_metrics_tell_the_same_story(live) -> None:
    for node in live.mesh.nodes:
        assert httpx.get(f"http://{node.api}/healthz").status_code == 200
        assert httpx.get(f"http://{node.api}/readyz").status_code == 200, live.watch.status(node)
    coordinator, slot = live.watch.coordinator(), live.watch.serving()
    found = metrics(coordinator)
    assert found["stagemesh_is_coordinator"] == 1
    assert found["stagemesh_coordinator_term"] == slot["term"]
    tpot = next(value for name, value in found.items() if name.startswith("stagemesh_plan_modeled_tpot_seconds"))
    assert tpot == pytest.approx(slot["plan"]["modeled"]["decode_tpot_us"] / 1e6)
    layers = [value for name, value in found.items() if name.startswith("stagemesh_plan_stage_layers{")]
    assert sum(layers) == 28
    for family in ("link_rtt_seconds", "link_rtt_settled", "plan_hop_seconds", "plan_info", "stage_state", "peers"):
        assert any(name.startswith(f"stagemesh_{family}") for name in found), family


def test_the_command_line_reads_a_running_daemon_and_says_5_when_there_is_none(live) -> None:
    done = stagemesh("plan", "--json", "--node", live.watch.coordinator().api)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["plan_id"] == live.watch.serving()["plan"]["plan_id"]
    gone = stagemesh("status", "--node", "127.0.0.1:1")
    assert gone.returncode == 5
    assert gone.stdout == ""
    assert "Traceback" not in gone.stderr


def test_an_uninvited_node_is_refused_and_counted(live, tmp_path) -> None:
    target = live.mesh.nodes[0]
    before = refusals(target)
    config = tmp_path / "stranger.toml"
    config.write_text(
        f'[node]\nname = "stranger"\nstate_dir = "{tmp_path / "state"}"\ncache_dir = "{tmp_path / "cache"}"\n'
        f'[listen]\nhost = "127.0.0.1"\nport = 0\n[api]\nport = 0\n[probe]\nbenchmark = false\n'
    )
    assert stagemesh("init", "--mesh", "elsewhere", "--config", str(config)).returncode == 0
    mesh_file = tmp_path / "state" / "mesh.json"
    document = json.loads(mesh_file.read_text())
    document["seeds"] = [f"127.0.0.1:{target.port}"]
    mesh_file.write_text(json.dumps(document))
    with (tmp_path / "log").open("wb") as log:
        stranger = subprocess.Popen([sys.executable, "-m", "stage_agent", "run", "--config", str(config)], stderr=log)
        try:
            live.watch.until(
                "a counted refusal", 30,
                lambda: refusals(target) > before,
            )  # fmt: skip
        finally:
            stranger.terminate()
            assert stranger.wait(15) == 0
    names = {member["name"] for member in get_json(target.api, "/api/v1/nodes")["nodes"]}
    assert "stranger" not in names


def test_the_demo_tells_of_a_power_cut_a_higher_epoch_and_the_return_of_a_node_that_kept_its_word(live) -> None:
    before = {node.name: (identity_of(node), promised_term(node)) for node in live.mesh.nodes}
    live.story.lose_and_recover()
    first, without, last = live.story.shown
    victim = re.search(r"power back: (\S+)", live.said)[1]
    names = live.watch.names()
    assert [victim in {names[stage["node_id"]] for stage in each["plan"]["stages"]} for each in live.story.shown] == [
        True,
        False,
        True,
    ]
    assert first["term"] < without["term"] < last["term"]
    took_s = float(re.search(r"serving again (\S+) s after the power cut", live.said)[1])
    assert took_s <= 20, "detection, plan and load"
    node = live.node(victim)
    identity, promised = before[victim]
    assert identity_of(node) == identity
    assert promised_term(node) > promised
    started = [event for event in get_json(node.api, "/api/v1/events")["events"] if event["kind"] == "started"]
    assert started[0]["fields"]["boot_counter"] == 2


def test_the_demo_shows_the_same_tokens_under_every_plan_and_what_a_token_took_beside_the_prediction(live) -> None:
    assert len(live.story.tokens) == 3
    assert len({*live.story.tokens}) == 1
    shown = " ".join(str(token) for token in live.whole[:16])
    assert live.said.count(f"tokens {shown} …") == 3
    timings = re.findall(r"time per token  measured (\S+) ms  predicted (\S+) ms  off by ([+-]\d+)%", live.said)
    assert len(timings) == 3
    for (measured, predicted, off), slot in zip(timings, live.story.shown, strict=True):
        assert float(predicted) == pytest.approx(slot["plan"]["modeled"]["decode_tpot_us"] / 1_000, abs=0.06)
        assert float(measured) == pytest.approx(float(predicted) * (1 + int(off) / 100), rel=0.02)
        assert float(measured) > 0.5 * float(predicted), "delays and read times are paid for"


def test_sigterm_drains_and_ends_with_code_0(live) -> None:
    codes = live.mesh.stop()
    assert codes == dict.fromkeys(codes, 0)
    assert len(codes) == 3
    for node in live.mesh.nodes:
        assert "Traceback" not in node.log.read_text()


def identity_of(node) -> bytes:
    """The key file of its state directory."""
    return (node.directory / "state" / "identity.pem").read_bytes()


def promised_term(node) -> int:
    """The agent's own word about its promise; 0 before the first."""
    stages = get_json(node.api, "/api/v1/stages")["stages"]
    return next((stage["promised"]["term"] for stage in stages if stage["name"] == node.name), 0)
