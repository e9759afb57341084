"""Keeps a quiet measurement with its conditions, so that a restart within a day does not measure again.

Age is counted on the clock that runs since the machine started, suspension included; a result from before the last start
is not used. Any other change of conditions (processor, cores, memory, versions) also makes it void. The file may be
deleted at any time; one that cannot be read or written only costs a measurement.
"""

import contextlib
import json
import os
import platform
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from stage_agent.probes.host import detected_memory_bytes, processor_name, usable_cores

_NAME = "node_benchmark.json"
_FORMAT = 1
_MAX_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class CachedBenchmark:
    """Figures of an earlier run and how old they are."""

    figures: dict[str, Any]
    age_us: int


def conditions() -> dict[str, Any]:
    """What must be equal for an old result to hold."""
    boot = "unknown"
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    return {
        "format": _FORMAT,
        "machine_start": boot,
        "processor": processor_name(),
        "cores": usable_cores(),
        "memory_bytes": detected_memory_bytes(),
        "python": platform.python_version(),
        "numpy": version("numpy"),
    }


def load_benchmark(cache_dir: Path, max_age_us: int) -> CachedBenchmark | None:
    """The stored result, if it was made under the present conditions and is young enough."""
    try:
        with (cache_dir / _NAME).open("rb") as file:
            document = json.loads(file.read(_MAX_BYTES))
        age_us = _uptime_us() - int(document["at_us"])
        figures = document["figures"]
        valid = document["conditions"] == conditions() and 0 <= age_us <= max_age_us and isinstance(figures, dict)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return CachedBenchmark(figures, age_us) if valid else None


def store_benchmark(cache_dir: Path, figures: dict[str, Any]) -> None:
    """Best effort, atomic: a cache that cannot be written is a cache that is empty."""
    document = {"conditions": conditions(), "at_us": _uptime_us(), "figures": figures}
    temporary = cache_dir / f".{_NAME}.{os.getpid()}"
    with contextlib.suppress(OSError):
        cache_dir.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(document, indent=1), "ascii")
        temporary.replace(cache_dir / _NAME)


def _uptime_us() -> int:
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime_ns(clock) // 1_000
