"""Revocation, key rotation, lost and copied state directories: what people and peers see of real processes."""

import json
import shutil
from pathlib import Path

import httpx
import pytest

from stage_agent.graves import kept_tombstones
from stage_agent.state.store import StateStore
from tests.e2e.small_nodes import SmallNode, join, small_mesh, stagemesh, until

pytestmark = pytest.mark.timeout(180)


def refusal(node: SmallNode, name: str) -> str:
    """Why ``node`` will not revoke ``name``."""
    answer = httpx.post(f"http://{node.api}/api/v1/revoke", json={"node": name})
    assert answer.is_client_error, answer.text
    return answer.json()["detail"]


def ended_by_itself(node: SmallNode, patience_s: float = 30.0) -> int:
    node.start(wait=False)
    try:
        return node.ended(patience_s)
    finally:
        if node.process is not None:
            node.kill()


def has_revoked(node: SmallNode, node_id: str) -> bool:
    statements = json.loads((node.state / "mesh.json").read_text())["admissions"]
    return any(each["node_id"] == node_id and each["revoked"] for each in statements)


def test_a_revoked_node_is_out_everywhere_for_good_and_says_so(tmp_path: Path) -> None:
    with small_mesh(tmp_path, "alpha", "beta", "gamma") as (alpha, beta, gamma):
        ids = alpha.alive()
        before = json.loads((beta.state / "mesh.json").read_text())
        gamma.kill()  # sleeps through the revocation
        done = alpha.ask("revoke", "beta", "--yes")
        assert done.returncode == 0, done.stderr
        assert ids["beta"] in done.stdout
        assert beta.ended(10) == 6, "the revoked daemon ends with a code of its own"
        assert beta.last_words().startswith(f"stagemesh: this node ({ids['beta']}) was revoked from mesh home by alpha")
        again = alpha.ask("revoke", "beta", "--yes")
        assert (again.returncode, "was revoked before" in again.stdout) == (0, True)
        done = alpha.ask("revoke", "nobody", "--yes")
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
        assert "no node 'nobody'" in done.stderr
        assert "cannot revoke itself" in refusal(alpha, "alpha")

        gamma.start()
        until("the sleeper hears of it", lambda: has_revoked(gamma, ids["beta"]))
        assert "every admission rests on its key" in refusal(gamma, "alpha")
        gamma.kill()
        alpha.kill()
        gamma.start()  # alone, from its disk
        before["seeds"] = [f"127.0.0.1:{gamma.port}"]
        (beta.state / "mesh.json").write_text(json.dumps(before))  # a restored backup: it knows of nothing
        assert ended_by_itself(beta) == 6
        assert "was revoked from mesh home" in beta.last_words()
        assert set(gamma.alive()) == {"gamma"}
        join(beta, gamma)
        assert ids["beta"] not in (beta.state / "mesh.json").read_text().partition('"admissions"')[0]
        beta.start()
        until("the machine is back as another node", lambda: "beta" in gamma.alive())
        assert gamma.alive()["beta"] == beta.node_id != ids["beta"]


def test_a_rotated_key_is_followed_by_everybody_and_the_old_one_is_worth_nothing(tmp_path: Path) -> None:
    with small_mesh(tmp_path, "alpha", "beta", "gamma") as (alpha, beta, gamma):
        old = alpha.node_id
        stolen, _, _ = (alpha.state / "identity.pem").read_bytes().partition(b"-----BEGIN PRIVATE KEY-----\n")
        stolen = (alpha.state / "identity.pem").read_bytes()[: len(stolen) + 119]
        mesh_file = (alpha.state / "mesh.json").read_text()
        gamma.kill()  # sleeps through it
        done = alpha.ask("rotate-key", "--json")
        assert done.returncode == 0, done.stderr
        new = json.loads(done.stdout)["successor"]
        assert alpha.node_id == new != old
        until("beta follows", lambda: beta.alive().get("alpha") == new)
        doubted = [
            event["fields"]["node_id"] for event in beta.events("member_changed") if event["fields"]["state"] != "alive"
        ]
        assert new not in doubted
        gamma.start()
        until("so does who slept", lambda: gamma.alive().get("alpha") == new and "beta" in gamma.alive())

        thief = SmallNode(tmp_path, "thief")
        thief.state.mkdir(mode=0o700)
        (thief.state / "identity.pem").touch(0o600)
        (thief.state / "identity.pem").write_bytes(stolen)
        document = json.loads(mesh_file) | {"seeds": [f"127.0.0.1:{beta.port}"]}
        (thief.state / "mesh.json").write_text(json.dumps(document))
        assert ended_by_itself(thief) == 6
        assert f"this node ({old}) was replaced by that of node {new}" in thief.last_words()
        assert set(beta.alive()) == {"alpha", "beta", "gamma"}


def test_a_copied_state_directory_is_found_out_and_the_later_process_ends(tmp_path: Path) -> None:
    with small_mesh(tmp_path, "alpha", "beta") as (alpha, beta):
        copy = SmallNode(tmp_path, "copy")
        shutil.copytree(beta.state, copy.state)
        assert ended_by_itself(copy) == 6
        assert copy.last_words().startswith("stagemesh: another living process uses the identity of this node")
        (said,) = until("the original says it", lambda: beta.events("identity_conflict"))
        assert f"127.0.0.1:{copy.port}" in said["text"]
        assert len(alpha.events("identity_conflict")) == 1, "once a minute"
        nodes = {node["name"]: node for node in alpha.get("nodes")["nodes"]}
        assert (nodes["beta"]["state"], nodes["beta"]["why_not_plannable"]) == ("alive", "conflict")
        assert set(nodes) == {"alpha", "beta"}
        assert beta.process is not None
        assert beta.process.poll() is None


def test_a_wiped_directory_counts_on_and_who_left_stays_away_after_everybody_restarted(tmp_path: Path) -> None:
    with small_mesh(tmp_path, "alpha", "beta", "gamma") as (alpha, beta, gamma):
        gone = gamma.node_id
        assert gamma.ask("leave", "--yes").returncode == 0
        assert gamma.ended() == 0
        until("gamma has left", lambda: all("gamma" not in node.alive() for node in (alpha, beta)))
        beta.kill()
        for file in ("state.db", "state.db-wal", "state.db-shm", "boot_counter"):
            (beta.state / file).unlink(missing_ok=True)
        beta.start()
        until("the wiped one is back", lambda: set(alpha.alive()) == {"alpha", "beta"} == set(beta.alive()))
        (raised,) = beta.events("boot_counter_raised")
        assert raised["fields"]["boot_counter"] > 1_000_000
        for node in (alpha, beta):
            node.kill()
        for node in (alpha, beta):
            node.start(wait=False)
        until("both are back", lambda: set(alpha.alive()) == {"alpha", "beta"} == set(beta.alive()))
        (started,) = beta.events("started")
        assert started["fields"]["boot_counter"] == raised["fields"]["boot_counter"] + 1
        assert alpha.stop() == 0
        with StateStore.open(alpha.state) as store:
            assert gone in {stone.node_id for stone in kept_tombstones(store)}


def test_without_a_daemon_both_commands_say_so() -> None:
    for command in (("revoke", "beta", "--yes"), ("rotate-key",)):
        done = stagemesh(*command, "--node", "127.0.0.1:1")
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (5, "", 1)
        assert "no daemon answers" in done.stderr
