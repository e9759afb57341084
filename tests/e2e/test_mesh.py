"""What a user of a real three-node mesh sees: one plan, fenced, measured, replaced after a loss, resumed after a restart.

The tests of this module share one mesh and run in order: later ones kill what earlier ones looked at.
"""

import itertools
import json
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
    assert live.answers() == live.whole
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
    before = sum(v for n, v in metrics(target).items() if n.startswith("stagemesh_gossip_rejected_total"))
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
                lambda: sum(v for n, v in metrics(target).items() if n.startswith("stagemesh_gossip_rejected_total")) > before,
            )  # fmt: skip
        finally:
            stranger.terminate()
            assert stranger.wait(15) == 0
    names = {member["name"] for member in get_json(target.api, "/api/v1/nodes")["nodes"]}
    assert "stranger" not in names


def test_a_killed_stage_is_replaced_under_a_higher_epoch_and_resumes_what_it_promised(live) -> None:
    names, before = live.watch.names(), live.watch.serving()
    coordinator = live.watch.coordinator()
    victim = next(
        node for node in live.mesh.nodes
        if node is not coordinator and node.name in {names[stage["node_id"]] for stage in before["plan"]["stages"]}
    )  # fmt: skip
    identity = (victim.directory / "state" / "identity.pem").read_bytes()
    promised = promised_term(victim)
    assert promised >= before["term"]
    live.mesh.kill(victim)

    def replaced() -> bool:
        slot = live.watch.serving()
        return slot is not None and slot["term"] > before["term"]

    took_s = live.watch.until("a plan under a higher epoch", 60, replaced)
    assert took_s <= 20, "detection, plan and load"
    after = live.watch.serving()
    assert victim.name not in {names[stage["node_id"]] for stage in after["plan"]["stages"]}
    assert live.answers() == live.whole
    live.mesh.start(victim)
    live.mesh.wait_for_api(victim, 30)
    live.watch.until("the victim back in the mesh", 40, live.watch.everybody_alive)
    assert (victim.directory / "state" / "identity.pem").read_bytes() == identity
    started = [event for event in get_json(victim.api, "/api/v1/events")["events"] if event["kind"] == "started"]
    assert started[0]["fields"]["boot_counter"] == 2
    assert promised_term(victim) >= promised


def test_sigterm_drains_and_ends_with_code_0(live) -> None:
    codes = live.mesh.stop()
    assert codes == dict.fromkeys(codes, 0)
    assert len(codes) == 3
    for node in live.mesh.nodes:
        assert "Traceback" not in node.log.read_text()


def promised_term(node) -> int:
    """The agent's own word about its promise."""
    stages = get_json(node.api, "/api/v1/stages")["stages"]
    return next(stage["promised"]["term"] for stage in stages if stage["name"] == node.name)
