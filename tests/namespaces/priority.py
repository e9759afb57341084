"""A process's share of the processors, whatever else runs on the machine."""

import contextlib
import ctypes
import os
import platform
import struct
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")
"""``sched_attr``: size, policy, flags, niceness, priority, slice, deadline, period (nanoseconds)."""
SLICE_NS = 100_000


def weigh(niceness: int) -> None:
    """Give the calling process a session of its own and this niceness, in it and among all sessions.

    Where Linux groups tasks by session (``sched_autogroup``), niceness alone only ranks a task among those of its own
    terminal. Does what it may: favours need root.
    """
    with contextlib.suppress(OSError):  # it leads a session already
        os.setsid()
    with contextlib.suppress(OSError):
        os.nice(niceness - os.getpriority(os.PRIO_PROCESS, 0))
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(niceness))


def wake_promptly() -> None:
    """Run as soon as something comes: in short slices, since a task only makes room at once for one of a shorter slice.

    Without it a wake on a busy processor waits for the rest of somebody's slice, up to 3 ms. Linux from 6.12; else nothing.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if number is not None:
        niceness = os.getpriority(os.PRIO_PROCESS, 0)
        _LIBC.syscall(number, 0, _ATTRIBUTES.pack(_ATTRIBUTES.size, 0, 0, niceness, 0, SLICE_NS, 0, 0), 0)
