"""Revocation, key rotation, lost and copied state directories: what people and peers see of real processes.

The tests share one mesh of three and run in order: later ones expel and restart what earlier ones looked at.
"""

import base64
import json
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from protocol.join_token import decode_token
from stage_agent.graves import kept_tombstones
from stage_agent.state.store import StateStore
from tests.e2e.small_nodes import PATIENCE_S, SmallNode, join, small_mesh, stagemesh, until

pytestmark = pytest.mark.timeout(300)


END = b"-----END PRIVATE KEY-----\n"


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[SmallNode]]:
    with small_mesh(tmp_path_factory.mktemp("mesh"), "alpha", "beta", "gamma") as formed:
        yield formed


def refusal(node: SmallNode, name: str) -> str:
    """Why ``node`` will not revoke ``name``."""
    answer = httpx.post(f"http://{node.api}/api/v1/revoke", json={"node": name})
    assert answer.is_client_error, answer.text
    return answer.json()["detail"]


def ended_by_itself(node: SmallNode, patience_s: float = PATIENCE_S) -> int:
    node.start(wait=False)
    try:
        return node.ended(patience_s)
    finally:
        if node.process is not None:
            node.kill()


def has_revoked(node: SmallNode, node_id: str) -> bool:
    statements = json.loads((node.state / "mesh.json").read_text())["admissions"]
    return any(each["node_id"] == node_id and each["revoked"] for each in statements)


def test_a_copied_state_directory_is_found_out_and_the_later_process_ends(nodes, tmp_path: Path) -> None:
    alpha, beta, _ = nodes
    copy = SmallNode(tmp_path, "copy")
    shutil.copytree(beta.state, copy.state)
    assert ended_by_itself(copy) == 6
    assert copy.last_words().startswith("stagemesh: another living process uses the identity of this node")
    (said,) = until("the original says it", lambda: beta.events("identity_conflict"))
    assert f"127.0.0.1:{copy.port}" in said["text"]
    assert len(alpha.events("identity_conflict")) == 1, "once a minute"
    known = {node["name"]: node for node in alpha.get("nodes")["nodes"]}
    assert (known["beta"]["state"], known["beta"]["why_not_plannable"]) == ("alive", "conflict")
    assert set(known) == {"alpha", "beta", "gamma"}
    assert beta.process is not None
    assert beta.process.poll() is None


def test_a_wiped_state_directory_counts_on_from_higher_up_than_peers_remember(nodes) -> None:
    alpha, beta, _ = nodes
    beta.kill()
    for file in ("state.db", "state.db-wal", "state.db-shm", "boot_counter"):
        (beta.state / file).unlink(missing_ok=True)
    beta.start()
    until("the wiped one is back", lambda: "beta" in alpha.alive() and "alpha" in beta.alive())
    (raised,) = beta.events("boot_counter_raised")
    assert raised["fields"]["boot_counter"] > 1_000_000
    assert int((beta.state / "boot_counter").read_text().split()[0]) == raised["fields"]["boot_counter"]


def test_a_rotated_key_is_followed_by_everybody_and_the_old_one_is_worth_nothing(nodes, tmp_path: Path) -> None:
    alpha, beta, gamma = nodes
    old = alpha.node_id
    stolen = (alpha.state / "identity.pem").read_bytes().partition(END)[0] + END
    mesh_file = (alpha.state / "mesh.json").read_text()
    gamma.kill()  # sleeps through it
    done = alpha.ask("rotate-key", "--json")
    assert done.returncode == 0, done.stderr
    new = json.loads(done.stdout)["successor"]
    assert alpha.node_id == new != old
    until("beta follows", lambda: beta.alive().get("alpha") == new)
    gamma.start()
    until("so does who slept", lambda: gamma.alive().get("alpha") == new and "beta" in gamma.alive())
    assert stolen not in (alpha.state / "identity.pem").read_bytes()

    thief = SmallNode(tmp_path, "thief")
    thief.state.mkdir(mode=0o700)
    (thief.state / "identity.pem").touch(0o600)
    (thief.state / "identity.pem").write_bytes(stolen)
    document = json.loads(mesh_file) | {"seeds": [f"127.0.0.1:{beta.port}"]}
    (thief.state / "mesh.json").write_text(json.dumps(document))
    assert ended_by_itself(thief) == 6
    assert f"this node ({old}) was replaced by that of node {new}" in thief.last_words()
    assert set(beta.alive()) == {"alpha", "beta", "gamma"}

    newest = httpx.post(f"http://{alpha.api}/api/v1/rotate-key", json={}).json()["successor"]
    alpha.kill()  # the power goes before it has begun again
    alpha.start()
    assert alpha.node_id == newest != new
    until("everybody follows again", lambda: beta.alive().get("alpha") == gamma.alive().get("alpha") == newest)


def test_a_revoked_node_is_out_everywhere_for_good_and_says_so(nodes) -> None:
    alpha, beta, gamma = nodes
    ids = alpha.alive()
    before = json.loads((beta.state / "mesh.json").read_text())
    gamma.kill()  # sleeps through the revocation
    done = alpha.ask("revoke", "beta", "--yes")
    assert done.returncode == 0, done.stderr
    assert ids["beta"] in done.stdout
    assert beta.ended() == 6, "the revoked daemon ends with a code of its own"
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
    beta.start()
    until("the machine is back as another node", lambda: "beta" in gamma.alive())
    assert gamma.alive()["beta"] == beta.node_id != ids["beta"]


