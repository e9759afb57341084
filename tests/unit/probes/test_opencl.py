"""The accelerator benchmark: its arithmetic on a device with a script, its kernels on a software device."""

from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from config.settings import ProbeSettings, RuntimeSettings, Settings
from protocol.rows import DeviceFact
from stage_agent.probes import opencl
from stage_agent.probes.measure import measure_node

MIB = 1024 * 1024
QUICK = ProbeSettings(budget_us=200_000, busy_load_milli=1_000_000)
SHAPED_SPEED = {"memory_bandwidth_bytes_per_s": 10**10, "compute_flops_per_s": 10**11}


def card(**changes: Any) -> SimpleNamespace:
    described = {
        "global_mem_cache_size": 6 * MIB, "global_mem_size": 24_576 * MIB, "max_mem_alloc_size": 6_144 * MIB,
        "max_compute_units": 84, "host_unified_memory": False,
    }  # fmt: skip
    return SimpleNamespace(**(described | changes))


class Driver:
    """The part of ``pyopencl`` that a measurement uses; kernels take the scripted nanoseconds of the device's own clock."""

    mem_flags = SimpleNamespace(READ_ONLY=1, WRITE_ONLY=2)

    def __init__(self, *times_ns: int) -> None:
        self.times, self.clock, self.buffers = cycle(times_ns), 0, list[int]()
        self.arguments: tuple[Any, ...] = ()
        self.launched: list[tuple[int, ...]] = []

    def Buffer(self, _context: object, _flags: int, size: int) -> bytes:
        self.buffers.append(size)
        return b""

    def enqueue_fill_buffer(self, *_: object) -> Any:
        return SimpleNamespace(wait=lambda: None)

    def Kernel(self, _program: object, name: str) -> Any:
        assert name == "stream_sum"
        return SimpleNamespace(set_args=lambda *given: setattr(self, "arguments", given))

    def enqueue_nd_range_kernel(self, _queue: object, _kernel: object, items: tuple[int, ...], _group: None) -> Any:
        self.launched.append(items)
        start, self.clock = self.clock, self.clock + next(self.times)
        return SimpleNamespace(wait=lambda: None, profile=SimpleNamespace(start=start, end=self.clock))


def trial(driver: Driver, size: int, items: int, busy_load_milli: int = 250) -> Any:
    queue = SimpleNamespace(context=None)
    return opencl.bandwidth_trial(driver, queue, None, size, items, busy_load_milli)


def test_bandwidth_is_the_whole_buffer_over_the_best_time_by_the_devices_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stage_agent.probes.trial.others_load_milli", lambda *_: 0)
    driver = Driver(900_000, 600_000, 500_000, 700_000)
    measured = trial(driver, 512 * MIB, 65_536)
    assert driver.buffers == [512 * MIB, 4 * 65_536]
    assert int(driver.arguments[2]) * 65_536 * 16 == 512 * MIB, "every byte is read once"
    assert set(driver.launched) == {(65_536,)}
    assert int(512 * MIB / measured.best_s) == pytest.approx(1_073_741_824_000, rel=1e-6)
    assert not measured.busy


def test_a_device_measured_while_others_work_says_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stage_agent.probes.trial.others_load_milli", lambda *_: 900)
    measured = trial(Driver(50_000_000), 256 * MIB, 65_536)
    assert (measured.busy, measured.others_load_milli) == (True, 900)
    assert measured.runs == 20, "one second of the device's time was spent in search of a quiet run"


def test_the_buffer_is_four_caches_of_the_device_within_its_memory() -> None:
    def size(**changes: Any) -> int:
        told, items = opencl.shape_of(card(**changes), software=False)
        assert told % (items * 16) == 0, "all items read equally much"
        return told

    row = 84 * 1_024 * 16
    assert 256 * MIB <= size() < 256 * MIB + row
    assert 384 * MIB <= size(global_mem_cache_size=96 * MIB) < 384 * MIB + row
    assert 192 * MIB - row < size(global_mem_cache_size=96 * MIB, max_mem_alloc_size=192 * MIB) <= 192 * MIB
    assert 128 * MIB - row < size(global_mem_size=512 * MIB) <= 128 * MIB
    assert 2_048 * MIB - row < size(global_mem_cache_size=1_024 * MIB) <= 2_048 * MIB


