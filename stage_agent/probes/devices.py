"""Accelerators through NVML, when ``nvidia-ml-py`` and a driver are there. Nothing here is required.

NVML knows memory and clocks but measures nothing. Memory is what is free: a desktop or another program keeps what it has,
and nothing of this node is on the card when it starts, which is when it asks. Bandwidth is the vendor's figure (memory
clock × bus width, two transfers per clock) and is marked ``spec``; an OpenCL measurement of the same device replaces it.
"""

import contextlib
import ctypes
import sys
from typing import Any

from protocol.rows import DeviceFact

MAX_DEVICES = 64


def nvidia_devices() -> tuple[DeviceFact, ...]:
    """One fact per GPU; none without the package, the driver or a device."""
    if "pynvml" not in sys.modules and not _driver_is_installed():
        return ()
    try:
        import pynvml
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        count = min(pynvml.nvmlDeviceGetCount(), MAX_DEVICES)
        return tuple(_fact(pynvml, pynvml.nvmlDeviceGetHandleByIndex(index)) for index in range(count))
    except pynvml.NVMLError:
        return ()
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _driver_is_installed() -> bool:
    """Asked before the package is imported: it weighs 1.1 MB for good, most machines have no such card.

    Only Linux has one name for the library; elsewhere the package finds out.
    """
    if sys.platform != "linux":
        return True
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True


def _fact(pynvml: Any, handle: Any) -> DeviceFact:
    name = pynvml.nvmlDeviceGetName(handle)
    bandwidth = None
    with contextlib.suppress(pynvml.NVMLError):  # some devices keep their clocks to themselves
        megahertz = pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_MEM)
        bandwidth = 2 * megahertz * 1_000_000 * pynvml.nvmlDeviceGetMemoryBusWidth(handle) // 8
    return DeviceFact(
        name=(name.decode() if isinstance(name, bytes) else name)[:64],
        kind="cuda",
        memory_bytes=pynvml.nvmlDeviceGetMemoryInfo(handle).free,
        memory_bandwidth_bytes_per_s=bandwidth,
        source="spec" if bandwidth else "unknown",
    )
