"""The unit file: systemd understands every line of it, and it exposes little."""

import re
import shutil
import subprocess

import pytest

from tests.unit.deploy.places import DEPLOY

UNIT = DEPLOY / "stagemesh.service"
MAX_EXPOSURE = 2.5

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


def analyze(tmp_path, text, *arguments):
    """Run systemd-analyze on ``text`` as a unit whose program exists here."""
    unit = tmp_path / "stagemesh.service"
    unit.write_text(text.replace("/opt/stagemesh/bin/stagemesh", shutil.which("true") or "/bin/true"))
    return subprocess.run(
        ["systemd-analyze", *arguments, str(unit)], check=False, capture_output=True, text=True, timeout=60
    )


@needs_systemd
def test_systemd_understands_every_line(tmp_path):
    assert analyze(tmp_path, UNIT.read_text(), "verify").stderr == ""


@needs_systemd
@pytest.mark.parametrize(
    ("right", "wrong"), [("WatchdogSec=30", "WatchdogSecs=30"), ("ProtectSystem=strict", "ProtectSystem=strictly")]
)
def test_a_line_that_systemd_does_not_understand_would_be_noticed(tmp_path, right, wrong):
    text = UNIT.read_text()
    assert right in text
    assert analyze(tmp_path, text.replace(right, wrong), "verify").stderr != ""


@needs_systemd
def test_the_exposure_is_low(tmp_path):
    answer = analyze(tmp_path, UNIT.read_text(), "security", "--offline=true", "--no-pager")
    match = re.search(r"Overall exposure level for \S+: ([0-9.]+)", answer.stdout)
    assert match is not None, answer.stdout + answer.stderr
    assert float(match.group(1)) <= MAX_EXPOSURE


def test_what_the_agent_relies_on_is_there():
    lines = set(UNIT.read_text().splitlines())
    for line in (
        "Type=notify",
        "WatchdogSec=30",
        "DynamicUser=yes",
        "StateDirectory=stagemesh",
        "CacheDirectory=stagemesh",
        "RestartPreventExitStatus=2 6",
        "ExecReload=/bin/sh -c 'kill -HUP ${MAINPID}'",
    ):
        assert line in lines
    assert any(line.startswith("Environment=") and "PYTHONSAFEPATH=1" in line for line in lines)
