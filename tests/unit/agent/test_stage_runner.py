"""Between the stage core and its engines: which frames reach an engine, who is told no, and whose failures count."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from config.settings import RuntimeSettings
from protocol.ballots import StageAssignment
from protocol.errors import ModelError, WireError
from protocol.fencing import PlanEpoch
from protocol.frame_envelope import FrameEnvelope, open_envelope, open_sealed
from protocol.ids import NodeId
from protocol.stage_frame import FLAG_RETRIABLE, FrameKind, StageFrame
from stage_agent import stage_runner as room
from stage_agent.runtimes.context import RuntimeContext
from stage_agent.runtimes.interface import DecodeTiming, FailureReason, Report, RuntimeFailure
from stage_agent.stage.effects import (
    ActivateRuntime,
    Load,
    Loaded,
    LoadFailed,
    LoadProgress,
    RuntimeDied,
    RuntimeEvent,
    Unload,
    Unloaded,
)
from stage_agent.stage_runner import MAX_ANSWERS, StageRunner
from tests.unit.stage.builders import ME, SLOT, agent, assignment, ballot, serve, stage, tell

SENDER = NodeId("sender")
OLD, NOW, NEWER = ballot(1), ballot(2), ballot(3)
FIRST_REQUEST = 1_000


class Engine:
    """An engine that loads at once, takes frames, and ends when and as the test says."""

    def __init__(self, context: RuntimeContext, refuses: Exception | None) -> None:
        self.context = context
        self.refuses = refuses
        self.taken: list[tuple[str, StageFrame]] = []
        self.ended: asyncio.Future[RuntimeFailure] = asyncio.get_running_loop().create_future()
        self.epochs: list[PlanEpoch] = []
        self.unloads = 0
        self.keeps_all = True

    async def load(self, _: StageAssignment, report: Report) -> None:
        if self.refuses is not None:
            raise self.refuses
        report(10, 10)

    def keeps(self, _: StageAssignment) -> bool:
        return self.keeps_all

    async def activate(self, epoch: PlanEpoch, _: StageAssignment) -> None:
        self.epochs.append(epoch)

    async def unload(self) -> None:
        self.unloads += 1

    async def wait_failed(self) -> RuntimeFailure:
        return await self.ended

    def timings(self) -> DecodeTiming | None:
        return None


class TakingEngine(Engine):
    """One that takes stage frames, as only the reference engine does."""

    def on_frame(self, peer: str, sealed: bytes) -> None:
        self.taken.append((peer, open_sealed(sealed)[1]))


class Shelf:
    """Artifacts that are all here; remembers what was given back."""

    def __init__(self) -> None:
        self.released: list[StageAssignment] = []

    async def ensure(self, _: StageAssignment, progress: Callable[[int, int], None]) -> Path:
        progress(0, 0)
        return Path("/models/m.gguf")

    def release(self, held: StageAssignment) -> None:
        self.released.append(held)


class Wire:
    """A link that keeps what it is given; it can be stuck or down."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, bytes]] = []
        self.open = asyncio.Event()
        self.open.set()
        self.down = False

    async def send(self, peer: str, sealed: bytes) -> None:
        await self.open.wait()
        if self.down:
            raise ConnectionResetError(peer)
        self.sent.append((peer, sealed))


