"""Five agents under what real meshes suffer: a dead coordinator, loss, a partition, a rolling restart.

Whatever happens, an answer is either the whole model's tokens or a clear "send it again". One mesh, in order.
"""

import signal
import time

import pytest

from stage_agent.cli.client import post_json
from tests.e2e.kills import (
    a_stage_apart_from_the_coordinator,
    bring_back,
    kill_while_loading,
    names_of,
)

pytestmark = pytest.mark.timeout(300)


def test_a_dead_coordinator_is_followed_by_another_and_the_answer_stays(five) -> None:
    before, coordinator = five.watch.serving(), five.watch.coordinator()
    stages = names_of(five, before)
    assert five.answers() == five.whole
    five.mesh.kill(coordinator)
    five.watch.until("another coordinator", 60, lambda: five.watch.coordinator() is not None)
    slot = five.wait_until_serving(60, before["term"] if coordinator.name in stages else 0)
    assert coordinator.name not in names_of(five, slot)
    assert five.answers() == five.whole
    five.mesh.start(coordinator)
    five.mesh.wait_for_api(coordinator, 40)
    five.watch.until("everybody back", 60, five.watch.everybody_alive)


def test_an_exclusion_said_at_a_coordinator_that_dies_is_obeyed_by_the_next(five) -> None:
    slot = five.wait_until_serving()
    author = five.watch.coordinator()
    unwanted = next(name for name in names_of(five, slot)[::-1] if name != author.name)

    def everywhere(orders: list[tuple[str, str]]) -> bool:
        told = [five.watch.status(node)["orders"] for node in five.watch.running()]
        return all([(each["text"], each["author_name"]) for each in known] == orders for known in told)

    post_json(author.api, "/api/v1/exclude", {"add": [unwanted]})
    ordered = [(f"exclude {unwanted}", author.name)]
    five.watch.until("everybody knows the order", 20, lambda: everywhere(ordered))
    five.mesh.kill(author)
    five.watch.until("another coordinator", 60, lambda: five.watch.coordinator() is not None)
    obeyed = {unwanted, author.name}
    five.watch.until("a plan without both", 60, lambda: not obeyed & set(names_of(five, five.wait_until_serving())))
    assert five.answers() == five.whole
    five.mesh.start(author)
    five.mesh.wait_for_api(author, 40)
    assert five.watch.status(author)["orders"][0]["text"].startswith("exclude "), "kept on its own disk"
    five.watch.until("everybody back", 60, five.watch.everybody_alive)
    assert everywhere(ordered)
    assert unwanted not in names_of(five, five.wait_until_serving())
    post_json(five.node(unwanted).api, "/api/v1/exclude", {"remove": [unwanted]})
    five.watch.until("the order is taken back", 20, lambda: everywhere([]))


def test_a_stage_that_dies_while_serving_and_one_that_dies_while_its_successor_loads_are_replaced(five) -> None:
    before = five.wait_until_serving()
    first = a_stage_apart_from_the_coordinator(five, before)
    five.mesh.kill(first)
    second = kill_while_loading(five, before["term"])
    slot = five.wait_until_serving(60, before["term"])
    assert not {first.name, second.name} & set(names_of(five, slot))
    assert five.answers() == five.whole
    assert int(five.epochs[-1].split("/")[0]) >= slot["term"], "answered by a plan that is gone"
    bring_back(five, first, second)
    assert five.answers() == five.whole


def test_a_third_of_all_packets_lost_changes_no_answer(five) -> None:
    five.shape(loss=0.3)
    until = time.monotonic() + 8
    while time.monotonic() < until:
        tokens = five.ask()
        assert tokens is None or tuple(tokens) == five.whole
    five.shape()
    five.watch.until("everybody alive again", 60, five.watch.everybody_alive)
    assert five.answers() == five.whole


def test_a_partition_in_two_serves_at_most_one_plan_per_side_and_heals(five) -> None:
    slot = five.wait_until_serving()
    island = set(names_of(five, slot)[-1:])
    others = {node.name for node in five.mesh.nodes} - island
    cut = {f"{a} -> {b}" for a in island for b in others} | {f"{b} -> {a}" for a in island for b in others}
    five.shape(loss=1.0, only=cut)
    until = time.monotonic() + 15
    while time.monotonic() < until:
        for tokens in five.ask_everybody():
            assert tokens == five.whole
    five.shape()
    five.watch.until("everybody sees everybody", 90, five.watch.everybody_alive)
    five.watch.until("one coordinator", 60, lambda: five.watch.coordinator() is not None)
    five.wait_until_serving(60)
    assert five.answers() == five.whole


def test_a_rolling_restart_of_all_ends_with_the_same_answer(five) -> None:
    for node in list(five.mesh.nodes):
        assert node.process is not None
        node.process.send_signal(signal.SIGTERM)
        assert node.process.wait(20) == 0
        five.mesh.start(node)
        five.mesh.wait_for_api(node, 40)
        five.watch.until(f"{node.name} back", 60, five.watch.everybody_alive)
    five.watch.until("one coordinator", 60, lambda: five.watch.coordinator() is not None)
    five.wait_until_serving(90)
    assert five.answers() == five.whole
