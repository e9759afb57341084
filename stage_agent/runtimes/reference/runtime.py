"""The reference runtime: stage frames in, stage frames out, and ``generate`` on stage 0.

For verification: it makes frames, epochs, bandwidth observation and predicted-against-measured times real on any machine.
It keeps weights as float32, decodes greedily and uses one thread beside the loop; it is not for production.

Way of a token: stage 0 embeds it and runs its layers, sends a frame to the next stage, and so on; the last stage sends the
prediction straight to stage 0. Frames are taken in order from one bounded queue. Requests never outlive the plan they
began under: activating another epoch ends them as retriable.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from time import monotonic_ns
from typing import TypeVar

import structlog

from config.settings import RuntimeSettings
from protocol.ballots import StageAssignment
from protocol.errors import ModelError, WireError
from protocol.fencing import PlanEpoch
from protocol.frame_envelope import FrameEnvelope, open_sealed
from protocol.stage_frame import FrameKind, StageFrame
from stage_agent.runtimes.context import RuntimeContext
from stage_agent.runtimes.interface import DecodeTiming, Report, RuntimeFailure, same_layers
from stage_agent.runtimes.reference.blas import use_one_thread
from stage_agent.runtimes.reference.decoder import StageDecoder
from stage_agent.runtimes.reference.generate import Generator
from stage_agent.runtimes.reference.requests import Generation, GenerationInterrupted, OpenRequests
from stage_agent.runtimes.reference.weights import StageWeights, read_stage
from stage_agent.runtimes.reference.worker import Outgoing, StageWorker
from stage_agent.runtimes.threads import on_this_loop, run_in_thread

Result = TypeVar("Result")

QUEUED_FRAMES = 256
"""Waiting at one stage; beyond it frames are dropped, and their requests time out at stage 0."""


class ReferenceRuntime:
    """A ``StageRuntime`` and ``FrameReceiver``. ``counters`` are the process's: frames and wire bytes, drops by reason."""

    def __init__(self, settings: RuntimeSettings, context: RuntimeContext) -> None:
        self.settings = settings
        self.counters = context.frames
        self.requests = OpenRequests()
        self._log = structlog.get_logger("stagemesh")
        self._generator = Generator(self)
        self._context = context
        self._stop = threading.Event()
        self._busy = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reference")
        self._queue: asyncio.Queue[tuple[FrameEnvelope, StageFrame]] = asyncio.Queue(QUEUED_FRAMES)
        self._consumer: asyncio.Task[None] | None = None
        self._failed: asyncio.Future[RuntimeFailure] = asyncio.get_running_loop().create_future()
        self._decoder: StageDecoder | None = None
        self._worker: StageWorker | None = None
        self._assignment: StageAssignment | None = None
        self._envelope: FrameEnvelope | None = None
        self._decoded_us = 0
        self._decoded_tokens = 0

    async def load(self, assignment: StageAssignment, report: Report) -> None:
        """Read and dequantise the assigned layers. Raises ``RuntimeFailure``."""
        assert self._worker is None, "a runtime is loaded once"
        async with self._busy:
            work = partial(self._read, assignment, on_this_loop(report))
            try:
                weights = await run_in_thread(work, self._stop, self._thread)
            except ModelError as error:
                raise RuntimeFailure("model_unavailable", str(error)) from None
            self._decoder = StageDecoder(weights)
            self._worker = StageWorker(self._decoder, assignment, self._context.shaped_bytes_per_s)
            self._assignment = assignment
            self._consumer = self._context.tasks.create_task(self._consume(), name=f"reference {assignment.slot}")

    def keeps(self, assignment: StageAssignment) -> bool:
        """Neighbours may change under what is loaded; layers, context and lanes may not."""
        return self._assignment is not None and same_layers(self._assignment, assignment)

    async def activate(self, epoch: PlanEpoch, assignment: StageAssignment) -> None:
        """Serve under ``epoch``; requests of the plan before end as retriable."""
        assert self._worker is not None
        self._envelope = None
        self.requests.interrupt("plan_changed", "another plan became active; send the request again")
        await self._run(partial(self._worker.adopt, assignment))
        self._assignment = assignment
        self._decoded_us = self._decoded_tokens = 0
        self._envelope = FrameEnvelope(epoch, assignment.slot, assignment.cache_epoch.value)

    async def unload(self) -> None:
        """End requests, queue and thread, and free the weights."""
        self._stop.set()
        self._envelope = None
        self.requests.interrupt("not_serving", "the stage was unloaded; send the request again")
        async with self._busy:
            if self._consumer is not None:
                self._consumer.cancel()
                await asyncio.wait([self._consumer])
            await asyncio.get_running_loop().run_in_executor(None, self._thread.shutdown)
            self._worker = self._decoder = self._assignment = None

    async def wait_failed(self) -> RuntimeFailure:
        """Returns when memory ran out while decoding."""
        return await asyncio.shield(self._failed)

    def timings(self) -> DecodeTiming | None:
        """Of this stage's layers alone, without embedding, head and hops; and what stage 0 saw of whole tokens."""
        timing = self._worker.meter.timing(monotonic_ns() // 1_000) if self._worker is not None else None
        if timing is None or not self._decoded_tokens:
            return timing
        return replace(timing, tpot_us=-(-self._decoded_us // self._decoded_tokens), tpot_tokens=self._decoded_tokens)

    async def generate(
        self,
        prompt: tuple[int, ...],
        max_new_tokens: int,
        stop_tokens: frozenset[int] = frozenset(),
        on_token: Callable[[int], None] = lambda _: None,
        conversation: int | None = None,
    ) -> Generation:
        """Stage 0 only: up to ``max_new_tokens`` tokens after ``prompt``, greedily; a stop token is included.

        ``conversation`` (below 2**63) keeps the caches afterwards for a prompt that begins with the same tokens.
        Deterministic: the same prompt gives the same tokens however the model is split. Raises ``GenerationInterrupted``,
        which says whether sending the request again may help.
        """
        result = await self._generator.generate(prompt, max_new_tokens, stop_tokens, on_token, conversation)
        self._decoded_us += sum(result.token_us)
        self._decoded_tokens += len(result.token_us)
        return result

    @property
    def serving(self) -> tuple[StageAssignment, StageDecoder]:
        """What is active. Raises ``GenerationInterrupted`` (retriable) when nothing is."""
        if self._envelope is None or self._assignment is None or self._decoder is None:
            raise GenerationInterrupted("not_serving", "no plan is active on this stage yet", retriable=True)
        return self._assignment, self._decoder

    @property
    def epoch(self) -> PlanEpoch | None:
        """Of the plan that is active here; frames of another one are dropped."""
        return None if self._envelope is None else self._envelope.epoch

    def on_frame(self, peer: str, sealed: bytes | memoryview) -> None:
        """Take a frame that the stage's fence accepted; never blocks. Another plan's or malformed ones are dropped."""
        try:
            envelope, frame = open_sealed(sealed)
        except WireError as error:
            self.counters[f"dropped_{error.reason}"] += 1
            return
        self._note("received", peer, frame)
        if self._envelope is None or envelope.epoch != self._envelope.epoch:
            self.counters["dropped_stale_epoch"] += 1
            return
        if frame.kind in {FrameKind.PREDICTION, FrameKind.REFUSED} and self._is_driver():
            self._answered(frame)
            return
        if frame.kind is not FrameKind.REFUSED and (self._assignment is None or peer != self._assignment.previous):
            self.counters["dropped_wrong_sender"] += 1
            return
        try:
            self._queue.put_nowait((envelope, frame))
        except asyncio.QueueFull:
            self.counters["dropped_queue_full"] += 1

    def _note(self, direction: str, peer: str, frame: StageFrame) -> None:
        """Count a frame that crossed; with ``[log] level = "debug"`` each is told under the names that dashboards know."""
        self.counters[f"frames_{direction}"] += 1
        self.counters[f"wire_bytes_{direction}"] += frame.estimated_wire_bytes()
        self._log.debug("stage_frame", direction=direction, peer=peer, **frame.telemetry())

    async def run_own(self, frame: StageFrame) -> None:
        """Stage 0: run ``frame.token_ids`` through this stage and send on what comes out."""
        assert self._worker is not None
        envelope = self._envelope
        outgoing = await self._run(partial(self._worker.own, frame))
        await self._send_all(outgoing, envelope)

    async def discard(self, frame: StageFrame) -> None:
        """Stage 0: forget a session here and on every stage after; what cannot be reached forgets it by itself."""
        envelope = self._envelope
        if self._worker is not None and envelope is not None:
            with contextlib.suppress(GenerationInterrupted):
                await self._send_all(await self._run(partial(self._worker.discard, frame)), envelope)

    def _read(self, assignment: StageAssignment, report: Report) -> StageWeights:
        use_one_thread()
        return read_stage(
            self._context.model_path(assignment),
            assignment.layer_start,
            assignment.layer_end,
            first="embedding" in assignment.roles,
            last="readout" in assignment.roles,
            report=report,
            stopped=self._stop.is_set,
        )

    def _is_driver(self) -> bool:
        return self._assignment is not None and "driver" in self._assignment.roles

    def _answered(self, frame: StageFrame) -> None:
        taken = self.requests.predicted(frame) if frame.kind is FrameKind.PREDICTION else self.requests.refused(frame)
        if not taken:
            self.counters["dropped_unawaited"] += 1

    async def _consume(self) -> None:
        while True:
            received, frame = await self._queue.get()
            worker, active = self._worker, self._envelope
            if worker is None or active is None or received.epoch != active.epoch:
                self.counters["dropped_stale_epoch"] += 1
                continue
            with contextlib.suppress(GenerationInterrupted):  # stage 0 learns it by its own timeout
                await self._send_all(await self._run(partial(worker.received, frame, received.cache_epoch)), active)

    async def _run(self, work: "partial[Result]") -> Result:
        """In the one thread that owns worker and decoder. Out of memory is this engine's death."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except MemoryError:
            if not self._failed.done():
                self._failed.set_result(RuntimeFailure("insufficient_memory", "out of memory while decoding"))
            self.requests.interrupt("engine_failed", "the engine ran out of memory; send the request again")
            raise GenerationInterrupted("engine_failed", "the engine ran out of memory", retriable=True) from None

    async def _send_all(self, outgoing: list[Outgoing], envelope: FrameEnvelope | None) -> None:
        """Send under the epoch that the work began with; a plan change in between makes the frames void."""
        for item in outgoing:
            if envelope is None or envelope is not self._envelope:
                self.counters["dropped_stale_epoch"] += 1
                continue
            if item.peer == self._context.node_id:
                self._answered(item.frame)
                continue
            self._note("sent", item.peer, item.frame)
            try:
                await self._context.link.send(item.peer, envelope.seal(item.frame))
            except ConnectionError:
                self.counters["dropped_unreachable"] += 1
                message = f"stage node {item.peer[:8]} cannot be reached; send the request again"
                raise GenerationInterrupted("unreachable", message, retriable=True) from None
