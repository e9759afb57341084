"""One engine process on its leash: started, listened to, stopped with grace, never left behind."""

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path

KEPT_LINES = 50
MAX_LINE_BYTES = 4_096
"""Longer lines are cut; an engine that prints without end costs no memory."""
_READ_BYTES = 65_536
_KILL_WAIT_SECONDS = 5.0


class Engine:
    """A started process. ``exited`` completes with its exit code (128 + signal when it was killed)."""

    def __init__(self, process: asyncio.subprocess.Process, control: int, ready_line: re.Pattern[str] | None) -> None:
        self._process = process
        self._control: int | None = control
        self._ready_line = ready_line
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self.line_seen = asyncio.Event()
        """Set when the ready pattern appeared in the output."""
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @classmethod
    async def start(
        cls, command: list[str], environment: Mapping[str, str], grace_us: int, ready_line: re.Pattern[str] | None
    ) -> "Engine":
        """Start ``command`` in its own process group. A command that does not exist exits with 127."""
        read_end, write_end = os.pipe()
        leash = Path(__file__).with_name("leash.py")
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(leash), str(read_end), str(grace_us / 1e6)),
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=dict(environment),
                pass_fds=(read_end,),
                start_new_session=True,
            )
        except BaseException:
            os.close(write_end)
            raise
        finally:
            os.close(read_end)
        return cls(process, write_end, ready_line)

    @property
    def pid(self) -> int:
        """Of the leash, which is also the process group of everything the engine started."""
        return self._process.pid

    @property
    def last_line(self) -> str:
        """What the engine said last, for an error message."""
        return self._lines[-1] if self._lines else ""

    async def watch(self) -> None:
        """Read the output until it ends, then wait for the exit; run this as a task for as long as the engine lives."""
        assert self._process.stdout is not None
        rest = b""
        while chunk := await self._process.stdout.read(_READ_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._take(line)
            rest = rest[:MAX_LINE_BYTES]
        if rest:
            self._take(rest)
        code = await self._process.wait()
        self._signal_group(signal.SIGKILL)  # stragglers that the engine left behind
        self._let_go()
        if not self.exited.done():
            self.exited.set_result(code)

    async def stop(self, grace_us: int) -> None:
        """SIGTERM to the whole group, SIGKILL after the grace; returns when nothing of it is left."""
        if self.exited.done():
            return
        self._signal_group(signal.SIGTERM)
        await asyncio.wait([self.exited], timeout=grace_us / 1e6)
        if not self.exited.done():
            self._signal_group(signal.SIGKILL)
            await asyncio.wait([self.exited], timeout=_KILL_WAIT_SECONDS)
        self._let_go()

    def _take(self, raw: bytes) -> None:
        line = raw[:MAX_LINE_BYTES].decode("utf-8", "replace").rstrip()
        if line:
            self._lines.append(line)
        if self._ready_line is not None and self._ready_line.search(line):
            self.line_seen.set()

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _let_go(self) -> None:
        if self._control is not None:
            os.close(self._control)
            self._control = None
