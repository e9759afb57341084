"""Image, compose mesh and entrypoint: non-root, read-only, and a mesh that forms itself."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from config.load import load_settings
from tests.unit.deploy.places import DEPLOY, ROOT

AGENTS = ("alpha", "beta", "gamma")


def compose():
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def test_the_image_is_multi_stage_runs_as_a_number_and_checks_itself():
    text = (ROOT / "Dockerfile").read_text()
    assert len(re.findall(r"^FROM ", text, re.MULTILINE)) == 2
    last = text[text.rindex("\nFROM ") :]
    assert re.search(r"^USER 10001:10001$", last, re.MULTILINE)
    assert "HEALTHCHECK" in last
    assert "/healthz" in last
    assert "PYTHONSAFEPATH=1" in last
    assert "check_import_names.py" in text
    assert "COPY . " not in text


def test_everything_that_the_image_copies_is_let_through_and_nothing_else():
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = re.findall(r"^COPY (?!--from)(?:--\S+ )*(.+) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    sources = [source for line in copied for source in line.split()]
    assert "pyproject.toml" in sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert any(source == entry or source.startswith(f"{entry}/") for entry in allowed), source
    assert all(any(s == entry or s.startswith(f"{entry}/") for s in sources) for entry in allowed)


@pytest.mark.parametrize("name", AGENTS)
def test_every_agent_is_read_only_without_capabilities_and_keeps_its_state(name):
    service = compose()["services"][name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    mounted = {volume.split(":")[1] for volume in service["volumes"]}
    assert {"/var/lib/stagemesh", "/var/cache/stagemesh", "/invitations"} <= mounted


@pytest.mark.parametrize("name", AGENTS)
def test_every_agents_environment_is_a_configuration_that_holds(name):
    environment = {key: str(value) for key, value in compose()["services"][name]["environment"].items()}
    settings = load_settings(environment=environment)
    assert settings.node.name == name
    assert settings.listen.advertise == (f"{name}:7946",)
    assert settings.api.token_file == "/run/secrets/api-token"
    assert "api-token" in compose()["services"][name]["secrets"]


def test_one_founds_the_mesh_for_all_the_others_and_they_wait_for_it():
    services = compose()["services"]
    assert services["alpha"]["environment"]["STAGEMESH_INVITE_FOR"].split() == ["beta", "gamma"]
    for name in ("beta", "gamma"):
        assert services[name]["environment"]["STAGEMESH_JOIN_AS"] == name
        assert services[name]["depends_on"]["alpha"]["condition"] == "service_healthy"


def test_only_loopback_ports_of_the_host_are_opened():
    for service in compose()["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


def test_named_volumes_and_files_exist():
    document = compose()
    for service in document["services"].values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert source in document["volumes"] or source == "./models" or (DEPLOY / source).is_file(), volume


FAKE = """#!/bin/sh
echo "$@" >>"$CALLS"
case "$1" in
init) : >"$STATE_DIRECTORY/mesh.json" ;;
invite) echo "sm1_token"; echo; echo "valid once" ;;
join)
    cat >>"$CALLS"
    [ -e "$CALLS.refuse" ] && { rm "$CALLS.refuse"; exit 1; }
    : >"$STATE_DIRECTORY/mesh.json" ;;
