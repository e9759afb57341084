"""Carries out what the stage core asks of engines: load, serve under an epoch, unload.

One runtime may stand behind several ballots of a slot, when only neighbours differ (``Load.reuse``): it is unloaded with
the last of them. What becomes of a load is reported as a ``RuntimeEvent``, never returned.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from config.settings import RuntimeSettings
from coordinator.planner.readout import ReadoutSpeeds
from protocol.ballots import StageAssignment
from protocol.errors import StagemeshError
from protocol.fencing import NO_EPOCH, PlanEpoch
from protocol.frame_envelope import refusal_of
from protocol.ids import NodeId, Slot
from protocol.rows import StageFact
from stage_agent.artifacts.node_artifacts import NodeArtifacts
from stage_agent.clock import monotonic_us
from stage_agent.library import ModelLibrary
from stage_agent.runtimes.budget import StartBudget
from stage_agent.runtimes.context import RuntimeContext
from stage_agent.runtimes.factory import make_runtime
from stage_agent.runtimes.interface import DecodeTiming, Generating, RuntimeFailure, StageLink, StageRuntime
from stage_agent.runtimes.reference.requests import Generation, GenerationInterrupted
from stage_agent.stage.agent import StageAgent
from stage_agent.stage.effects import (
    ActivateRuntime,
    Load,
    Loaded,
    LoadFailed,
    LoadFailure,
    LoadProgress,
    RuntimeDied,
    RuntimeEvent,
    Unload,
    Unloaded,
)
from stage_agent.stage.sealed import judge_sealed
from stage_agent.tunnel.tunnels import Tunnels

UNLOAD_LIMIT_S = 20.0
MAX_ANSWERS = 64
"""Refusals on their way; beyond that a refused frame is only counted and its request times out."""

_REASONS: dict[str, LoadFailure] = {
    "insufficient_memory": "insufficient_memory",
    "model_mismatch": "model_mismatch",
    "model_unavailable": "model_mismatch",
    "range_invalid": "range_invalid",
    "unsupported_model": "engine_mismatch",
    "engine_mismatch": "engine_mismatch",
}
Label = tuple[Slot, PlanEpoch]


@dataclass(slots=True)
class _Fetched:
    """Where the engine's files are, and the assignment for which the artifact store holds them."""

    path: Path | None = None
    assignment: StageAssignment | None = None


@dataclass(slots=True)
class _Shared:
    """One engine and the ballots it stands for."""

    runtime: StageRuntime
    labels: set[Label]
    fetched: _Fetched
    ready: bool = False
    serving: Label | None = None
    task: asyncio.Task[None] | None = None
    closing: bool = field(default=False)


