"""A process's share of the processors, whatever else runs on the machine."""

import contextlib
import ctypes
import os
import platform
import struct
from collections.abc import Iterator
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


def wake_promptly(slice_ns: int = SLICE_NS) -> None:
    """Run as soon as something comes: in short slices, since a task only makes room at once for one of a shorter slice.

    Without it a wake on a busy processor waits for the rest of somebody's slice, up to 3 ms. Linux from 6.12; else nothing.
    0 is the slice that everybody has.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if number is not None:
        niceness = os.getpriority(os.PRIO_PROCESS, 0)
        _LIBC.syscall(number, 0, _ATTRIBUTES.pack(_ATTRIBUTES.size, 0, 0, niceness, 0, slice_ns, 0, 0), 0)


@contextlib.contextmanager
def favoured(niceness: int) -> Iterator[int]:
    """This process and those it starts meanwhile, with their session; as before afterwards. The niceness that it got."""
    group, before = Path("/proc/self/autogroup"), os.getpriority(os.PRIO_PROCESS, 0)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, niceness)
    group_before = ""
    with contextlib.suppress(OSError):
        group_before = group.read_text().rpartition(" ")[2].strip()
        group.write_text(str(niceness))
    wake_promptly()
    try:
        yield os.getpriority(os.PRIO_PROCESS, 0)
    finally:
        wake_promptly(0)
        os.setpriority(os.PRIO_PROCESS, 0, before)
        with contextlib.suppress(OSError):
            group.write_text(group_before)
