"""What the loop does with the effects of the cores: the disk first, and nothing behind a write that failed."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from config.settings import AssignmentSettings, ElectionSettings, PlannerSettings, ReplanSettings
from coordinator.assignment.effects import Effect, PersistTerm
from coordinator.coordinator import Coordinator
from protocol.ballots import Active, Nack, Prepare, Ready
from protocol.errors import StateError
from protocol.fencing import epoch_to_wire
from protocol.ids import NodeId, Slot, Term
from protocol.messages import Message
from stage_agent import driver as room
from stage_agent.alarm import Alarm
from stage_agent.driver import Driver
from stage_agent.journal import Journal
from stage_agent.library import ModelLibrary
from stage_agent.narrator import Narrator
from stage_agent.orders import Orders
from stage_agent.stage.effects import ActivateRuntime, Load, Loaded, Unload, Unloaded
from stage_agent.state.store import StateStore
from stage_agent.wishes import Wishes
from tests.unit.membership.hands import Bench
from tests.unit.stage.builders import (
    HASH,
    MINE,
    SECOND,
    SLOT,
    activate,
    agent,
    assignment,
    ballot,
    prepare,
    retire,
    stage,
)

CHIEF = NodeId("chief")


class Disk(StateStore):
    """The real store, that tells what it wrote, and that may be full."""

    told: list[str]
    full = False

    def persist_slot(self, slot: str, document: dict[str, Any]) -> None:
        if self.full:
            raise StateError("no space left on the device")
        super().persist_slot(slot, document)
        held = [name for name in ("active", "accepted") if document[name] is not None]
        promised = "promised" if document["promised"]["term"] else "nothing"
        self.told.append(f"disk: {held[0] if held else promised}")

    def persist_term(self, term: int) -> None:
        if self.full:
            raise StateError("no space left on the device")
        super().persist_term(term)
        self.told.append(f"disk: term {term}")


class Chief(Coordinator):
    """The real core, that tells which terms it was told of."""

    told: list[str]

    def on_term_persisted(self, term: Term, now_us: int) -> list[Effect]:
        self.told.append(f"coordinator: term {term}")
        return super().on_term_persisted(term, now_us)


class Engines:
    """Engines that only tell what they are asked; each load is done when the test says so."""

    def __init__(self, told: list[str]) -> None:
        self.told = told

    def load(self, _: Load) -> None:
        self.told.append("engine: load")

    def activate(self, _: ActivateRuntime) -> None:
        self.told.append("engine: serve")

    def unload(self, _: Unload) -> None:
        self.told.append("engine: unload")


class Lines:
    """A transport that tells what leaves."""

    connected: frozenset[NodeId] = frozenset()

    def __init__(self, told: list[str]) -> None:
        self.told = told
        self.sent: list[tuple[NodeId, Message]] = []

    def send(self, peer: NodeId, message: Message, lane: str) -> None:
        assert lane == "stream"
        self.told.append(f"sent: {message.type}")
        self.sent.append((peer, message))


class ByHand(Alarm):
    """Rings when the test says so, and tells for when it was set."""

    def __init__(self) -> None:
        super().__init__()
        self.due_us = 0
        self.bell = asyncio.Event()
        self.waits = asyncio.Event()

    def move(self, due_us: int) -> None:
        self.due_us = due_us

    async def wait(self, due_us: int) -> None:
        self.due_us = due_us
        self.waits.set()
        await self.bell.wait()
        self.bell.clear()

    async def ring(self) -> None:
        """Whoever waits does what is due, and waits again."""
        await self.waits.wait()
        self.waits.clear()
        self.bell.set()
        await self.waits.wait()


class Room:
    """A driver with real cores and a real store, between doubles that write everything down in order."""

    def __init__(self, directory: Path, tasks: asyncio.TaskGroup) -> None:
        self.told: list[str] = []
        self.now_us = 1_000 * SECOND
        mesh = Bench()
        me = mesh.me.node_id
        self.store, self.journal, self.lines, self.alarm = Disk.open(directory), Journal(), Lines(self.told), ByHand()
        self.store.told = self.told
        chief = Chief(
            node_id=me, instance=MINE, last_term=Term(0), election=ElectionSettings(), assignment=AssignmentSettings(),
            replan=ReplanSettings(), planner=PlannerSettings(), random=Random(1), now_us=self.now_us,
        )  # fmt: skip
        chief.told = self.told
        doubles: Any = SimpleNamespace(lines=self.lines, engines=Engines(self.told), library=ModelLibrary(directory))
        self.driver = Driver(
            node_id=me,
            membership=mesh.core,
            coordinator=chief,
            agent=agent(node_id=me, now_us=self.now_us),
            transport=doubles.lines,
            runner=doubles.engines,
            store=self.store,
            book=doubles,
            journal=self.journal,
            narrator=Narrator(mesh.core, self.journal),
            wishes=Wishes(doubles.library, me, lambda _: None),
            orders=Orders(me, lambda _: None),
            publish_row=lambda _: [],
            tasks=tasks,
            planner_pool=ThreadPoolExecutor(1),
            _alarm=self.alarm,
        )
        self.work = assignment(node_id=me)
        tasks.create_task(self.driver.run_timers())

    def hear(self, message: Any, sender: NodeId = CHIEF) -> list[str]:
        """A coordinator's word arrives; what happened, in order."""
        self.told.clear()
        self.driver.post(lambda: self.driver.on_message(sender, message, "stream"))
        return list(self.told)

    def engine(self, event: Any) -> list[str]:
        self.told.clear()
        self.driver.post(lambda: self.driver.on_runtime(event))
        return list(self.told)

    def carry(self, effect: Effect) -> list[str]:
        self.told.clear()
        self.driver.post(lambda: self.driver.carry_coordinator([effect]))
        return list(self.told)

    async def at(self, now_us: int) -> list[str]:
        """The clock shows ``now_us`` and the alarm rings."""
        self.told.clear()
        self.now_us = now_us
        await self.alarm.ring()
        return list(self.told)

    @property
    def last(self) -> Message:
        return self.lines.sent[-1][1]