def test_who_left_stays_away_after_everybody_else_restarted(nodes) -> None:
    alpha, beta, gamma = nodes
    gone = beta.node_id
    assert beta.ask("leave", "--yes").returncode == 0
    assert beta.ended() == 0
    until("beta has left", lambda: "beta" not in gamma.alive())
    gamma.kill()
    for node in (alpha, gamma):
        node.start(wait=False)
    until("both are back", lambda: set(alpha.alive()) == {"alpha", "gamma"} == set(gamma.alive()))
    assert gamma.stop() == 0
    with StateStore.open(gamma.state) as store:
        assert gone in {stone.node_id for stone in kept_tombstones(store)}


def secrets_of(nodes: list[SmallNode]) -> dict[str, list[str]]:
    """Every secret of the run, in each form in which it might be written somewhere."""
    raw: dict[str, bytes] = {}
    for node in nodes:
        for file in [*node.state.glob("identity.pem*")]:
            for number, block in enumerate(file.read_bytes().split(END)[:-1]):
                raw[f"{file} key {number}"] = load_pem_private_key(block + END, None).private_bytes_raw()
        for file in node.state.glob("invites/*.json"):
            raw[f"{file} verifier"] = bytes.fromhex(json.loads(file.read_text())["verifier"])
        raw |= {f"{node.name} secret {number}": decode_token(token).secret for number, token in enumerate(node.tokens)}
    forms = {
        name: [
            each.hex(),
            base64.b64encode(each).decode()[:40],
            base64.urlsafe_b64encode(each).decode()[:40],
            repr(each)[2:-1],
        ]
        for name, each in raw.items()
    }
    return forms | {
        f"{node.name} token {number}": [token, token[8:48]]
        for node in nodes
        for number, token in enumerate(node.tokens)
    }


def test_no_secret_of_the_whole_run_stands_in_a_log_an_answer_or_an_output(nodes) -> None:
    running = [node for node in nodes if node.process is not None]
    paths = [
        "api/v1/" + name for name in ("status", "nodes", "links", "plans", "stages", "models", "events", "targets")
    ]
    texts = {f"{node.name} log": node.log.read_text() for node in nodes}
    texts |= {f"{node.name} said": "".join(node.said) for node in nodes}
    texts |= {
        f"{node.name} /{path}": httpx.get(f"http://{node.api}/{path}").text
        for node in running
        for path in [*paths, "metrics", "openapi.json", "healthz", ""]
    }
    command_lines = {
        f"{node.name} command line": Path(f"/proc/{node.process.pid}/cmdline").read_bytes().decode()
        for node in running
        if node.process is not None and Path("/proc/self/cmdline").exists()
    }
    texts |= command_lines
    kept = secrets_of(nodes)
    assert len(kept) >= 4 * len(nodes), "keys, keys to follow, tokens, their secrets and verifiers"
    found = [
        (name, where) for name, forms in kept.items() for where, text in texts.items() for form in forms if form in text
    ]
    assert found == []
    everything = "".join(texts.values())
    assert '"level": "debug"' in everything or "debug" in everything
    assert all(each in everything for each in running[0].alive().values()), "the search does find what is there"
    planted = everything + kept["alpha token 0"][0]
    assert any(form in planted for forms in kept.values() for form in forms)


def test_the_api_token_stands_in_no_log_answer_or_output_of_the_node_that_asks_for_it(tmp_path: Path) -> None:
    node, token, wrong = SmallNode(tmp_path, "guarded"), secrets.token_urlsafe(32), secrets.token_urlsafe(32)
    file = tmp_path / "api-token"
    file.touch(0o600)
    file.write_text(token + "\n")
    node.config.write_text(node.config.read_text().replace("[api]\n", f'[api]\ntoken_file = "{file}"\n'))
    assert node.call("init").returncode == 0
    node.start()
    try:
        assert node.process is not None
        paths = ["status", "nodes", "events", "plans", "stages", "models", "targets", "revoke"]
        texts: dict[str, str] = {}
        for shown in (token, wrong):
            with httpx.Client(base_url=f"http://{node.api}", headers={"Authorization": f"Bearer {shown}"}) as client:
                answers = {path: client.get(f"/api/v1/{path}") for path in paths} | {"metrics": client.get("/metrics")}
            assert answers["status"].status_code == (200 if shown == token else 401)
            texts |= {f"/{path} {shown == token}": answer.text for path, answer in answers.items()}
        assert httpx.get(f"http://{node.api}/api/v1/status?token={wrong}").status_code == 401
        if Path("/proc/self/cmdline").exists():
            texts["command line"] = Path(f"/proc/{node.process.pid}/cmdline").read_bytes().decode()
            texts["environment"] = Path(f"/proc/{node.process.pid}/environ").read_bytes().decode()
        assert node.stop() == 0
    finally:
        if node.process is not None:
            node.kill()
    texts |= {"log": node.log.read_text(), "said": "".join(node.said)}
    assert node.name in texts["log"], "the search does find what is there"
    forms = [token, wrong, token.encode().hex(), base64.b64encode(token.encode()).decode()[:40]]
    assert [(where, form) for where, text in texts.items() for form in forms if form in text] == []


def test_without_a_daemon_both_commands_say_so() -> None:
    for command in (("revoke", "beta", "--yes"), ("rotate-key",)):
        done = stagemesh(*command, "--node", "127.0.0.1:1")
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (5, "", 1)
        assert "no daemon answers" in done.stderr
