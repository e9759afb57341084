"""Accelerators are optional: absent packages and drivers are no error, present ones are described honestly."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from protocol.rows import DeviceFact
from stage_agent.probes.devices import nvidia_devices
from stage_agent.probes.opencl import opencl_devices


class Driver(ModuleType):
    """The part of ``pynvml`` that is used, for a machine with the given boards."""

    class NVMLError(Exception):
        pass

    NVML_CLOCK_MEM = 2

    def __init__(self, boards: list[dict[str, Any]], *, installed: bool = True) -> None:
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

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:
        return self.boards[index]

    def nvmlDeviceGetName(self, board: dict[str, Any]) -> object:
        return board["name"]

    def nvmlDeviceGetMemoryInfo(self, board: dict[str, Any]) -> SimpleNamespace:
        return SimpleNamespace(
            total=board["memory"], used=board.get("used", 0), free=board["memory"] - board.get("used", 0)
        )

    def nvmlDeviceGetMaxClockInfo(self, board: dict[str, Any], kind: int) -> object:
        assert kind == self.NVML_CLOCK_MEM
        if "clock" not in board:
            raise self.NVMLError("Not Supported")
        return board["clock"]

    def nvmlDeviceGetMemoryBusWidth(self, board: dict[str, Any]) -> object:
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


def test_memory_that_others_hold_on_a_board_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    board = {"name": "RTX", "memory": 24 * 10**9, "used": 3 * 10**9}
    monkeypatch.setitem(sys.modules, "pynvml", Driver([board]))
    (fact,) = nvidia_devices()
    assert fact.memory_bytes == 21 * 10**9


def test_without_package_or_driver_there_are_no_boards_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Driver([], installed=False))
    assert nvidia_devices() == ()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvidia_devices() == ()
    monkeypatch.setitem(sys.modules, "pyopencl", None)
    assert opencl_devices(250) == ()
