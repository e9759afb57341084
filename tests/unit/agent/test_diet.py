"""The daemon's weight: what it must never load, and how much memory a node has that was just started."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from protocol.errors import DaemonUnreachable
from stage_agent.addresses import free_ports
from stage_agent.cli.client import get_json
from stage_agent.cli.main import run_paths

PEAK_MB = 76
"""70 were measured: 28 of them are shared libraries, 42 the process's own."""

HEAVY = (
    "numpy", "scipy", "matplotlib", "pandas", "simpy", "gguf",  # plans, benchmarks, scenarios
    "httpx", "httpcore",  # clients of engines
    "rich", "pygments", "typer", "click",  # the command line
    "importlib.metadata", "importlib.resources", "zipfile", "tempfile", "shutil", "gzip", "difflib", "urllib.error",
    "OpenSSL", "service_identity", "attr", "certifi", "idna",  # authorities, which nobody here asks
    "http.server", "socketserver", "urllib.request", "wsgiref", "html", "multiprocessing", "logging.config",  # servers
    "zeroconf", "pyopencl", "torch",  # extras
)  # fmt: skip
DAEMON = ("stage_agent.cli.main", "stage_agent.daemon")


@pytest.mark.parametrize(
    ("arguments", "paths"),
    [
        ("run", {}),
        ("run --config a.toml", {"--config": Path("a.toml")}),
        ("run --state-dir=s --config a.toml", {"--state-dir": Path("s"), "--config": Path("a.toml")}),
        ("run --help", None),
        ("run --config", None),
        ("run --config --state-dir", None),
        ("run --config a --config b", None),
        ("run --config=", None),
        ("run a.toml", None),
        ("run --debugging x", None),
        ("status", None),
        ("", None),
    ],
)
def test_only_a_plain_run_goes_past_the_command_lines_libraries(arguments: str, paths: dict[str, Path] | None) -> None:
    assert run_paths(arguments.split()) == paths


def test_the_daemon_does_not_load_what_most_nodes_never_need() -> None:
    program = (
        "import sys\n"
        "from config.lean import import_lean\n"
        "import_lean()\n"
        + "".join(f"import {name}\n" for name in DAEMON)
        + f"print(*(name for name in {HEAVY} if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only there the driver's library has one name")
def test_where_there_is_no_driver_the_package_that_talks_to_it_is_not_loaded() -> None:
    program = (
        "import ctypes, sys\n"
        "from stage_agent.probes.devices import nvidia_devices\n"
        "def missing(name): raise OSError(name)\n"
        "ctypes.CDLL = missing\n"
        "print(nvidia_devices(), 'pynvml' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["()", "False"]


def test_help_does_not_wait_for_what_only_some_commands_compute_with() -> None:
    program = (
        "import sys\n"
        "from stage_agent.cli.application import build_app\n"
        "build_app(['--help'])\n"
        "print(*(name for name in ('scipy', 'matplotlib', 'simpy', 'gguf', 'uvicorn') if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_a_plan_can_still_be_made_by_a_daemon_that_did_not_load_the_planner() -> None:
    program = (
        "import sys\n"
        "import stage_agent.node\n"
        "from stage_agent.planner import compute_plan\n"
        "from tests.unit.planner.builders import both, node, problem\n"
        "print(type(compute_plan(problem([node('a'), node('b')], both('a', 'b')))).__name__, 'numpy' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3]
    )
    assert done.stdout.split() == ["Plan", "True"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_node_that_was_just_started_and_measured_weighs_little(tmp_path: Path) -> None:
    port, api_port = free_ports(2)
    config = tmp_path / "stagemesh.toml"
    config.write_text(
        f"""
        node = {{ state_dir = "{tmp_path / "state"}", cache_dir = "{tmp_path / "cache"}" }}
        listen = {{ host = "127.0.0.1", port = {port} }}
        api = {{ port = {api_port} }}
        probe = {{ budget_us = 200000 }}
        """
    )
    stagemesh = [sys.executable, "-m", "stage_agent"]
    subprocess.run([*stagemesh, "init", "--config", str(config)], check=True, stdout=subprocess.DEVNULL)
    daemon = subprocess.Popen([*stagemesh, "run", "--config", str(config)], stderr=subprocess.DEVNULL)
    try:
        while not _answers(f"127.0.0.1:{api_port}"):
            assert daemon.poll() is None
            time.sleep(0.1)
        status = Path(f"/proc/{daemon.pid}/status").read_text()
    finally:
        daemon.terminate()
        daemon.wait(20)
    peak = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert peak is not None
    assert int(peak[1]) * 1_024 < PEAK_MB * 1_000_000


def _answers(api: str) -> bool:
    try:
        get_json(api, "/api/v1/status")
    except DaemonUnreachable:
        return False
    return True
