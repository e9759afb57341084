"""The runtime that supervises a command: the operator's engine, told its layer range by placeholders.

``load`` starts it and waits until it is ready (port, log line or HTTP), within the assignment's load deadline; a start that
ends early is tried again with growing pauses while the budget lasts. A loaded engine that dies is reported by
``wait_failed`` and not started again here (see ``budget``). ``unload`` stops the whole process group; the leash does the
same when the agent itself is killed.
"""

import asyncio
import os
import re
import time
from typing import Any

from config.settings import RuntimeSettings
from protocol.ballots import StageAssignment
from protocol.errors import ConfigurationError, ModelError
from protocol.fencing import PlanEpoch
from stage_agent.runtimes.command import check_command, engine_environment, placeholder_values, render
from stage_agent.runtimes.context import RuntimeContext
from stage_agent.runtimes.engine import Engine
from stage_agent.runtimes.interface import DecodeTiming, Report, RuntimeFailure
from stage_agent.runtimes.readiness import free_port, until_ready

_FIRST_PAUSE_SECONDS = 0.5


class ProcessRuntime:
    """A ``StageRuntime`` over one child process."""

    def __init__(self, settings: RuntimeSettings, context: RuntimeContext) -> None:
        check_command(settings.command)
        self._settings = settings
        self._context = context
        self._ready_line = _compiled(settings)
        self._engine: Engine | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._port: int | None = None
        self._wanted: list[str] = []
        self._stopping = asyncio.Event()
        self._busy = asyncio.Lock()

    async def load(self, assignment: StageAssignment, report: Report) -> None:
        """Start the engine. Raises ``RuntimeFailure`` (engine_exited, engine_not_ready, restart_budget_exhausted, …)."""
        total = max(1, assignment.parameter_bytes)
        report(0, total)
        async with self._busy:
            try:
                async with asyncio.timeout(assignment.load_deadline_us / 1e6):
                    await self._start_until_ready(assignment)
            except TimeoutError:
                last = self._engine.last_line if self._engine else ""
                self._count_failure()
                await self._stop()
                raise RuntimeFailure(
                    "engine_not_ready", f"not ready within its load deadline; it said last: {last}"
                ) from None
            except BaseException:
                await self._stop()
                raise
        report(total, total)

    def keeps(self, assignment: StageAssignment) -> bool:
        """Whether the running command, port and epoch aside, is the one that ``assignment`` asks for."""
        return self._engine is not None and self._wanted == self._command(assignment, port=0, epoch=None)

    async def activate(self, epoch: PlanEpoch, assignment: StageAssignment) -> None:
        """The engine was told its epoch when it was started; fencing happens before it."""

    async def unload(self) -> None:
        """Stop the process group; a running ``load`` ends with ``cancelled``."""
        self._stopping.set()
        async with self._busy:
            await self._stop()

    async def wait_failed(self) -> RuntimeFailure:
        """Returns when the loaded engine exits by itself; the driver counts that against the slot's budget."""
        engine = self._engine
        if engine is not None:
            code = await asyncio.shield(engine.exited)
            if not self._stopping.is_set():
                return _exit_failure(engine, code)
        never: asyncio.Future[RuntimeFailure] = asyncio.get_running_loop().create_future()
        return await never

    def timings(self) -> DecodeTiming | None:
        """A foreign engine does not say."""
        return None

    @property
    def port(self) -> int | None:
        """Where the engine listens on loopback, while it is loaded."""
        return self._port if self._engine is not None else None

    async def _start_until_ready(self, assignment: StageAssignment) -> None:
        stopped = self._context.tasks.create_task(self._stopping.wait(), name="engine unload")
        pause = _FIRST_PAUSE_SECONDS
        try:
            while True:
                self._check_budget()
                failure = await self._start_once(assignment, stopped)
                if failure is None:
                    return
                self._count_failure()
                if self._context.budget.exhausted(_now_us()):
                    raise failure
                await asyncio.wait([stopped], timeout=pause)
                pause *= 2
        finally:
            stopped.cancel()

    async def _start_once(self, assignment: StageAssignment, stopped: asyncio.Future[Any]) -> RuntimeFailure | None:
        """``None`` when ready, else why it ended. Raises ``RuntimeFailure('cancelled')`` once ``stopped`` is done."""
        settings, tasks = self._settings, self._context.tasks
        self._port = free_port(settings.port_first, settings.port_last)
        command = self._command(assignment, self._port, self._context.epoch)
        environment = engine_environment(os.environ, settings.environment)
        self._engine = engine = await Engine.start(command, environment, settings.stop_grace_us, self._ready_line)
        self._watcher = tasks.create_task(engine.watch(), name=f"engine {engine.pid}")
        ready = tasks.create_task(until_ready(settings, engine, self._port), name="engine readiness")
        events: list[asyncio.Future[Any]] = [ready, engine.exited, stopped]
        try:
            await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
        if stopped.done():
            raise RuntimeFailure("cancelled", "unloaded while the engine was starting")
        if engine.exited.done():
            return _exit_failure(engine, engine.exited.result())
        self._wanted = self._command(assignment, port=0, epoch=None)
        return None

    def _command(self, assignment: StageAssignment, port: int, epoch: PlanEpoch | None) -> list[str]:
        try:
            model = self._context.model_path(assignment)
        except ModelError as error:
            raise RuntimeFailure("model_unavailable", str(error)) from None
        address = self._context.peer_address
        addresses = {
            "previous": address(assignment.previous),
            "next": address(assignment.next),
            "driver": address(assignment.driver),
        }
        stamp = epoch or PlanEpoch(0, self._context.epoch.node_id, self._context.epoch.instance)
        return render(self._settings.command, placeholder_values(assignment, stamp, model, addresses, port))

    async def _stop(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.stop(self._settings.stop_grace_us)
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None

    def _check_budget(self) -> None:
        wait_us = self._context.budget.retry_after_us(_now_us())
        if wait_us:
            raise RuntimeFailure(
                "restart_budget_exhausted", f"the engine failed too often; next attempt in {-(-wait_us // 1_000_000)} s"
            )

    def _count_failure(self) -> None:
        self._context.budget.record_failure(_now_us())


def _exit_failure(engine: Engine, code: int) -> RuntimeFailure:
    how = f"was killed by signal {code - 128}" if code > 128 else f"ended with code {code}"
    said = f"; it said last: {engine.last_line}" if engine.last_line else ""
    return RuntimeFailure("engine_exited", f"the engine {how}{said}")


def _compiled(settings: RuntimeSettings) -> re.Pattern[str] | None:
    if settings.ready != "log":
        return None
    if not settings.ready_log_pattern:
        raise ConfigurationError("runtime.ready_log_pattern is empty: runtime.ready = 'log' needs it")
    try:
        return re.compile(settings.ready_log_pattern)
    except re.error as error:
        raise ConfigurationError(f"runtime.ready_log_pattern: {error}") from None


def _now_us() -> int:
    return time.monotonic_ns() // 1_000