esac
"""


def start(tmp_path: Path, *arguments, **environment):
    """Run the entrypoint with a program that writes down how it was called; the calls, and the exit code."""
    bin_directory = tmp_path / "bin"
    for name in ("bin", "state", "invitations"):
        (tmp_path / name).mkdir(exist_ok=True)
    (bin_directory / "stagemesh").write_text(FAKE)
    (bin_directory / "stagemesh").chmod(0o755)
    (bin_directory / "sleep").write_text("#!/bin/sh\n")
    (bin_directory / "sleep").chmod(0o755)
    calls = tmp_path / "calls"
    calls.write_text("")
    answer = subprocess.run(
        ["sh", str(DEPLOY / "container" / "entrypoint.sh"), *arguments],
        env={
            "PATH": f"{bin_directory}:{os.environ['PATH']}",
            "CALLS": str(calls),
            "STATE_DIRECTORY": str(tmp_path / "state"),
            "STAGEMESH_INVITATIONS": str(tmp_path / "invitations"),
            **environment,
        },
        check=False,
        timeout=60,
        capture_output=True,
        text=True,
    )
    return calls.read_text().splitlines(), answer.returncode


def test_the_founder_makes_the_mesh_once_and_one_private_token_per_name(tmp_path):
    calls, code = start(tmp_path, "run", STAGEMESH_INVITE_FOR="beta gamma")
    assert (calls, code) == (["init", "invite --ttl 1d", "invite --ttl 1d", "run"], 0)
    for name in ("beta", "gamma"):
        token = tmp_path / "invitations" / f"{name}.token"
        assert token.read_text() == "sm1_token\n"
        assert token.stat().st_mode & 0o077 == 0
    (tmp_path / "invitations" / "beta.joined").touch()
    calls, _ = start(tmp_path, "run", STAGEMESH_INVITE_FOR="beta gamma")
    assert calls == ["invite --ttl 1d", "run"]
    assert sorted(entry.name for entry in (tmp_path / "invitations").iterdir()) == [
        "beta.joined",
        "beta.token",
        "gamma.token",
    ]


def test_a_newcomer_tries_until_it_may_join_and_burns_the_token(tmp_path):
    (tmp_path / "invitations").mkdir()
    (tmp_path / "invitations" / "beta.token").write_text("sm1_token\n")
    (tmp_path / "calls.refuse").touch()
    calls, code = start(tmp_path, "run", STAGEMESH_JOIN_AS="beta")
    assert (calls, code) == (["join -", "sm1_token", "join -", "sm1_token", "run"], 0)
    assert [entry.name for entry in (tmp_path / "invitations").iterdir()] == ["beta.joined"]
    assert start(tmp_path, "run", STAGEMESH_JOIN_AS="beta") == (["run"], 0)


def test_a_newcomer_without_a_token_gives_up_in_the_end(tmp_path):
    assert start(tmp_path, "run", STAGEMESH_JOIN_AS="beta") == ([], 1)


def test_other_commands_prepare_nothing(tmp_path):
    assert start(tmp_path, "status", "--json", STAGEMESH_INVITE_FOR="beta") == (["status --json"], 0)


def distribution(site: Path, name: str, *packages: str) -> None:
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "top_level.txt").write_text("\n".join(packages) + "\n")
    for package in packages:
        (site / package).mkdir(exist_ok=True)
        (site / package / "__init__.py").touch()


def check_names(site: Path):
    script = DEPLOY / "check_import_names.py"
    program = (
        f"import sys, runpy; sys.path.insert(0, {str(site)!r}); runpy.run_path({str(script)!r}, run_name='__main__')"
    )
    isolated = [sys.executable, "-S", "-E", "-c", program]
    return subprocess.run(isolated, check=False, cwd=site, capture_output=True, text=True, timeout=60)


OURS = ("config", "protocol", "coordinator", "stage_agent")


def test_an_image_where_the_four_names_are_ours_alone_passes(tmp_path):
    distribution(tmp_path, "stagemesh", *OURS)
    distribution(tmp_path, "httpx", "httpx")
    answer = check_names(tmp_path)
    assert (answer.returncode, answer.stderr) == (0, "")


def test_an_image_where_another_project_answers_to_one_fails_and_names_it(tmp_path):
    distribution(tmp_path, "stagemesh", *OURS)
    distribution(tmp_path, "python-config", "config")
    answer = check_names(tmp_path)
    assert answer.returncode == 1
    assert "config: provided by ['python-config', 'stagemesh']" in answer.stderr


def test_an_image_that_lacks_one_of_the_names_fails(tmp_path):
    distribution(tmp_path, "stagemesh", *OURS[:3])
    answer = check_names(tmp_path)
    assert answer.returncode == 1
    assert "stage_agent" in answer.stderr
