"""The runtime that serves a plan with llama.cpp over RPC.

Every stage runs an rpc-server on loopback, new with every plan: it serves one client at a time, and a client that went
away in a bad moment can leave it waiting. Its door is open to the plan's head only. Stage 0 also runs the head. The engine
is watched by its process only: a probe that spoke to a busy rpc-server could kill it.
"""

import asyncio
import os
import time
from typing import Any

from config.settings import RuntimeSettings
from protocol.ballots import StageAssignment
from protocol.errors import StagemeshError
from protocol.fencing import PlanEpoch
from protocol.quic.address import HostPort
from stage_agent.runtimes.context import RuntimeContext
from stage_agent.runtimes.interface import DecodeTiming, Report, RuntimeFailure
from stage_agent.runtimes.llama_cpp.command import LOOPBACK, worker_command
from stage_agent.runtimes.llama_cpp.head import Head
from stage_agent.runtimes.llama_cpp.program import Program, UnfitBuildError, choose_port, identity
from stage_agent.runtimes.llama_cpp.weight_cache import cache_directory, make_room
from stage_agent.tunnel.tunnels import Door, rpc_door

_PORT_ATTEMPTS = 3
_OWN_CAUSE_S, _PEER_CAUSE_S = 0.5, 3.0
"""A head that lost a stage waits for the cause: its own worker's end; while loading also the lost node's word, which ends
the attempt, so that the right node is blamed for it."""


