"""Keeps an engine from outliving its agent. Runs as its own small process between the two; standard library only.

``leash.py CONTROL_FD GRACE_SECONDS COMMAND…`` starts the command in its own process group and waits. The agent holds the
write end of the control pipe: when it closes (the agent stopped, crashed or was killed with -9), the group gets SIGTERM,
after the grace SIGKILL. If the leash itself is killed, the kernel kills the engine (``PR_SET_PDEATHSIG``, Linux).
Exits with the engine's code, 128 + signal, or 127 when the command cannot be started.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from types import FrameType

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main(arguments: list[str]) -> int:
    """The engine's exit code as a shell would say it."""
    control, grace = int(arguments[0]), float(arguments[1])
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _noted)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        engine = subprocess.Popen(arguments[2:], preexec_fn=_die_with_parent)  # noqa: PLW1509, S603 - one thread; the operator's command
    except OSError as error:
        sys.stderr.write(f"cannot start {arguments[2]}: {error.strerror}\n")
        return 127
    watched = [control, wake_read]
    while engine.poll() is None:
        ready, _, _ = select.select(watched, [], [])
        if wake_read in ready:
            os.read(wake_read, 512)
        if control in ready and not os.read(control, 512):
            _end_group(engine, grace)
    return engine.returncode if engine.returncode >= 0 else 128 - engine.returncode


def _end_group(engine: "subprocess.Popen[bytes]", grace: float) -> None:
    """The agent is gone: nobody reads an exit code any more, so the last signal may take this process along."""
    deadline = time.monotonic() + grace
    with contextlib.suppress(ProcessLookupError):
        os.killpg(0, signal.SIGTERM)
    while engine.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(0, signal.SIGKILL)


def _noted(number: int, frame: FrameType | None) -> None:
    """Only wakes the loop; a handler, unlike SIG_IGN, is not inherited by the engine."""


def _die_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
