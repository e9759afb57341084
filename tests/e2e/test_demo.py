"""`stagemesh demo --once` as a person types it: three quarters of a minute, so at night. Its story: `test_mesh`."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(240)]


def test_the_demo_ends_with_code_0_shows_three_times_the_same_tokens_and_leaves_nothing(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "stage_agent", "demo", "--once"],
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "TMPDIR": str(scratch)},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    tokens = re.findall(r"^tokens (.+) …$", done.stdout, re.MULTILINE)
    assert len(tokens) == 3
    assert len(set(tokens)) == 1
    assert len(re.findall(r"measured \S+ ms  predicted \S+ ms  off by [+-]\d+%", done.stdout)) == 3
    assert "serving again" in done.stdout
    assert list(scratch.iterdir()) == [], "the agents' directories are removed"
    own = str(scratch).encode()
    assert not [each for each in Path("/proc").glob("[0-9]*/cmdline") if own in _command(each)], "nor is any agent"


def _command(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:  # that process has ended meanwhile
        return b""
