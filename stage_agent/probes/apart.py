"""The benchmarks in a short-lived process of their own: their buffers and numpy never belong to the daemon.

Measured in the daemon, the buffer of four caches made a resident peak of 286 MB of which the allocator kept a part, and
numpy stayed with every node although only a coordinator needs it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from config.errors import StagemeshError
from config.settings import ProbeSettings

_PROGRAM = "stage_agent.probes.benchmark"
_ROOT = Path(__file__).parents[2]
_GRACE_S = 30.0
"""For the interpreter's start and the system's answers, on a machine that does other things."""
_MAX_OUTPUT = 65_536


class BenchmarkFailed(StagemeshError):  # noqa: N818 - named like the other failures of measurements
    """The child gave no figures; nothing was kept."""


def benchmark_apart(probe: ProbeSettings) -> dict[str, Any]:
    """The figures of ``benchmark.run_benchmark``; blocks for about ``probe.budget_us``. Raises ``BenchmarkFailed``."""
    # -P: a package called numpy in the directory where the daemon was started is not ours.
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH", ""))))
    try:
        done = subprocess.run(  # noqa: S603 - our own program, no arguments of others
            [sys.executable, "-P", "-m", _PROGRAM],
            input=probe.model_dump_json().encode(),
            capture_output=True,
            check=False,
            timeout=probe.budget_us / 1e6 + _GRACE_S,
            env={**os.environ, "PYTHONPATH": path},
        )
    except OSError as error:
        raise BenchmarkFailed(f"the benchmark did not start: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise BenchmarkFailed(f"the benchmark did not end within {error.timeout:.0f} s") from error
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
        raise BenchmarkFailed(f"the benchmark ended with {done.returncode}: {last[0][:200]}")
    try:
        figures = json.loads(done.stdout[:_MAX_OUTPUT])
    except ValueError as error:
        raise BenchmarkFailed("the benchmark's figures cannot be read") from error
    return dict(figures)
