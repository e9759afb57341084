"""What this machine has: memory (a container's limit respected), cores, caches; and how busy others keep it."""

import contextlib
import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

ASSUMED_CACHE_BYTES = 32 * 1024 * 1024
"""Last-level cache when the system does not say."""
_UNLIMITED = 2**60
"""cgroup v1 says "no limit" with a number near 2**63."""


def detected_memory_bytes(root: Path = Path("/")) -> int:
    """Installed memory, or the smallest limit of this process's control groups when that is less."""
    return min([psutil.virtual_memory().total, *_group_limits(root)])


def available_memory_bytes() -> int:
    """What could be allocated now without swapping."""
    return min(psutil.virtual_memory().available, detected_memory_bytes())


def usable_cores() -> int:
    """Cores this process may run on."""
    with contextlib.suppress(AttributeError):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def last_level_cache_bytes(root: Path = Path("/")) -> int:
    """The largest cache that core 0 reaches, as the system reports it; on virtual machines that is often the host's."""
    sizes = [ASSUMED_CACHE_BYTES]
    for path in (root / "sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with contextlib.suppress(OSError, ValueError):
            sizes.append(_cache_size(path.read_text("ascii").strip()))
    return max(sizes[1:] or sizes)


def processor_name(root: Path = Path("/")) -> str:
    """For people and as a condition of cached results."""
    with contextlib.suppress(OSError):
        for line in (root / "proc/cpuinfo").read_text("utf-8", "replace").splitlines():
            if line.lower().startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _cache_size(text: str) -> int:
    unit = {"K": 1024, "M": 1024**2, "G": 1024**3}.get(text[-1:].upper(), 1)
    return int(text.rstrip("KMGkmg")) * unit


def _group_limits(root: Path) -> list[int]:
    """Limits from this process's group up to the root, for cgroup v2 and the v1 memory controller."""
    limits = []
    try:
        lines = (root / "proc/self/cgroup").read_text("ascii", "replace").splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, group = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            base, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            base, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        relative = Path(group.lstrip("/"))
        for directory in (base / relative, *(base / parent for parent in relative.parents), base):
            with contextlib.suppress(OSError, ValueError):
                limits.append(int((directory / name).read_text("ascii").strip()))
    return [limit for limit in limits if 0 < limit < _UNLIMITED]


@dataclass(frozen=True, slots=True)
class LoadSample:
    """Processor time so far, in core-seconds."""

    at_s: float
    machine_busy_s: float
    own_s: float


def sample_load() -> LoadSample:
    """One reading; two of them give ``others_load_milli``. Time stolen by a hypervisor counts as busy."""
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    own = time.process_time()
    return LoadSample(time.monotonic(), sum(times[:8]) - idle, own)


def others_load_milli(before: LoadSample, after: LoadSample, cores: int) -> int:
    """The share of ``cores`` that everybody but this process used in between, in thousandths."""
    elapsed = max(after.at_s - before.at_s, 1e-3)
    others = (after.machine_busy_s - before.machine_busy_s) - (after.own_s - before.own_s)
    return max(0, round(1_000 * others / (elapsed * cores)))