@pytest.fixture
def in_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a test's coroutine with a ``Room`` whose clock is the driver's."""

    def run(test: Any) -> None:
        async def main() -> None:
            async with asyncio.TaskGroup() as tasks:
                here = Room(tmp_path / "state", tasks)
                monkeypatch.setattr(room, "monotonic_us", lambda: here.now_us)
                await test(here)
                here.driver.planner_pool.shutdown()
                here.store.close()
                for task in asyncio.all_tasks() - {asyncio.current_task()}:
                    task.cancel()

        asyncio.run(main())

    return run


def test_every_promise_and_acceptance_is_on_disk_before_anybody_hears_of_it(in_room: Any) -> None:
    async def test(here: Room) -> None:
        at = ballot(1)
        assert here.hear(prepare(at)) == ["disk: promised", "sent: promise"]
        assert here.hear(stage(at, work=here.work)) == ["disk: accepted", "engine: load", "sent: stage_progress"]
        assert here.engine(Loaded(SLOT, at)) == ["sent: ready"]
        assert isinstance(here.last, Ready)
        assert here.hear(activate(at)) == ["disk: active", "engine: serve", "sent: active"]
        assert isinstance(here.last, Active)
        assert here.store.slots()[SLOT]["active"]["plan_hash"] == HASH
        assert here.lines.sent[0][0] == CHIEF

    in_room(test)


CLAIMS: dict[str, tuple[Any, str, str]] = {
    "prepare": (lambda _, at: prepare(at), "nothing", "promised"),
    "stage": (lambda here, at: stage(at, work=here.work), "promised", "accepted"),
    "activate": (lambda _, at: activate(at), "accepted", "active"),
}
"""A coordinator's words in order, and what the disk holds before and after each."""


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_failed_write_lets_neither_answer_nor_load_leave_and_it_is_tried_again_after_five_seconds(
    in_room: Any, claim: str
) -> None:
    async def test(here: Room) -> None:
        at = ballot(1)
        for say, _, after in CLAIMS.values():
            if after == CLAIMS[claim][2]:
                break
            here.hear(say(here, at))
        here.engine(Loaded(SLOT, at))
        say, before, after = CLAIMS[claim]
        on_disk = here.store.slots()
        here.store.full = True
        assert here.hear(say(here, at)) == [], "nothing leaves behind a write that failed"
        assert here.store.slots() == on_disk
        assert here.journal.events(0)[-1].kind == "state_unavailable"
        here.store.full = False
        assert here.hear(say(here, at)) == ["sent: nack"], "until the disk is tried, every ballot is refused"
        assert isinstance(here.last, Nack)
        assert here.last.reason == "state_unavailable"
        due_us = here.now_us + 5 * SECOND
        assert here.alarm.due_us <= due_us
        assert await here.at(due_us - 1) == []
        assert await here.at(due_us) == [f"disk: {before}"]
        assert here.hear(say(here, at))[0] == f"disk: {after}", "it was taken back, so it is news"
        assert not isinstance(here.last, Nack)

    in_room(test)


