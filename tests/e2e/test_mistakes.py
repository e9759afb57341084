"""What a stranger gets wrong: each mistake is one line that says what, where and what to do, a non-zero exit, no debris."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from stage_agent.addresses import free_ports
from stage_agent.demo_model import write_demo_model

pytestmark = pytest.mark.timeout(120)


class Place:
    """One node's directory and configuration."""

    def __init__(self, root: Path, name: str) -> None:
        self.root = root / name
        self.root.mkdir()
        self.state = self.root / "state"
        self.config = self.root / "stagemesh.toml"
        self.port, self.api_port = free_ports(2)
        self.write()

    def write(self, extra: str = "") -> None:
        self.config.write_text(
            f'[node]\nname = "{self.root.name}"\nstate_dir = "{self.state}"\ncache_dir = "{self.root / "cache"}"\n'
            f'[listen]\nhost = "127.0.0.1"\nport = {self.port}\n[api]\nport = {self.api_port}\n'
            f"[probe]\nbenchmark = false\n{extra}"
        )

    def call(self, command: str, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return stagemesh(command, *arguments, "--config", str(self.config), stdin=stdin)

    def files(self) -> dict[str, bytes]:
        return {str(path.relative_to(self.root)): path.read_bytes() for path in self.root.rglob("*") if path.is_file()}


def stagemesh(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stage_agent", *arguments],
        input=stdin, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def assert_one_clear_line(done: subprocess.CompletedProcess[str], *words: str, code: int | None = None) -> None:
    lines = done.stderr.strip().splitlines()
    assert done.returncode != 0
    assert code is None or done.returncode == code, done.stderr
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("stagemesh: ")
    for word in words:
        assert word in lines[0], (word, lines[0])


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path, "alpha")


@pytest.fixture(scope="module")
def founded(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A node that founded a mesh and does not run."""
    founded = Place(tmp_path_factory.mktemp("founded"), "founder")
    assert founded.call("init").returncode == 0
    return founded


@pytest.fixture
def inviter(tmp_path: Path) -> Iterator[Place]:
    """A running node that founded a mesh."""
    inviter = Place(tmp_path, "inviter")
    assert inviter.call("init").returncode == 0
    with (inviter.root / "log").open("wb") as log:
        daemon = subprocess.Popen(
            [sys.executable, "-m", "stage_agent", "run", "--config", str(inviter.config)], stdout=log, stderr=log
        )
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                httpx.get(f"http://127.0.0.1:{inviter.api_port}/healthz")
                break
            except httpx.TransportError:
                assert daemon.poll() is None, (inviter.root / "log").read_text()
                time.sleep(0.05)
        yield inviter
        daemon.terminate()
        assert daemon.wait(20) == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[api]\nport = 'x'\n", ("api.port",)),
        ("[membership]\nprobe_intervall_us = 3\n", ("probe_intervall_us", "probe_interval_us")),
        ("[nodes]\n", ("nodes", "node")),
        ("[listen]\nport = 70000\n", ("listen.port", "65535")),
        ("this is not toml", ("stagemesh.toml",)),
        ("\x00\x01\x02", ("stagemesh.toml",)),
    ],
)
def test_a_broken_configuration_names_file_and_key(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    config = tmp_path / "stagemesh.toml"
    config.write_text(text)
    assert_one_clear_line(stagemesh("run", "--config", str(config)), "stagemesh.toml", *words, code=2)


def test_a_configuration_that_does_not_exist_is_named(tmp_path: Path) -> None:
    assert_one_clear_line(stagemesh("run", "--config", str(tmp_path / "none.toml")), "none.toml", code=2)


def test_running_before_joining_says_how_to_join(place: Place) -> None:
    assert_one_clear_line(place.call("run"), "stagemesh init", code=1)
    assert not place.state.exists() or not list(place.state.iterdir())


def test_joining_at_an_unreachable_address_leaves_nothing(tmp_path: Path, place: Place) -> None:
    other = Place(tmp_path, "beta")
    assert place.call("init").returncode == 0
    token = json.loads(place.call("invite", "--json").stdout)["token"]  # nobody runs there
    assert_one_clear_line(other.call("join", "-", stdin=token), "cannot reach", str(place.port), code=1)
    assert set(other.files()) == {"stagemesh.toml"}


@pytest.mark.parametrize("token", ["", "sm1_", "sm1_notatoken", "hello", "sm1_" + "A" * 300])
def test_what_is_not_a_token_is_refused(place: Place, token: str) -> None:
    assert_one_clear_line(place.call("join", "-", stdin=token), "token")
    assert set(place.files()) == {"stagemesh.toml"}


def test_a_token_works_once_and_a_changed_one_never(tmp_path: Path, inviter: Place) -> None:
    token = json.loads(inviter.call("invite", "--json").stdout)["token"]
    beta, gamma = Place(tmp_path, "beta"), Place(tmp_path, "gamma")
    changed = token[:-4] + ("AAAA" if not token.endswith("AAAA") else "BBBB")
    assert_one_clear_line(gamma.call("join", "-", stdin=changed))
    assert set(gamma.files()) == {"stagemesh.toml"}
    assert beta.call("join", "-", stdin=token).returncode == 0
    assert_one_clear_line(gamma.call("join", "-", stdin=token), "token")
    assert set(gamma.files()) == {"stagemesh.toml"}
    before = beta.files()
    assert_one_clear_line(beta.call("join", "-", stdin=token), "already")
    assert beta.files() == before


def test_init_never_overwrites(place: Place) -> None:
    assert place.call("init").returncode == 0
    before = place.files()
    assert_one_clear_line(place.call("init"), "already")
    assert place.files() == before


@pytest.mark.parametrize("kind", ["udp", "tcp", "api"])
def test_a_port_in_use_is_named(place: Place, kind: str) -> None:
    assert place.call("init").returncode == 0
    port = place.api_port if kind == "api" else place.port
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM if kind == "udp" else socket.SOCK_STREAM) as taken:
        taken.bind(("127.0.0.1", port))
        if kind != "udp":
            taken.listen()
        assert_one_clear_line(place.call("run"), str(port))


def test_a_second_daemon_on_one_state_directory_is_refused(inviter: Place) -> None:
    assert_one_clear_line(inviter.call("run"), str(inviter.state))


@pytest.mark.parametrize("size", [0, 3, 100, 40_000, 1_000_000])
def test_a_truncated_model_is_refused_before_anything_starts(tmp_path: Path, founded: Place, size: int) -> None:
    model = tmp_path / "model.gguf"
    write_demo_model(model)
    model.write_bytes(model.read_bytes()[:size])
    assert_one_clear_line(stagemesh("inspect", str(model)), "model.gguf", code=1)
    founded.write(f'[model]\npath = "{model}"\n')
    assert_one_clear_line(founded.call("run"), "model.gguf")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="mounting a small file system needs root")
@pytest.mark.parametrize("when", ["init", "join", "run"])
def test_a_full_disk_is_said_and_leaves_nothing_half_written(
    tmp_path: Path, place: Place, request: pytest.FixtureRequest, when: str
) -> None:
    inviter = request.getfixturevalue("inviter") if when == "join" else None
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(disk)], check=True)
    try:
        place.state = disk / "state"
        place.write()
        if when == "run":
            assert place.call("init").returncode == 0
        filler = disk / "filler"
        with filler.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(b"x" * 4096)
            except OSError:
                pass
        if inviter is not None:
            token = json.loads(inviter.call("invite", "--json").stdout)["token"]
            done = place.call("join", "-", stdin=token)
        else:
            done = place.call(when)
        assert_one_clear_line(done, "disk")
        if when != "run":
            assert [path.name for path in disk.rglob("*") if path.is_file()] == ["filler"]
        else:
            filler.unlink()
            assert_it_starts(place)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_damaged_state_is_set_aside_and_said_until_a_promise_is_on_disk_again(tmp_path: Path, place: Place) -> None:
    model = tmp_path / "model.gguf"
    write_demo_model(model)
    assert place.call("init").returncode == 0
    place.write("[election]\nsettle_us = 200_000\n")
    with running(place):
        pass
    (place.state / "state.db").write_bytes(b"x" * 8192)
    with running(place) as base:
        (node,) = httpx.get(f"{base}/api/v1/nodes").json()["nodes"]
        assert "amnesia" in node["degraded"]
        (told,) = events(base, "state_corrupt")
        (aside,) = place.state.glob("state.db.*corrupt*")
        assert aside.name in told["text"]
    # still so in the next process, which serves something: that takes a promise
    place.write(f'[election]\nsettle_us = 200_000\n[model]\npath = "{model}"\n[runtime]\nkind = "reference"\n')
    with running(place) as base:
        deadline = time.monotonic() + 30
        while not events(base, "state_recovered"):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    with running(place) as base:
        (node,) = httpx.get(f"{base}/api/v1/nodes").json()["nodes"]
        assert "amnesia" not in node["degraded"]


def events(base: str, kind: str) -> list[dict]:
    return [each for each in httpx.get(f"{base}/api/v1/events").json()["events"] if each["kind"] == kind]


def assert_it_starts(place: Place) -> None:
    """The identity survived the full disk: with room again the daemon runs."""
    with running(place):
        pass


@contextlib.contextmanager
def running(place: Place) -> Iterator[str]:
    """The daemon of ``place``, by the address of its API; it must end cleanly."""
    daemon = subprocess.Popen(
        [sys.executable, "-m", "stage_agent", "run", "--config", str(place.config)], stderr=subprocess.PIPE
    )
    deadline, base = time.monotonic() + 30, f"http://127.0.0.1:{place.api_port}"
    try:
        while True:
            try:
                assert httpx.get(f"{base}/healthz").status_code == 200
                break
            except httpx.TransportError:
                assert time.monotonic() < deadline
                assert daemon.poll() is None
                time.sleep(0.05)
        yield base
    finally:
        daemon.send_signal(signal.SIGTERM)
        daemon.communicate(timeout=20)
    assert daemon.returncode == 0
