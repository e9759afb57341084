"""One engine process on its leash: started, listened to, stopped with grace, never left behind."""

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

KEPT_LINES = 50
MAX_LINE_BYTES = 4_096
"""Longer lines are cut; an engine that prints without end costs no memory."""
_READ_BYTES = 65_536
_KILL_WAIT_SECONDS = 5.0
_LAST_WORDS_SECONDS = 1.0


class Engine:
    """A started process. ``exited`` completes with its exit code (128 + signal when it was killed)."""

    def __init__(
        self, process: asyncio.subprocess.Process, control: int, life: int, ready_line: re.Pattern[str] | None
    ) -> None:
        self._process = process
        self._pipes = [control, life]
        self._life = life
        self._ready_line = ready_line
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self.line_seen = asyncio.Event()
        """Set when the ready pattern appeared in the output."""
        self.on_line: Callable[[str], None] | None = None
        """Called with every line of output, if set before ``watch``."""
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @classmethod
    async def start(
        cls, command: list[str], environment: Mapping[str, str], grace_us: int, ready_line: re.Pattern[str] | None
    ) -> "Engine":
        """Start ``command`` in its own process group. A command that does not exist exits with 127."""
        # The leash reads ``control`` until this process ends, and holds ``life`` until it ends itself; the engine, which
        # inherits neither, and what it leaves behind cannot keep them open.
        control_read, control_write = os.pipe()
        life_read, life_write = os.pipe()
        leash = Path(__file__).with_name("leash.py")
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(leash), str(control_read), str(grace_us / 1e6)),
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=dict(environment),
                pass_fds=(control_read, life_write),
                start_new_session=True,
            )
        except BaseException:
            os.close(control_write)
            os.close(life_read)
            raise
        finally:
            os.close(control_read)
            os.close(life_write)
        return cls(process, control_write, life_read, ready_line)

    @property
    def pid(self) -> int:
        """Of the leash, which is also the process group of everything the engine started."""
        return self._process.pid

    @property
    def last_line(self) -> str:
        """What the engine said last, for an error message."""
        return self._lines[-1] if self._lines else ""

    async def watch(self) -> None:
        """Read the output and wait for the exit; run this as a task for as long as the engine lives.

        The exit counts, not the end of the output: a child that the engine left behind may hold that open, and asyncio
        then says nothing.
        """
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._life, ended.set)
        try:
            async with asyncio.TaskGroup() as group:
                reading = group.create_task(self._read(), name="engine output")
                await ended.wait()
                self._let_go()
                self._signal_group(signal.SIGKILL)  # what the engine left behind
                collecting = group.create_task(self._process.wait(), name="engine exit")
                await asyncio.wait([reading, collecting], timeout=_LAST_WORDS_SECONDS)
                reading.cancel()
                collecting.cancel()
        finally:
            self._let_go()
        if not self.exited.done():
            code = self._process.returncode or 0
            self.exited.set_result(code if code >= 0 else 128 - code)  # negative: the leash itself was killed

    async def _read(self) -> None:
        assert self._process.stdout is not None
        rest = b""
        while chunk := await self._process.stdout.read(_READ_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._take(line)
            rest = rest[:MAX_LINE_BYTES]
        if rest:
            self._take(rest)

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
            if self.on_line is not None:
                self.on_line(line)
        if self._ready_line is not None and self._ready_line.search(line):
            self.line_seen.set()

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _let_go(self) -> None:
        if self._pipes:
            asyncio.get_running_loop().remove_reader(self._life)
        while self._pipes:
            os.close(self._pipes.pop())
