"""One llama.cpp program on its leash, with its lines and its port."""

import asyncio
import os
import random
import shutil
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from config.settings import RuntimeSettings
from stage_agent.runtimes.command import engine_environment
from stage_agent.runtimes.engine import Engine
from stage_agent.runtimes.interface import RuntimeFailure
from stage_agent.runtimes.llama_cpp.command import LOOPBACK, exit_words

_POLL_S = 0.05
_SIGILL = 132
_OWN_ENVIRONMENT = {
    "GGML_RPC_NO_RDMA": "1",  # RDMA would leave the tunnel
    "GGML_NO_BACKTRACE": "1",  # an abort ends at once (0.04 s), not after a debugger has been attached (1.8 to 4 s)
}


class UnfitBuildError(RuntimeFailure):
    """A program needs an instruction that this CPU lacks: no other plan and no later start can change that."""

    def __init__(self, detail: str) -> None:
        super().__init__("engine_mismatch", detail)


def identity(settings: RuntimeSettings) -> str:
    """Of the files behind both programs: another once one of them has been replaced."""
    told = []
    for name in (settings.llama_server, settings.llama_rpc_server):
        path = shutil.which(name) or name
        with suppress(OSError):
            status = Path(path).stat()
            told.append(f"{path} {status.st_mtime_ns} {status.st_size}")
    return "; ".join(told)


class Program:
    """A started program. Its port counts as open only when *its own* process listens there."""

    def __init__(self, name: str, engine: Engine, watcher: asyncio.Task[None]) -> None:
        self.name = name
        self.engine = engine
        self._watcher = watcher

    @classmethod
    async def start(
        cls,
        command: list[str],
        settings: RuntimeSettings,
        tasks: asyncio.TaskGroup,
        on_line: Callable[[str], None] | None = None,
    ) -> "Program":
        """Start ``command``; a program that cannot be started ends with code 127."""
        environment = engine_environment(os.environ, {**_OWN_ENVIRONMENT, **settings.environment})
        engine = await Engine.start(command, environment, settings.stop_grace_us, None)
        engine.on_line = on_line
        name = command[0].rpartition("/")[2]
        return cls(name, engine, tasks.create_task(engine.watch(), name=f"{name} {engine.pid}"))

    @property
    def ended(self) -> bool:
        """Whether it has exited."""
        return self.engine.exited.done()

    def failure(self) -> RuntimeFailure:
        """Why it ended. An instruction that the CPU lacks is a matter of the build, not of luck."""
        code = self.engine.exited.result()
        words = exit_words(self.name, code, self.engine.last_line)
        return UnfitBuildError(words) if code == _SIGILL else RuntimeFailure("engine_exited", words)

    async def listening(self, port: int) -> bool:
        """Waits until its process listens on ``port``; false when it ended before."""
        while not self.ended:
            if _listens(self.engine.pid, port):
                return True
            await asyncio.wait([self.engine.exited], timeout=_POLL_S)
        return False

    async def stop(self, grace_us: int) -> None:
        """SIGTERM, grace, SIGKILL; nothing is left."""
        await self.engine.stop(grace_us)
        self._watcher.cancel()


def choose_port(settings: RuntimeSettings, host: str = LOOPBACK) -> int:
    """A free port of ``host``, from of the configured range, at random: two agents on one machine seldom choose the same.

    Raises ``RuntimeFailure`` when none is free.
    """
    first, last = settings.port_first, settings.port_last
    for port in random.SystemRandom().sample(range(first, last + 1), last + 1 - first):
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as attempt, suppress(OSError):
            attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            attempt.bind((host, port))
            return port
    raise RuntimeFailure("engine_not_ready", f"no free port between {first} and {last}: set runtime.port_first, _last")


def _listens(leash_pid: int, port: int) -> bool:
    """Whether a child of the leash listens on the port: asked of the kernel, so that no probe ever speaks to an engine."""
    try:
        for process in psutil.Process(leash_pid).children(recursive=True):
            for each in process.net_connections("tcp"):
                if each.status == psutil.CONN_LISTEN and each.laddr.port == port:
                    return True
    except psutil.Error:
        return False
    return False