class LlamaCppRuntime:
    """A ``StageRuntime``."""

    def __init__(self, settings: RuntimeSettings, context: RuntimeContext) -> None:
        assert context.tunnels is not None, "the node gives its runtimes its tunnels"
        self._settings = settings
        self._context = context
        self._tunnels = context.tunnels
        self._worker: Program | None = None
        self._door: tuple[str, Door] | None = None
        self._head: Head | None = None
        self._stopping = asyncio.Event()
        self._busy = asyncio.Lock()

    async def load(self, assignment: StageAssignment, report: Report) -> None:
        """Start the stage's programs. Without growth for the load deadline it has failed. Raises ``RuntimeFailure``."""
        total = max(1, assignment.parameter_bytes)
        report(0, total)
        async with self._busy:
            tasks = self._context.tasks
            grown = _Growth(assignment, report)
            starting = tasks.create_task(self._started(assignment, grown), name="llama.cpp start")
            stopped = tasks.create_task(self._stopping.wait(), name="llama.cpp stop")
            try:
                await self._until_ready(starting, stopped, grown)
            except BaseException:
                starting.cancel()
                await asyncio.wait([starting])
                await self._stop()
                raise
            finally:
                stopped.cancel()
        report(total, total)

    def keeps(self, assignment: StageAssignment) -> bool:  # noqa: ARG002 - the interface's
        """Never: an rpc-server is started anew with every plan."""
        return False

    async def activate(self, epoch: PlanEpoch, assignment: StageAssignment) -> None:  # noqa: ARG002 - the interface's
        """The head's HTTP becomes the slot's."""
        if self._head is not None:
            self._head.publish()

    async def unload(self) -> None:
        """Stop both programs; a running ``load`` ends with ``cancelled``."""
        self._stopping.set()
        async with self._busy:
            await self._stop()

    async def wait_failed(self) -> RuntimeFailure:
        """Returns when one of the programs ends by itself."""
        head = None if self._head is None else self._head.program
        programs = [each for each in (self._worker, head) if each is not None]
        if programs:
            await asyncio.wait([each.engine.exited for each in programs], return_when=asyncio.FIRST_COMPLETED)
            if not self._stopping.is_set():
                failure = self._judged(await self._why_ended())
                await self._stop()  # half an engine serves nobody
                return failure
        never: asyncio.Future[RuntimeFailure] = asyncio.get_running_loop().create_future()
        return await never

    def timings(self) -> DecodeTiming | None:
        """At the head, what llama-server measured; its stages cannot be told apart, so no time per layer."""
        return None if self._head is None else self._head.decoded.timing()

    async def _until_ready(
        self, starting: "asyncio.Task[RuntimeFailure | None]", stopped: "asyncio.Task[bool]", grown: "_Growth"
    ) -> None:
        budget = self._context.budget
        while not starting.done():
            await asyncio.wait([starting, stopped], timeout=grown.left_s(), return_when=asyncio.FIRST_COMPLETED)
            if stopped.done():
                raise RuntimeFailure("cancelled", "unloaded while the engine was starting")
            if not starting.done() and grown.left_s() <= 0:
                budget.record_failure(_now_us())
                raise RuntimeFailure("engine_not_ready", f"no progress within the load deadline; {self._last_words()}")
        failure = starting.result()
        if failure is not None and failure.reason == "stage_lost":
            failure = await self._cause(failure, stopped)
        if failure is not None:
            if failure.reason not in {"restart_budget_exhausted", "stage_lost"}:
                budget.record_failure(_now_us())
            raise self._judged(failure)

    def _judged(self, failure: RuntimeFailure) -> RuntimeFailure:
        """``failure``; after one that the build is to blame for, nothing is started until its files are others."""
        if isinstance(failure, UnfitBuildError):
            self._context.budget.condemn(identity(self._settings), failure.detail)
        return failure

    async def _why_ended(self) -> RuntimeFailure:
        """Of the programs that ended, the one that others ended because of."""
        worker, head = self._worker, self._head
        if worker is not None and not worker.ended:
            assert head is not None
            assert head.program is not None
            failure = head.failure(head.program)
            return await self._cause(failure, None) if failure.reason == "stage_lost" else failure
        if worker is not None:
            return worker.failure()
        assert head is not None
        assert head.program is not None
        return head.failure(head.program)

    async def _cause(self, failure: RuntimeFailure, stopped: "asyncio.Task[bool] | None") -> RuntimeFailure:
        """``failure``, or what its cause says within a moment. Raises ``cancelled`` when the plan is ended meanwhile."""
        events: list[asyncio.Future[Any]] = [] if self._worker is None else [self._worker.engine.exited]
        if stopped is not None:
            events.append(stopped)
        if events:
            limit_s = _OWN_CAUSE_S if stopped is None else _PEER_CAUSE_S
            await asyncio.wait(events, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if stopped is not None and stopped.done():
            raise RuntimeFailure("cancelled", "unloaded while the engine was starting")
        return self._worker.failure() if self._worker is not None and self._worker.ended else failure

    async def _started(self, assignment: StageAssignment, grown: "_Growth") -> RuntimeFailure | None:
        """Everything up, or why not; as a value, because this is a task of the daemon's group."""
        try:
            if why := self._context.budget.condemned(identity(self._settings)):
                return RuntimeFailure("engine_mismatch", f"not started again: {why}")
            if wait_us := self._context.budget.retry_after_us(_now_us()):
                seconds = -(-wait_us // 1_000_000)
                return RuntimeFailure(
                    "restart_budget_exhausted", f"llama.cpp failed too often; next attempt in {seconds} s"
                )
            is_head = assignment.driver == self._context.node_id
            own = ""
            if not (is_head and self._settings.llama_head_stage == "cpu"):
                own = await self._start_worker(assignment, LOOPBACK if is_head else "")
            if is_head:
                self._head = Head(self._settings, self._context, assignment)
                await self._head.start(own, grown.sent)
        except RuntimeFailure as failure:
            return failure
        except (StagemeshError, OSError) as error:
            return RuntimeFailure("engine_not_ready", str(error))
        return None

    async def _start_worker(self, assignment: StageAssignment, host: str) -> str:
        """Where it listens; ``host`` empty = where peers reach it. A port that somebody took first is tried elsewhere."""
        epoch, settings = self._context.epoch, self._settings
        host = host or settings.llama_direct_host or LOOPBACK
        cache = settings.llama_cache and await asyncio.to_thread(
            make_room,
            cache_directory({**os.environ, **settings.environment}),
            budget_bytes=settings.llama_cache_bytes_max,
            coming_bytes=assignment.parameter_bytes,
        )
        for attempt in range(_PORT_ATTEMPTS):
            port = choose_port(settings, host)
            command = worker_command(settings, port, cache=cache, host=host)
            self._worker = worker = await Program.start(command, settings, self._context.tasks)
            if await worker.listening(port):
                break
            if attempt + 1 == _PORT_ATTEMPTS or "socket" not in worker.engine.last_line:
                raise worker.failure()
        name = rpc_door(assignment.slot, f"{epoch.term}/{epoch.node_id}/{epoch.instance}")
        door = Door(port, engine=self._context.engine, allowed=frozenset({assignment.driver}), host=host)
        self._tunnels.open_door(name, door)
        self._door = (name, door)
        return str(HostPort(host, port))

    def _last_words(self) -> str:
        program = self._head.program if self._head is not None else self._worker
        return f"{program.name} said last: {program.engine.last_line}" if program else "waiting for the other stages"

    async def _stop(self) -> None:
        if self._door is not None:
            self._tunnels.close_door(*self._door)
        if self._head is not None:
            await self._head.stop()
        if self._worker is not None:
            await self._worker.stop(self._settings.stop_grace_us)


class _Growth:
    """Progress of a load as the coordinator wants it: never back, and the deadline starts anew when it grows.

    The head sends every other stage's weights; that is its own progress, in the scale of its own stage's bytes.
    """

    def __init__(self, assignment: StageAssignment, report: Report) -> None:
        self._report = report
        self._total = max(1, assignment.parameter_bytes)
        self._to_send = sum(share.parameter_bytes for share in assignment.stages if share.node_id != assignment.node_id)
        self._limit_s = assignment.load_deadline_us / 1e6
        self._done = 0
        self._until_s = time.monotonic() + self._limit_s

    def left_s(self) -> float:
        """Until the load has failed."""
        return self._until_s - time.monotonic()

    def sent(self, size: int) -> None:
        """``size`` bytes have gone to other stages so far."""
        done = min(self._total - 1, self._total * size // max(1, self._to_send))
        if done > self._done:
            self._done = done
            self._until_s = time.monotonic() + self._limit_s
            self._report(done, self._total)


def _now_us() -> int:
    return time.monotonic_ns() // 1_000
