"""The dead on disk: who is gone stays gone for the next process, at no more than one write a second."""

from pathlib import Path

from protocol.ids import NodeId
from protocol.membership.table import Tombstone
from stage_agent.graves import SPACING_US, Graves, kept_tombstones
from stage_agent.journal import Journal
from stage_agent.said import forget_said
from stage_agent.state.store import StateStore

OLD, NEW = Tombstone(NodeId("a" * 32), 3, 50), Tombstone(NodeId("b" * 32), 1, 9)


class Table:
    def __init__(self) -> None:
        self.stones: tuple[Tombstone, ...] = ()
        self.asked = 0

    def __call__(self) -> tuple[Tombstone, ...]:
        self.asked += 1
        return self.stones


def test_tombstones_come_back_with_the_next_process(tmp_path: Path) -> None:
    table = Table()
    with StateStore.open(tmp_path) as store:
        assert kept_tombstones(store) == ()
        graves = Graves(store, Journal(), table)
        table.stones = (OLD, NEW)
        graves.changed(10 * SPACING_US)
    with StateStore.open(tmp_path) as store:
        assert kept_tombstones(store) == (OLD, NEW)
        forget_said(store)
        assert kept_tombstones(store) == (), "another mesh has other dead"


def test_many_changes_cost_one_write_a_second_and_the_last_one_is_kept(tmp_path: Path) -> None:
    table = Table()
    with StateStore.open(tmp_path) as store:
        graves = Graves(store, Journal(), table)
        for step in range(100):
            table.stones = tuple(Tombstone(NodeId(f"{number:032}"), 1, 1) for number in range(step))
            graves.changed(SPACING_US + step * 1_000)
        assert table.asked == 1
        graves.keep(2 * SPACING_US - 1)
        assert len(kept_tombstones(store)) == 0
        graves.keep(2 * SPACING_US)
        assert len(kept_tombstones(store)) == 99
        graves.keep(9 * SPACING_US)
        assert table.asked == 2, "nothing changed, nothing is looked at"


def test_a_goodbye_does_not_wait_for_the_second(tmp_path: Path) -> None:
    table = Table()
    with StateStore.open(tmp_path) as store:
        graves = Graves(store, Journal(), table)
        graves.changed(SPACING_US)
        table.stones = (OLD,)
        graves.changed(SPACING_US + 1, goodbye=True)
        assert kept_tombstones(store) == (OLD,)


def test_the_end_of_the_daemon_does_not_wait_for_the_second(tmp_path: Path) -> None:
    table = Table()
    with StateStore.open(tmp_path) as store:
        graves = Graves(store, Journal(), table)
        graves.changed(SPACING_US)
        table.stones = (OLD,)
        graves.changed(SPACING_US + 1)
        graves.keep(SPACING_US + 2, spacing_us=0)
        assert kept_tombstones(store) == (OLD,)


def test_a_store_that_refuses_is_said_and_tried_again(tmp_path: Path) -> None:
    table, journal = Table(), Journal()
    table.stones = tuple(Tombstone(NodeId(f"{number:064}"), 1, 1) for number in range(70_000))
    with StateStore.open(tmp_path) as store:
        graves = Graves(store, journal, table)
        graves.changed(SPACING_US)
        assert [event.kind for event in journal.events(0)] == ["state_unavailable"]
        table.stones = (OLD,)
        graves.keep(2 * SPACING_US)
        assert kept_tombstones(store) == (OLD,)
