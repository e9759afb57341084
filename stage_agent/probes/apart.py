"""The benchmarks in a short-lived process of their own: their buffers and numpy never belong to the daemon.

Measured in the daemon, the buffer of four caches made a resident peak of 286 MB of which the allocator kept a part, and
numpy stayed with every node although only a coordinator needs it.
"""

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from config.settings import ProbeSettings
from stage_agent.probes.child import BenchmarkFailed, output_of

_PROGRAM, _ACCELERATORS_PROGRAM = "stage_agent.probes.benchmark", "stage_agent.probes.opencl"
_ROOT = Path(__file__).parents[2]
_GRACE_S = 30.0
"""For the interpreter's start and the system's answers, on a machine that does other things."""
_ACCELERATORS_S = 60.0
"""The first compilation for a device takes seconds; a driver that hangs must not keep a daemon from starting."""


def benchmark_apart(probe: ProbeSettings) -> dict[str, Any]:
    """The figures of ``benchmark.run_benchmark``; blocks for about ``probe.budget_us``. Raises ``BenchmarkFailed``."""
    return dict(_apart(_PROGRAM, probe.model_dump_json(), probe.budget_us / 1e6 + _GRACE_S))


def accelerators_apart(probe: ProbeSettings) -> dict[str, Any]:
    """``opencl.run_accelerators``; blocks for seconds. Raises ``BenchmarkFailed``: drivers can crash.

    Nothing is started when ``pyopencl`` is not installed.
    """
    if find_spec("pyopencl") is None:
        return {"opencl": [], "opencl_trials": []}
    return dict(_apart(_ACCELERATORS_PROGRAM, probe.model_dump_json(), _ACCELERATORS_S))


def _apart(program: str, asked: str, limit_s: float) -> Any:
    """Run one of our modules as a program: ``asked`` on its stdin, JSON on its stdout."""
    # -P: a package called numpy in the directory where the daemon was started is not ours.
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH", ""))))
    command = [sys.executable, "-P", "-m", program]
    said = output_of(
        "the benchmark", command, limit_s=limit_s, asked=asked, environment={**os.environ, "PYTHONPATH": path}
    )
    try:
        return json.loads(said)
    except ValueError as error:
        raise BenchmarkFailed("the benchmark's figures cannot be read") from error