def test_the_summing_kernel_reads_every_element_once() -> None:
    pyopencl = pytest.importorskip("pyopencl", reason="install pyopencl[pocl] to run the accelerator code")
    context = pyopencl.create_some_context(interactive=False)
    queue = pyopencl.CommandQueue(context)
    items, per_item = 256, 24
    numbers = np.arange(items * per_item * 4, dtype=np.float32) % 251
    data = pyopencl.Buffer(context, pyopencl.mem_flags.COPY_HOST_PTR, hostbuf=numbers)
    sums = np.zeros(items, dtype=np.float32)
    out = pyopencl.Buffer(context, pyopencl.mem_flags.WRITE_ONLY, sums.nbytes)
    kernel = pyopencl.Kernel(pyopencl.Program(context, opencl.SOURCE).build(), "stream_sum")
    kernel(queue, (items,), None, data, out, np.uint32(per_item))
    pyopencl.enqueue_copy(queue, sums, out).wait()
    expected = numbers.reshape(per_item, items, 4).sum(axis=(0, 2))
    assert np.array_equal(sums, expected)


def test_a_software_device_is_measured_where_one_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyopencl", reason="install pyopencl[pocl] to run the accelerator code on the processor")
    monkeypatch.setattr(opencl, "MIN_BUFFER_BYTES", 32 * MIB)
    monkeypatch.setattr(opencl, "MAX_BUFFER_BYTES", 64 * MIB)
    found = opencl.opencl_devices(1_000_000, software=True)
    assert found
    for device, measured_under in ((each.fact, each.conditions) for each in found):
        assert (device.kind, device.source) == ("cpu", "measured")
        assert 10**7 < (device.memory_bandwidth_bytes_per_s or 0) < 10**13
        assert 10**7 < (device.compute_flops_per_s or 0) < 10**14
        assert measured_under is not None
        assert measured_under.buffer_bytes <= 64 * MIB
        assert (measured_under.busy, measured_under.runs >= 2) == (False, True)


def cards(*, busy: bool = False, buffer_bytes: int = 512 * MIB) -> dict[str, Any]:
    """What the accelerators' process says."""
    fact = DeviceFact(name="Radeon", kind="rocm", memory_bytes=24 * 10**9, source="measured", **SHAPED_SPEED)
    conditions = opencl.Conditions("Radeon", buffer_bytes, 96 * MIB, 10, 900 if busy else 0, busy)
    return {"opencl": [fact.model_dump()], "opencl_trials": [opencl.asdict(conditions)]}


@pytest.mark.parametrize(
    ("said", "note", "kept"),
    [
        (cards(), None, True),
        (cards(busy=True), "benchmark_busy", False),
        (cards(buffer_bytes=256 * MIB), "benchmark_cache_suspected", True),
    ],
)
def test_a_cards_figures_are_noted_and_kept_as_the_processors_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: dict[str, Any], note: str | None, kept: bool
) -> None:
    quiet = {**SHAPED_SPEED, "buffer_bytes": 2**28, "cache_bytes": 2**25, "busy": False}
    monkeypatch.setattr("stage_agent.probes.measure.benchmark_apart", lambda _: quiet)
    monkeypatch.setattr("stage_agent.probes.measure.accelerators_apart", lambda _: dict(said))
    facts = measure_node(Settings(probe=QUICK, runtime=RuntimeSettings(kind="llama_cpp")), tmp_path)
    assert facts.notes == ((note,) if note else ())
    assert facts.detected_memory_bytes == 24 * 10**9
    assert (tmp_path / "accelerators.json").exists() == kept