class Room:
    """A runner with a real stage core, and doubles around it."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self.engines: list[Engine] = []
        self.kind: type[Engine] = TakingEngine
        self.refuses: Exception | None = None
        self.reports: list[RuntimeEvent] = []
        self.wire, self.shelf = Wire(), Shelf()
        self.counted: Counter[str] = Counter()
        self.agent = agent()
        doubles: Any = self
        self.runner = StageRunner(
            settings=RuntimeSettings(kind="reference", restart_limit=1),
            node_id=ME,
            tasks=tasks,
            library=doubles,
            artifacts=doubles.shelf,
            link=self.wire,
            peer_address=lambda _: "",
            report=self.reports.append,
        )

    def make(self, _: RuntimeSettings, context: RuntimeContext) -> Engine:
        self.engines.append(self.kind(context, self.refuses))
        return self.engines[-1]

    async def load(self, at: PlanEpoch, work: StageAssignment | None = None, reuse: PlanEpoch | None = None) -> None:
        self.runner.load(Load(SLOT, at, work or assignment(), reuse))
        await settle()

    async def serve(self, at: PlanEpoch, reuse: PlanEpoch | None = None) -> Engine:
        """The core and its engine serve ``at``."""
        work = assignment(first_request_id=FIRST_REQUEST)
        serve(self.agent, at, work)
        await self.load(at, work, reuse)
        self.runner.activate(ActivateRuntime(SLOT, at, work, 0, FIRST_REQUEST))
        await settle()
        return self.engines[-1]

    async def frame(self, at: PlanEpoch, **fields: Any) -> list[tuple[str, StageFrame]]:
        """A frame of plan ``at`` comes from SENDER; the answers that left."""
        before = len(self.wire.sent)
        self.runner.on_frame(SENDER, sealed(at, **fields), self.agent, self.counted, 0)
        await settle()
        return [(peer, open_sealed(raw)[1]) for peer, raw in self.wire.sent[before:]]


def sealed(at: PlanEpoch, **fields: Any) -> bytes:
    values = {"kind": FrameKind.DECODE, "request_id": FIRST_REQUEST, "session_id": 7, **fields}
    return FrameEnvelope(at, SLOT).seal(StageFrame(**values))


async def settle() -> None:
    """Every task that can go on has done so: nothing here waits for time or disk."""
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture
def in_room(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Room], Awaitable[None]]], None]:
    def run(test: Callable[[Room], Awaitable[None]]) -> None:
        async def main() -> None:
            async with asyncio.TaskGroup() as tasks:
                here = Room(tasks)
                monkeypatch.setattr(room, "make_runtime", here.make)
                await test(here)
                await here.runner.close()

        asyncio.run(main())

    return run


def test_a_frame_of_the_active_plan_reaches_the_engine_and_is_not_answered(in_room: Any) -> None:
    async def test(here: Room) -> None:
        engine = await here.serve(NOW)
        assert await here.frame(NOW, decode_step=3) == []
        ((peer, frame),) = engine.taken
        assert (peer, frame.request_id, frame.decode_step) == (SENDER, FIRST_REQUEST, 3)
        assert not here.counted

    in_room(test)


@pytest.mark.parametrize(
    ("at", "fields", "kind"),
    [
        (OLD, {}, "stale_epoch"),
        (NEWER, {}, "stale_epoch"),
        (NOW, {"request_id": FIRST_REQUEST - 1}, "old_request"),
        (NOW, {"checkpoint_generation": 1, "prompt_token_count": 19, "decode_step": 99}, "stale_request"),
        (NOW, {"checkpoint_generation": 1, "prompt_token_count": 20, "decode_step": 4}, "stale_request"),
        (NOW, {"checkpoint_generation": 0, "prompt_token_count": 99, "decode_step": 99}, "stale_request"),
    ],
)
def test_a_frame_that_is_too_old_is_counted_by_its_kind_refused_to_its_sender_and_never_applied(
    in_room: Any, at: PlanEpoch, fields: dict[str, int], kind: str
) -> None:
    async def test(here: Room) -> None:
        engine = await here.serve(NOW)
        assert await here.frame(NOW, checkpoint_generation=1, prompt_token_count=20, decode_step=5) == []
        ((peer, answer),) = await here.frame(at, **fields)
        assert here.counted == {kind: 1}
        assert len(engine.taken) == 1, "the frame before it, and not this one"
        assert peer == SENDER
        assert (answer.kind, answer.marks) == (FrameKind.REFUSED, FLAG_RETRIABLE)
        assert (answer.request_id, answer.session_id) == (fields.get("request_id", FIRST_REQUEST), 7)
        assert open_envelope(answer.payload)[0].epoch == NOW, "the sender learns what is active"
        assert open_envelope(here.wire.sent[-1][1])[0].epoch == at, "and gets it under the plan it believes in"

    in_room(test)


def test_flows_are_told_apart_by_request_and_by_session(in_room: Any) -> None:
    async def test(here: Room) -> None:
        engine = await here.serve(NOW)
        await here.frame(NOW, decode_step=5)
        assert await here.frame(NOW, request_id=FIRST_REQUEST + 1, decode_step=1) == []
        assert await here.frame(NOW, session_id=8, decode_step=1) == []
        assert await here.frame(NOW, decode_step=5) == [], "the same step again is a repetition"
        assert len(engine.taken) == 4
        assert not here.counted

    in_room(test)


def test_a_plan_that_only_the_core_or_an_engine_without_frames_serves_answers_no(in_room: Any) -> None:
    async def test(here: Room) -> None:
        serve(here.agent, NOW, assignment(first_request_id=FIRST_REQUEST))
        assert len(await here.frame(NOW)) == 1, "no engine stands behind it yet"
        assert here.counted == {"not_serving": 1}
        here.kind = Engine
        here.runner.load(Load(SLOT, NOW, assignment()))
        await settle()
        here.runner.activate(ActivateRuntime(SLOT, NOW, assignment(), 0, FIRST_REQUEST))
        assert len(await here.frame(NOW)) == 1
        assert here.counted == {"not_serving": 2}

    in_room(test)


def test_an_engine_that_is_loaded_but_not_activated_gets_no_frame(in_room: Any) -> None:
    async def test(here: Room) -> None:
        serve(here.agent, NOW, assignment(first_request_id=FIRST_REQUEST))
        await here.load(NOW)
        assert len(await here.frame(NOW)) == 1
        assert here.counted == {"not_serving": 1}
        assert here.engines[0].taken == []

    in_room(test)


@pytest.mark.parametrize("kind", [FrameKind.PREDICTION, FrameKind.DISCARD, FrameKind.REFUSED])
def test_frames_that_ask_for_nothing_are_counted_and_not_answered(in_room: Any, kind: FrameKind) -> None:
    async def test(here: Room) -> None:
        await here.serve(NOW)
        assert await here.frame(OLD, kind=kind) == []
        assert here.counted == {"stale_epoch": 1}

    in_room(test)


def test_bytes_that_are_no_frame_raise_and_reach_nobody(in_room: Any) -> None:
    async def test(here: Room) -> None:
        engine = await here.serve(NOW)
        for raw in (b"", b"x" * 300, sealed(NOW)[:150]):
            with pytest.raises(WireError):
                here.runner.on_frame(SENDER, raw, here.agent, here.counted, 0)
        assert engine.taken == []

    in_room(test)


def test_refusals_that_wait_for_a_stuck_peer_are_bounded_and_a_peer_that_is_gone_gives_its_places_back(
    in_room: Any,
) -> None:
    async def test(here: Room) -> None:
        await here.serve(NOW)
        here.wire.open.clear()
        for number in range(MAX_ANSWERS + 10):
            await here.frame(OLD, request_id=number)
        here.wire.down = True
        here.wire.open.set()
        await settle()
        assert here.counted == {"stale_epoch": MAX_ANSWERS + 10}, "those beyond the bound are counted all the same"
        here.wire.down = False
        for number in range(MAX_ANSWERS):
            assert len(await here.frame(OLD, request_id=number)) == 1
        assert len(here.wire.sent) == MAX_ANSWERS

    in_room(test)


def test_at_most_sixty_four_refusals_are_on_their_way(in_room: Any) -> None:
    async def test(here: Room) -> None:
        await here.serve(NOW)
        here.wire.open.clear()
        for number in range(100):
            await here.frame(OLD, request_id=number)
        here.wire.open.set()
        await settle()
        assert len(here.wire.sent) == 64

    in_room(test)


def test_a_plan_with_the_same_layers_takes_over_the_engine_and_the_last_of_them_unloads_it(in_room: Any) -> None:
    async def test(here: Room) -> None:
        engine = await here.serve(NOW)
        here.reports.clear()
        assert await here.serve(NEWER, reuse=NOW) is engine
        assert here.engines == [engine]
        assert here.reports == [Loaded(SLOT, NEWER)]
        assert engine.epochs == [NOW, NEWER]
        assert len(await here.frame(NOW)) == 1, "only the newer plan is served now"
        await here.frame(NEWER)
        assert len(engine.taken) == 1
        here.runner.unload(Unload(SLOT, NOW))
        await settle()
        assert here.reports[-1] == Unloaded(SLOT, NOW)
        assert (engine.unloads, here.shelf.released) == (0, []), "the other plan still needs it"
        here.runner.unload(Unload(SLOT, NEWER))
        await settle()
        assert here.reports[-1] == Unloaded(SLOT, NEWER)
        assert engine.unloads == 1
        assert len(here.shelf.released) == 1

    in_room(test)


@pytest.mark.parametrize("why", ["the engine does not keep it", "nothing is to be reused", "it is gone"])
def test_otherwise_a_plan_gets_an_engine_of_its_own(in_room: Any, why: str) -> None:
    async def test(here: Room) -> None:
        await here.load(NOW)
        here.engines[0].keeps_all = why != "the engine does not keep it"
        if why == "it is gone":
            here.runner.unload(Unload(SLOT, NOW))
        await here.load(NEWER, reuse=None if why == "nothing is to be reused" else NOW)
        assert len(here.engines) == 2

    in_room(test)


def test_an_engine_that_is_still_loading_is_not_reused(in_room: Any) -> None:
    async def test(here: Room) -> None:
        here.runner.load(Load(SLOT, NOW, assignment()))
        here.runner.load(Load(SLOT, NEWER, assignment(), reuse=NOW))
        await settle()
        assert len(here.engines) == 2

    in_room(test)


def test_the_death_of_a_shared_engine_is_told_for_every_plan_it_stood_for(in_room: Any) -> None:
    async def test(here: Room) -> None:
        engine = await here.serve(NOW)
        await here.load(NEWER, reuse=NOW)
        here.reports.clear()
        engine.ended.set_result(RuntimeFailure("engine_exited", "killed by signal 9"))
        await settle()
        died = {event.ballot: event for event in here.reports if isinstance(event, RuntimeDied)}
        assert set(died) == {NOW, NEWER}
        assert "killed by signal 9" in died[NOW].detail
        assert len(here.shelf.released) == 1
        assert len(await here.frame(NOW)) == 1, "and takes no frame any more"

    in_room(test)


@pytest.mark.parametrize(("reason", "exhausted"), [("engine_exited", True), ("stage_lost", False)])
def test_an_engine_that_dies_spends_its_slots_budget_unless_another_stage_was_lost(
    in_room: Any, reason: FailureReason, exhausted: bool
) -> None:
    async def test(here: Room) -> None:
        for number in range(1, 4):  # one more than may fail
            await here.load(ballot(number))
            here.engines[-1].ended.set_result(RuntimeFailure(reason, "gone"))
            await settle()
        budgets = {id(engine.context.budget) for engine in here.engines}
        assert len(budgets) == 1, "one budget a slot, whatever the plan"
        assert here.engines[0].context.budget.exhausted(room.monotonic_us()) is exhausted
        assert sum(isinstance(event, RuntimeDied) for event in here.reports) == 3

    in_room(test)


REASONS = {
    "insufficient_memory": "insufficient_memory",
    "model_mismatch": "model_mismatch",
    "model_unavailable": "model_mismatch",
    "range_invalid": "range_invalid",
    "unsupported_model": "engine_mismatch",
    "engine_mismatch": "engine_mismatch",
    "cancelled": "load_failed",
    "engine_exited": "load_failed",
    "engine_not_ready": "load_failed",
    "restart_budget_exhausted": "load_failed",
    "stage_lost": "load_failed",
}


def test_every_reason_of_an_engine_has_a_word_for_the_coordinator() -> None:
    assert set(REASONS) == set(get_args(FailureReason))


@pytest.mark.parametrize("reason", REASONS)
def test_a_load_that_fails_is_told_once_in_the_coordinators_words_and_gives_the_files_back(
    in_room: Any, reason: FailureReason
) -> None:
    async def test(here: Room) -> None:
        here.refuses = RuntimeFailure(reason, "because")
        await here.load(NOW)
        (failed,) = [event for event in here.reports if not isinstance(event, LoadProgress)]
        assert failed == LoadFailed(SLOT, NOW, REASONS[reason], f"{reason}: because")
        assert len(here.shelf.released) == 1
        here.refuses = None
        await here.load(NEWER, reuse=NOW)
        assert len(here.engines) == 2, "what failed is not reused"

    in_room(test)


def test_a_model_that_cannot_be_had_is_a_model_mismatch(in_room: Any) -> None:
    async def test(here: Room) -> None:
        here.refuses = ModelError("no peer holds it")
        await here.load(NOW)
        assert here.reports[-1] == LoadFailed(SLOT, NOW, "model_mismatch", "no peer holds it")

    in_room(test)


def test_a_load_that_is_called_off_is_unloaded_and_not_a_failure(in_room: Any) -> None:
    async def test(here: Room) -> None:
        here.refuses = RuntimeFailure("cancelled", "unloaded while loading")
        here.runner.load(Load(SLOT, NOW, assignment()))
        here.runner.unload(Unload(SLOT, NOW))
        await settle()
        assert [type(event) for event in here.reports if not isinstance(event, LoadProgress)] == [Unloaded]

    in_room(test)


def test_what_the_runner_tells_of_a_load_makes_the_core_ready(in_room: Any) -> None:
    async def test(here: Room) -> None:
        tell(here.agent, stage(NOW, work=assignment()))
        await here.load(NOW)
        for event in here.reports:
            here.agent.on_runtime(event, 0)
        assert here.agent.facts(0)[0].state == "ready"

    in_room(test)