class StageRunner:
    """All engines of this node. ``report`` may be called at any time on the loop."""

    def __init__(
        self,
        *,
        settings: RuntimeSettings,
        node_id: str,
        tasks: asyncio.TaskGroup,
        library: ModelLibrary,
        artifacts: NodeArtifacts,
        link: StageLink,
        peer_address: Callable[[str], str],
        report: Callable[[RuntimeEvent], None],
        tunnels: Tunnels | None = None,
        engine: str = "",
        shaped_bytes_per_s: int | None = None,
        readout_speeds: Callable[[str], ReadoutSpeeds] = lambda _last: ReadoutSpeeds(None, None, None),
        frames: Counter[str] | None = None,
    ) -> None:
        self._settings = settings
        self._node_id = node_id
        self._tasks = tasks
        self._library = library
        self._artifacts = artifacts
        self._link = link
        self._peer_address = peer_address
        self._report = report
        self._tunnels = tunnels
        self._engine = engine
        self._shaped_bytes_per_s = shaped_bytes_per_s
        self._readout_speeds = readout_speeds
        self._frames = Counter[str]() if frames is None else frames
        self._answers = 0
        self._engines: dict[Label, _Shared] = {}
        self._budgets: dict[Slot, StartBudget] = {}

    def load(self, effect: Load) -> None:
        """Begin; answers ``LoadProgress`` … ``Loaded`` or ``LoadFailed``."""
        label = (effect.slot, effect.ballot)
        reused = self._engines.get((effect.slot, effect.reuse)) if effect.reuse is not None else None
        if reused is not None and reused.ready and reused.runtime.keeps(effect.assignment):
            reused.labels.add(label)
            self._engines[label] = reused
            self._report(Loaded(*label))
            return
        fetched = _Fetched()
        context = RuntimeContext(
            tasks=self._tasks,
            node_id=self._node_id,
            epoch=effect.ballot,
            link=self._link,
            model_path=lambda assignment: fetched.path or self._library.path_of(assignment),
            peer_address=self._peer_address,
            tunnels=self._tunnels,
            engine=self._engine,
            shaped_bytes_per_s=self._shaped_bytes_per_s,
            readout_speeds=self._readout_speeds,
            frames=self._frames,
            budget=self._budgets.setdefault(
                effect.slot, StartBudget(self._settings.restart_limit, self._settings.restart_window_us)
            ),
        )
        engine = _Shared(make_runtime(self._settings, context), {label}, fetched)
        self._engines[label] = engine
        engine.task = self._tasks.create_task(self._live(engine, effect), name=f"stage {effect.slot} {effect.ballot}")

    def activate(self, effect: ActivateRuntime) -> None:
        """Serve under the ballot from now on."""
        label = (effect.slot, effect.ballot)
        engine = self._engines.get(label)
        if engine is not None:
            engine.serving = label
            self._tasks.create_task(self._activate(engine, effect), name=f"activate {effect.slot} {effect.ballot}")

    def unload(self, effect: Unload) -> None:
        """Free the load; answers ``Unloaded`` when the memory is free."""
        label = (effect.slot, effect.ballot)
        engine = self._engines.pop(label, None)
        if engine is None:
            self._report(Unloaded(*label))
            return
        engine.labels.discard(label)
        if engine.labels:
            self._report(Unloaded(*label))
            return
        engine.closing = True
        self._tasks.create_task(self._unload(engine, label), name=f"unload {effect.slot} {effect.ballot}")

    def serving(self, slot: Slot, epoch: PlanEpoch) -> StageRuntime | None:
        """The engine that serves ``slot`` at ``epoch``."""
        engine = self._engines.get((slot, epoch))
        return engine.runtime if engine is not None and engine.serving == (slot, epoch) else None

    def timing(self, slot: Slot) -> DecodeTiming | None:
        """What the serving engine measured."""
        for (name, _), engine in self._engines.items():
            if name == slot and engine.serving is not None:
                return engine.runtime.timings()
        return None

    def timed(self, facts: tuple[StageFact, ...]) -> tuple[StageFact, ...]:
        """``facts`` with what the serving engines measured."""
        return tuple(self._timed(fact) for fact in facts)

    def on_frame(self, peer: NodeId, sealed: bytes, agent: StageAgent, counted: Counter[str], now_us: int) -> None:
        """Judge a frame by the stage's fence; hand an accepted one to the engine, count and answer a refused one.

        Raises ``WireError`` for bytes that are not a frame.
        """
        judged = judge_sealed(agent, sealed, now_us)
        verdict = judged.verdict
        engine = self.serving(judged.slot, judged.epoch) if verdict.accepted else None
        receive = getattr(engine, "on_frame", None)
        if receive is None:
            counted[verdict.outcome if not verdict.accepted else "not_serving"] += 1
            answer = refusal_of(sealed, verdict.active or NO_EPOCH)
            if answer is not None and self._answers < MAX_ANSWERS:
                self._answers += 1
                self._tasks.create_task(self._answer(peer, answer), name=f"refuse {peer}")
        else:
            receive(peer, sealed)

    async def generate(self, slot: Slot, prompt: tuple[int, ...], max_tokens: int) -> Generation:
        """Up to ``max_tokens`` tokens after ``prompt`` from the verification engine, if this node is stage 0 of ``slot``.

        Raises ``GenerationInterrupted``.
        """
        for (name, _), engine in self._engines.items():
            if name == slot and engine.serving is not None and isinstance(engine.runtime, Generating):
                return await engine.runtime.generate(prompt, max_tokens)
        raise GenerationInterrupted("not_serving", f"this node does not answer requests of {slot}", retriable=True)

    async def _answer(self, peer: NodeId, answer: bytes) -> None:
        try:
            await self._link.send(peer, answer)
        except ConnectionError:
            pass  # whoever sent the frame is gone, and its request with it
        finally:
            self._answers -= 1

    def _timed(self, fact: StageFact) -> StageFact:
        timing = self.timing(Slot(fact.slot)) if fact.state == "serving" else None
        if timing is None:
            return fact
        return fact.model_copy(
            update={
                "decode_us_per_layer": timing.us_per_layer,
                "decode_samples": timing.samples,
                "decode_age_us": timing.age_us,
                "tpot_us": timing.tpot_us,
                "tpot_tokens": timing.tpot_tokens,
            }
        )

    async def close(self) -> None:
        """Stop every engine; nothing is left behind."""
        engines = {id(engine): engine for engine in self._engines.values()}
        self._engines.clear()
        for engine in engines.values():
            engine.closing = True
            await self._stop(engine)

    async def _live(self, engine: _Shared, effect: Load) -> None:
        label = (effect.slot, effect.ballot)
        try:
            needed = await self._fetch(engine, effect)
            await engine.runtime.load(
                effect.assignment,
                lambda loaded, total: self._report(LoadProgress(*label, needed + loaded, needed + total)),
            )
        except StagemeshError as refused:
            self._engines.pop(label, None)
            self._release(engine)
            if not engine.closing:
                self._report(LoadFailed(*label, *_told(refused)))
            return
        engine.ready = True
        self._report(Loaded(*label))
        failure = await engine.runtime.wait_failed()
        if failure.reason != "stage_lost":  # that counts where it happened
            self._budgets[effect.slot].record_failure(monotonic_us())
        self._release(engine)
        for each in tuple(engine.labels):
            self._engines.pop(each, None)
            self._report(RuntimeDied(*each, str(failure)))

    async def _fetch(self, engine: _Shared, effect: Load) -> int:
        """Bytes that had to come from peers before the engine could read its layers. Raises ``ModelError``.

        A worker of llama.cpp reads no file: its head sends it the weights.
        """
        assignment = effect.assignment
        if self._settings.kind == "llama_cpp" and "driver" not in assignment.roles:
            return 0
        needed = 0

        def progress(here_bytes: int, needed_bytes: int) -> None:
            nonlocal needed
            needed = needed_bytes
            total = needed_bytes + assignment.parameter_bytes
            self._report(LoadProgress(effect.slot, effect.ballot, here_bytes, total))

        engine.fetched.path = await self._artifacts.ensure(assignment, progress)
        engine.fetched.assignment = assignment
        return needed

    def _release(self, engine: _Shared) -> None:
        """The engine does not read its files any more; harmless when repeated."""
        held, engine.fetched.assignment = engine.fetched.assignment, None
        if held is not None:
            self._artifacts.release(held)

    async def _activate(self, engine: _Shared, effect: ActivateRuntime) -> None:
        try:
            await engine.runtime.activate(effect.ballot, effect.assignment)
        except RuntimeFailure as failure:
            self._engines.pop((effect.slot, effect.ballot), None)
            self._report(RuntimeDied(effect.slot, effect.ballot, str(failure)))

    async def _unload(self, engine: _Shared, label: Label) -> None:
        await self._stop(engine)
        self._report(Unloaded(*label))

    async def _stop(self, engine: _Shared) -> None:
        try:
            async with asyncio.timeout(UNLOAD_LIMIT_S):
                await engine.runtime.unload()
        except TimeoutError:
            pass  # the process leash ends what would not stop
        self._release(engine)
        if engine.task is not None:
            engine.task.cancel()


def _told(failure: StagemeshError) -> tuple[LoadFailure, str]:
    """The stage core's reason, and one line for people."""
    if isinstance(failure, RuntimeFailure):
        return _REASONS.get(failure.reason, "load_failed"), str(failure)
    return "model_mismatch", str(failure)
