"""A process that peers take for an older one counts on; one that they take for a copy ends, but not at the first word."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from protocol.messages import IdentityContested
from stage_agent import own_process
from stage_agent.journal import Journal
from stage_agent.narrator import Narrator
from stage_agent.own_process import BOOT_STEP, CONFIRM_US, CONFIRM_WITHIN_US, RAISE_SPACING_US, OwnProcess
from stage_agent.state.store import StateStore
from stage_agent.switches import Switches
from tests.unit.membership.hands import Bench

WALL_S = 1_800_000_000


@dataclass
class Line:
    sent: list = field(default_factory=list)

    def send(self, peer: str, message: object, lane: str) -> bool:
        self.sent.append((peer, message, lane))
        return True


class World:
    """An own process over a real membership core, store and journal, with clocks to turn."""

    def __init__(self, store: StateStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_us, self.wall_s = 10_000_000, WALL_S
        monkeypatch.setattr(own_process, "monotonic_us", lambda: self.now_us)
        monkeypatch.setattr(own_process, "wall_clock_s", lambda: self.wall_s)
        self.bench, self.store, self.journal, self.greeted = Bench(), store, Journal(), []
        self.membership, self.transport = self.bench.core, Line()
        self.narrator, self.node_id = Narrator(self.membership, self.journal), self.bench.me.node_id
        self.switches = Switches()
        self.own = OwnProcess(self, self.switches, self.greeted.append)  # type: ignore[arg-type]

    def carry_membership(self, effects: object) -> None:
        """Nobody is connected: there is nothing to carry."""

    @property
    def boot_counter(self) -> int:
        return self.membership.own_row.boot_counter

    def kinds(self) -> list[str]:
        return [event.kind for event in self.journal.events(0)]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with StateStore.open(tmp_path) as store:
        store.boot()
        yield World(store, monkeypatch)


def test_refusals_by_several_peers_raise_the_counter_once_and_durably(world: World) -> None:
    for address in ("10.0.0.1:1", "10.0.0.2:1"):
        world.own.cut_off("older_boot", address)
    assert world.greeted == [WALL_S]
    assert world.boot_counter == WALL_S
    assert world.store.boot().boot_counter == WALL_S + 1
    assert world.kinds() == ["boot_counter_raised"]


def test_where_the_clock_does_not_help_it_goes_on_in_steps_that_no_liar_can_exhaust(world: World) -> None:
    world.wall_s = 17
    for _ in range(100):
        world.own.cut_off("older_boot", "10.0.0.1:1")
        world.now_us += RAISE_SPACING_US
    assert world.boot_counter == 5 + 100 * BOOT_STEP < 2**30


def test_other_ends_of_connections_are_none_of_its_business(world: World) -> None:
    for reason in ("closed", "revoked", "timeout", "duplicate"):
        world.own.cut_off(reason, "10.0.0.1:1")
    assert (world.greeted, world.kinds()) == ([], [])


def test_one_word_does_not_end_it_and_a_second_one_later_does(world: World) -> None:
    world.own.cut_off("identity_conflict", "10.0.0.1:1")
    world.now_us += CONFIRM_US - 1
    world.own.turned_away("10.0.0.1:1")
    assert not world.switches.stop.is_set()
    world.now_us += 1
    world.own.turned_away("10.0.0.2:1")
    assert world.switches.stop.is_set()
    assert world.node_id in world.switches.barred
    assert "10.0.0.2:1" in world.switches.barred
    assert "\n" not in world.switches.barred
    assert world.kinds() == ["identity_conflict"], "said once"


def test_a_word_of_long_ago_is_no_first_one(world: World) -> None:
    world.own.turned_away("10.0.0.1:1")
    world.now_us += CONFIRM_WITHIN_US + 1
    world.own.turned_away("10.0.0.1:1")
    assert not world.switches.stop.is_set()


def test_the_process_that_was_there_first_says_it_is_not_planned_and_goes_on(world: World) -> None:
    for _ in range(5):
        world.own.contested("10.0.0.9", IdentityContested(instance="c" * 32, address="10.0.0.7:7946"))
    assert world.membership.members()[world.node_id].conflict
    (said,) = world.journal.events(0)
    assert "10.0.0.7:7946" in said.text
    assert not world.switches.stop.is_set()


def test_a_peer_tells_the_one_that_was_there_first(world: World) -> None:
    world.own.shared("peer", "c" * 32, "10.0.0.7:7946")
    assert world.transport.sent == [("peer", IdentityContested(instance="c" * 32, address="10.0.0.7:7946"), "stream")]


def test_rows_of_a_copy_are_outranked_and_those_of_an_earlier_start_ignored(world: World) -> None:
    world.own.outranked(3)
    assert world.boot_counter == 5
    world.own.outranked(8)
    assert world.boot_counter == 9
    world.own.outranked(12)
    assert world.boot_counter == 9, "a copy that does the same cannot make it run"
