"""What the machine says of itself, read from a made-up /proc and /sys."""

from pathlib import Path

import psutil
import pytest

from stage_agent.probes.host import LoadSample, detected_memory_bytes, last_level_cache_bytes, others_load_milli
from stage_agent.probes.lag import LagMeter
from stage_agent.probes.suspend import SuspendMeter

MIB = 1024 * 1024


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_without_control_groups_the_installed_memory_counts(tmp_path: Path) -> None:
    assert detected_memory_bytes(tmp_path) == psutil.virtual_memory().total


def test_a_container_limit_on_any_level_bounds_the_memory(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/mesh.slice/agent.service\n")
    write(tmp_path, "sys/fs/cgroup/mesh.slice/agent.service/memory.max", "max\n")
    write(tmp_path, "sys/fs/cgroup/mesh.slice/memory.max", f"{512 * MIB}\n")
    assert detected_memory_bytes(tmp_path) == 512 * MIB
    write(tmp_path, "sys/fs/cgroup/mesh.slice/agent.service/memory.max", f"{256 * MIB}\n")
    assert detected_memory_bytes(tmp_path) == 256 * MIB


def test_the_first_version_of_control_groups_is_understood_and_its_no_limit_ignored(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "5:cpu:/\n4:memory:/docker/abc\n0::/\n")
    write(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert detected_memory_bytes(tmp_path) == psutil.virtual_memory().total
    write(tmp_path, "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes", f"{128 * MIB}\n")
    assert detected_memory_bytes(tmp_path) == 128 * MIB


def test_the_largest_cache_counts_and_a_silent_system_gets_an_assumption(tmp_path: Path) -> None:
    assert last_level_cache_bytes(tmp_path) == 32 * MIB
    write(tmp_path, "sys/devices/system/cpu/cpu0/cache/index0/size", "48K\n")
    write(tmp_path, "sys/devices/system/cpu/cpu0/cache/index3/size", "16M\n")
    assert last_level_cache_bytes(tmp_path) == 16 * MIB


def test_load_is_what_others_used_of_the_cores() -> None:
    before = LoadSample(10.0, 100.0, 5.0)
    assert others_load_milli(before, LoadSample(11.0, 102.0, 6.0), cores=4) == 250
    assert others_load_milli(before, LoadSample(11.0, 101.0, 6.5), cores=4) == 0


def test_a_late_loop_is_degraded_then_overloaded_and_recovers_when_the_window_has_passed() -> None:
    meter = LagMeter()
    assert meter.level(0) == "ok"
    meter.record(150_000, 1_000_000)
    assert meter.level(1_000_000) == "ok"
    meter.record(300_000, 1_100_000)
    meter.record(1_000, 1_200_000)
    assert (meter.lag_us(1_300_000), meter.level(1_300_000)) == (300_000, "degraded")
    meter.record(1_500_000, 2_000_000)
    assert meter.level(3_900_000) == "overloaded"
    assert meter.level(4_100_001) == "ok"


@pytest.mark.parametrize(("slept_us", "reported_us"), [(0, 0), (4_999_999, 0), (3_600_000_000, 3_600_000_000)])
def test_a_suspension_is_reported_once_and_short_naps_are_not(slept_us: int, reported_us: int) -> None:
    offsets = iter([7_000_000, 7_000_000 + slept_us, 7_000_000 + slept_us])
    meter = SuspendMeter(lambda: next(offsets))
    assert meter.gap_us() == reported_us
    assert meter.gap_us() == 0


def test_this_machine_did_not_sleep_between_two_calls() -> None:
    assert SuspendMeter().gap_us() == 0
