"""A process's share of the processors, whatever else runs on the machine."""

import contextlib
import os
from pathlib import Path


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
