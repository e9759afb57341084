"""Processors that do not halt while something is timed.

A virtual processor that has gone to sleep comes back one to five milliseconds late, and every packet of an idle link finds
it asleep; on a busy machine it is awake. So an idle machine measures worse than a busy one, and what it measures is its
host. While this runs, one spinner per processor takes what nobody else wants (``SCHED_IDLE`` in a session of the least
weight: any other task pushes it aside), as ``idle=poll`` does on bare metal. It changes nothing else; a row that was
measured so says ``awake``.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_PDEATHSIG = 1
ROOT = Path(__file__).parents[2]
_SPIN = """
import os, sys
from tests.namespaces.priority import weigh
weigh(19)
os.sched_setaffinity(0, {int(sys.argv[1])})
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
print("spins", flush=True)
while True:
    pass
"""
SETTLE_S = 0.2


@contextlib.contextmanager
def awake() -> Iterator[bool]:
    """Whether the processors are kept awake: only Linux knows how to say that a task matters to nobody."""
    if not hasattr(os, "SCHED_IDLE"):
        yield False
        return
    spinners = [
        subprocess.Popen(
            [sys.executable, "-c", _SPIN, str(cpu)],
            stdout=subprocess.PIPE,
            cwd=ROOT,
            preexec_fn=lambda: _LIBC.prctl(_PDEATHSIG, signal.SIGKILL),  # noqa: PLW1509 - no threads here
        )
        for cpu in sorted(os.sched_getaffinity(0))
    ]
    try:
        for spinner in spinners:
            assert spinner.stdout is not None
            assert spinner.stdout.readline() == b"spins\n"
        time.sleep(SETTLE_S)
        yield True
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.communicate()
