"""Keeps quiet measurements with their conditions, so that a restart within a day does not measure again.

The processor's age is counted on the clock that runs since the machine started, suspension included; a result from before
the last start is not used. Any other change of conditions (processor, cores, memory, versions) also makes it void. What
accelerators do stays true until the machine has other ones or the engine's benchmark is another, however long that is: a
card that vanished from the plan after a day, because nobody measured it again, would take its memory with it.
The files may be deleted at any time; one that cannot be read or written only costs a measurement.
"""

import contextlib
import json
import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config.installed import installed_version
from config.settings import ProbeSettings
from stage_agent.probes.host import detected_memory_bytes, processor_name, usable_cores

_PROCESSOR, _ACCELERATORS = "node_benchmark.json", "accelerators.json"
_FORMAT = 1
_MAX_BYTES = 65_536
_MAX_DISPLAY_DEVICES = 64


@dataclass(frozen=True, slots=True)
class CachedBenchmark:
    """Figures of an earlier run and how old they are; an age from before the machine's start is not known."""

    figures: dict[str, Any]
    age_us: int | None


def conditions() -> dict[str, Any]:
    """What must be equal for an old result of the processor to hold."""
    return {
        "format": _FORMAT,
        "machine_start": _machine_start(),
        "processor": processor_name(),
        "cores": usable_cores(),
        "memory_bytes": detected_memory_bytes(),
        "python": platform.python_version(),
        "numpy": installed_version("numpy"),
    }


def accelerator_conditions(probe: ProbeSettings, root: Path = Path("/")) -> dict[str, Any]:
    """What must be equal for figures of accelerators to hold: the cards that the system sees, and who is asked."""
    return {
        "format": _FORMAT,
        "processor": processor_name(),
        "display_devices": _display_devices(root),
        "engine_bench": [probe.engine_bench, probe.engine_bench_model] if probe.engine_bench_model else [],
    }


def load_benchmark(cache_dir: Path, max_age_us: int) -> CachedBenchmark | None:
    """The processor's stored result, if it was made under the present conditions and is young enough."""
    cached = _load(cache_dir / _PROCESSOR, conditions())
    return cached if cached is not None and cached.age_us is not None and cached.age_us <= max_age_us else None


def store_benchmark(cache_dir: Path, figures: dict[str, Any]) -> None:
    """Best effort, atomic: a cache that cannot be written is a cache that is empty."""
    _store(cache_dir / _PROCESSOR, conditions(), figures)


def load_accelerators(cache_dir: Path, probe: ProbeSettings) -> CachedBenchmark | None:
    """What was measured on the cards that are still there."""
    return _load(cache_dir / _ACCELERATORS, accelerator_conditions(probe))


def store_accelerators(cache_dir: Path, probe: ProbeSettings, figures: dict[str, Any]) -> None:
    """As ``store_benchmark``."""
    _store(cache_dir / _ACCELERATORS, accelerator_conditions(probe), figures)


def _load(path: Path, present: dict[str, Any]) -> CachedBenchmark | None:
    try:
        with path.open("rb") as file:
            document = json.loads(file.read(_MAX_BYTES))
        age_us = _uptime_us() - int(document["at_us"])
        figures = document["figures"]
        valid = document["conditions"] == present and isinstance(figures, dict)
        dated = document["machine_start"] == _machine_start() and age_us >= 0
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return CachedBenchmark(figures, age_us if dated else None) if valid else None


def _store(path: Path, present: dict[str, Any], figures: dict[str, Any]) -> None:
    document = {"conditions": present, "machine_start": _machine_start(), "at_us": _uptime_us(), "figures": figures}
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(document, indent=1), "ascii")
        temporary.replace(path)


def _machine_start() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    return "unknown"


def _display_devices(root: Path) -> list[str]:
    """Vendor and device of every display or accelerator on the PCI bus; empty where the system does not say."""
    found = []
    with contextlib.suppress(OSError):
        for device in (root / "sys/bus/pci/devices").iterdir():
            with contextlib.suppress(OSError):
                words = [(device / name).read_text("ascii").strip() for name in ("class", "vendor", "device")]
                if words[0].startswith(("0x03", "0x12")):
                    found.append(":".join(words[1:]))
    return sorted(found)[:_MAX_DISPLAY_DEVICES]


def _uptime_us() -> int:
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime_ns(clock) // 1_000
