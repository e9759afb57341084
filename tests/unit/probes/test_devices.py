"""Accelerators are optional: absent packages and drivers are no error, present ones are described honestly."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from protocol.rows import DeviceFact
from stage_agent.probes.devices import nvidia_devices
from stage_agent.probes.opencl import opencl_devices


class Driver(ModuleType):
    """The part of ``pynvml`` that is used, for a machine with the given boards."""

    class NVMLError(Exception):
        pass

    NVML_CLOCK_MEM = 2

    def __init__(self, boards: list[dict[str, object]], *, installed: bool = True) -> None:
        super().__init__("pynvml")
        self.boards, self.installed, self.open = boards, installed, 0

    def nvmlInit(self) -> None:
        if not self.installed:
            raise self.NVMLError("Driver Not Loaded")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.boards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, object]:
        return self.boards[index]

    def nvmlDeviceGetName(self, board: dict[str, object]) -> object:
        return board["name"]

    def nvmlDeviceGetMemoryInfo(self, board: dict[str, object]) -> SimpleNamespace:
        return SimpleNamespace(total=board["memory"])

    def nvmlDeviceGetMaxClockInfo(self, board: dict[str, object], kind: int) -> object:
        assert kind == self.NVML_CLOCK_MEM
        if "clock" not in board:
            raise self.NVMLError("Not Supported")
        return board["clock"]

    def nvmlDeviceGetMemoryBusWidth(self, board: dict[str, object]) -> object:
        return board["width"]


def test_a_board_is_described_by_its_memory_and_the_vendors_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver([{"name": b"NVIDIA GeForce RTX 4090", "memory": 25_757_220_864, "clock": 10_501, "width": 384}])
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    (board,) = nvidia_devices()
    assert board == DeviceFact(
        name="NVIDIA GeForce RTX 4090",
        kind="cuda",
        memory_bytes=25_757_220_864,
        memory_bandwidth_bytes_per_s=1_008_096_000_000,
        source="spec",
    )
    assert driver.open == 0


def test_a_board_that_hides_its_clock_has_no_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Driver([{"name": "Tegra", "memory": 8}]))
    (board,) = nvidia_devices()
    assert (board.memory_bandwidth_bytes_per_s, board.source) == (None, "unknown")


def test_without_package_or_driver_there_are_no_boards_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Driver([], installed=False))
    assert nvidia_devices() == ()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvidia_devices() == ()
    monkeypatch.setitem(sys.modules, "pyopencl", None)
    assert opencl_devices() == ()


def test_the_opencl_path_measures_a_software_device_where_one_is_installed() -> None:
    pytest.importorskip("pyopencl", reason="install pyopencl[pocl] to run the accelerator code on the processor")
    devices = opencl_devices(software=True)
    assert devices
    for device in devices:
        assert device.kind == "cpu"
        assert device.source == "measured"
        assert 10**7 < (device.memory_bandwidth_bytes_per_s or 0) < 10**13
        assert 10**7 < (device.compute_flops_per_s or 0) < 10**14
