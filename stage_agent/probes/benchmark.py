"""The processor's benchmarks as one document of figures; as a program, the child that ``apart`` starts.

The program reads ``ProbeSettings`` as JSON from stdin and writes the figures as one line of JSON.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

from config.settings import ProbeSettings
from stage_agent.probes.bandwidth import measure_bandwidth
from stage_agent.probes.compute import measure_compute

BANDWIDTH_SHARE, COMPUTE_SHARE = 0.7, 0.2
"""Of the budget; the rest is for asking the system."""


def run_benchmark(probe: ProbeSettings, progress: Callable[[str, float], None]) -> dict[str, Any]:
    """Takes about ``probe.budget_us`` and up to a quarter of the free memory, in this process."""
    budget_s = probe.budget_us / 1e6
    progress("memory bandwidth", 0.0)
    bandwidth = measure_bandwidth(budget_s * BANDWIDTH_SHARE, probe.busy_load_milli)
    progress("compute", BANDWIDTH_SHARE)
    compute = measure_compute(budget_s * COMPUTE_SHARE, probe.busy_load_milli)
    return {
        "memory_bandwidth_bytes_per_s": bandwidth.bytes_per_s,
        "compute_flops_per_s": compute.flops_per_s,
        "buffer_bytes": bandwidth.buffer_bytes,
        "cache_bytes": bandwidth.cache_bytes,
        "runs": bandwidth.trial.runs + compute.trial.runs,
        "others_load_milli": max(bandwidth.trial.others_load_milli, compute.trial.others_load_milli),
        "busy": bandwidth.trial.busy or compute.trial.busy,
    }


if __name__ == "__main__":
    settings = ProbeSettings.model_validate_json(sys.stdin.buffer.read())
    sys.stdout.write(json.dumps(run_benchmark(settings, lambda _what, _fraction: None)) + "\n")