def test_a_disk_that_stays_full_is_tried_every_five_seconds_and_no_ballot_passes_meanwhile(in_room: Any) -> None:
    async def test(here: Room) -> None:
        here.hear(prepare(ballot(1)))
        here.store.full = True
        here.hear(prepare(ballot(2)))
        begun_us = here.now_us
        for attempt in range(1, 4):
            assert await here.at(begun_us + attempt * 5 * SECOND) == []
            assert here.hear(prepare(ballot(2))) == ["sent: nack"]
        assert [event.kind for event in here.journal.events(0)].count("state_unavailable") == 4
        here.store.full = False
        assert await here.at(begun_us + 20 * SECOND) == ["disk: promised"]
        assert here.store.slots()[SLOT]["promised"] == dict(epoch_to_wire(ballot(1))), "not the one never promised"

    in_room(test)


def test_a_campaign_goes_on_once_its_term_is_on_disk_and_not_at_all_if_it_cannot_be(in_room: Any) -> None:
    async def test(here: Room) -> None:
        assert here.carry(PersistTerm(Term(7))) == ["disk: term 7", "coordinator: term 7"]
        here.store.full = True
        assert here.carry(PersistTerm(Term(8))) == []
        assert here.journal.events(0)[-1].kind == "state_unavailable"
        assert here.journal.claims["campaigned"] == 1
        here.store.full = False
        assert here.store.boot().last_term == 7

    in_room(test)


def test_a_word_to_oneself_is_taken_after_the_present_one_and_never_sent(in_room: Any) -> None:
    async def test(here: Room) -> None:
        own = ballot(1, node=here.driver.node_id, instance=MINE)
        assert here.hear(Prepare(ballot=epoch_to_wire(own), slot=SLOT, participant_set_hash=HASH), own.node_id) == [
            "disk: promised"
        ]
        assert here.lines.sent == []
        assert here.journal.claims["promised"] == 1

    in_room(test)


def test_a_retired_plan_is_off_the_disk_before_its_engine_stops(in_room: Any) -> None:
    async def test(here: Room) -> None:
        at = ballot(1)
        for word in (prepare(at), stage(at, work=here.work)):
            here.hear(word)
        here.engine(Loaded(SLOT, at))
        here.hear(activate(at))
        told = here.hear(retire(at))
        assert told.index("engine: unload") > 0
        assert told[0].startswith("disk: ")
        assert here.store.slots()[SLOT]["active"] is None
        assert here.engine(Unloaded(Slot(SLOT), at)) == []

    in_room(test)
