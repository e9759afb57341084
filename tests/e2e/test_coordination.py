"""Five agents under what real meshes suffer: dead coordinators and stages, loss, a partition, a rolling restart.

Whatever happens, an answer is either the whole model's tokens or a clear "send it again". One mesh, in order.
"""

import signal
import time

import pytest

from stage_agent.cli.client import post_json
from tests.e2e.conftest import PROMPT
from tests.e2e.kills import (
    a_stage_apart_from_the_coordinator,
    bring_back,
    in_the_middle_of_an_answer,
    kill_the_coordinator_of_a_load,
    kill_while_loading,
    names_of,
    packets_lost,
    served_at,
)

pytestmark = pytest.mark.timeout(300)


def test_an_exclusion_said_at_a_coordinator_that_dies_while_its_plan_loads_is_obeyed_by_the_next(five) -> None:
    slot = five.wait_until_serving()
    assert five.answers() == five.whole
    author = five.watch.coordinator()
    unwanted = next(name for name in names_of(five, slot)[::-1] if name != author.name)

    def everywhere(orders: list[tuple[str, str]]) -> bool:
        told = [five.watch.status(node)["orders"] for node in five.watch.running()]
        return all([(each["text"], each["author_name"]) for each in known] == orders for known in told)

    post_json(author.api, "/api/v1/exclude", {"add": [unwanted]})
    ordered = [(f"exclude {unwanted}", author.name)]
    five.watch.until("everybody knows the order", 20, lambda: everywhere(ordered))
    slot = five.wait_until_serving(60, slot["term"])
    assert unwanted not in names_of(five, slot)
    stage = a_stage_apart_from_the_coordinator(five, slot)
    five.mesh.kill(stage)
    killed, loading = kill_the_coordinator_of_a_load(five, slot["term"])
    assert killed is author
    slot = five.wait_until_serving(60, loading)
    assert not {unwanted, author.name, stage.name} & set(names_of(five, slot))
    assert five.answers() == five.whole
    bring_back(five, stage, author)
    assert five.watch.status(author)["orders"][0]["text"].startswith("exclude "), "kept on its own disk"
    assert everywhere(ordered)
    assert unwanted not in names_of(five, five.wait_until_serving())
    post_json(five.node(unwanted).api, "/api/v1/exclude", {"remove": [unwanted]})
    five.watch.until("the order is taken back", 20, lambda: everywhere([]))


def test_a_stage_that_dies_in_an_answer_and_one_that_dies_while_its_successor_loads_are_replaced(five) -> None:
    before = five.wait_until_serving()
    first = a_stage_apart_from_the_coordinator(five, before)
    with in_the_middle_of_an_answer(five, before, first, PROMPT) as asked:
        five.mesh.kill(first)
    second = kill_while_loading(five, before["term"])
    slot = five.wait_until_serving(60, before["term"])
    assert not {first.name, second.name} & set(names_of(five, slot))
    assert five.answers() == five.whole
    assert int(five.epochs[-1].split("/")[0]) >= slot["term"], "answered by a plan that is gone"
    told = asked.ended(20)
    if asked.node not in (first, second):
        assert told is not None, "whoever lives says what became of a request"
        assert told.status_code == 503, told.text
        assert told.json()["code"] in {"plan_changed", "refused", "unreachable", "not_serving"}, told.text
    bring_back(five, first, second)
    assert five.answers() == five.whole


def test_a_coordinator_that_dies_while_its_plan_serves_has_a_successor_and_no_answer_is_mixed(five) -> None:
    before, coordinator = five.wait_until_serving(), five.watch.coordinator()
    serves = coordinator.name in names_of(five, before)
    watched = a_stage_apart_from_the_coordinator(five, before)
    with in_the_middle_of_an_answer(five, before, watched, PROMPT) as asked:
        five.mesh.kill(coordinator)
    told = asked.ended(60)
    five.watch.until("a successor", 60, lambda: five.watch.coordinator() not in (None, coordinator))
    if told is not None and told.status_code == 200:
        assert not serves, "nobody had its layers any more"
        assert tuple(told.json()["tokens"][: len(five.whole)]) == five.whole
    elif asked.node is not coordinator:
        assert told is not None, "whoever lives says what became of a request"
        assert told.status_code == 503, told.text
    slot = five.wait_until_serving(60, before["term"] if serves else before["term"] - 1)
    assert coordinator.name not in names_of(five, slot)
    assert five.answers() == five.whole
    bring_back(five, coordinator)
    assert five.answers() == five.whole


def test_a_third_of_all_packets_lost_changes_no_answer(five) -> None:
    before = packets_lost(five)
    five.shape(loss=0.3)
    five.watch.until(
        "losses at every node", 20, lambda: all(lost >= before[name] + 3 for name, lost in packets_lost(five).items())
    )
    meanwhile, answers = packets_lost(five), 0
    until = time.monotonic() + 6
    while time.monotonic() < until or not answers:
        assert time.monotonic() < until + 30, "nothing was answered"
        tokens = five.ask()
        assert tokens is None or tuple(tokens) == five.whole
        answers += tokens is not None
    assert sum(packets_lost(five).values()) > sum(meanwhile.values()), "and losses went on while it was answered"
    five.shape()
    five.watch.until("everybody alive again", 60, five.watch.everybody_alive)
    assert five.answers() == five.whole


def test_a_coordinator_that_is_cut_off_serves_nothing_the_others_follow_another_and_all_heals(five) -> None:
    slot, cut_off = five.wait_until_serving(), five.watch.coordinator()
    others = [node for node in five.mesh.nodes if node is not cut_off]
    cut = {f"{cut_off.name} -> {node.name}" for node in others} | {f"{node.name} -> {cut_off.name}" for node in others}
    five.shape(loss=1.0, only=cut)
    few = five.whole[:6]
    term = slot["term"] if cut_off.name in names_of(five, slot) else slot["term"] - 1
    rounds = [five.ask_everybody(len(few))]

    def answered() -> bool:
        """By a plan that the cut-off node cannot be part of."""
        rounds.append(five.ask_everybody(len(few)))
        return any(int(epoch.split("/")[0]) > term for _, epoch in rounds[-1].values())

    def each_side_calls_the_other_dead() -> bool:
        members = {node.name: five.watch.status(node)["members"] for node in five.mesh.nodes}
        seen = {name: (known.get("alive", 0), known.get("dead", 0)) for name, known in members.items()}
        return seen == {cut_off.name: (1, len(others))} | {node.name: (len(others), 1) for node in others}

    five.watch.until("an answer from the larger side", 60, answered)
    five.watch.until("each side calls the other dead", 60, each_side_calls_the_other_dead)
    assert answered()
    assert all(tokens == few for answers in rounds for tokens, _ in answers.values())
    assert all(len(answers) <= 1 for answers in rounds), "at most one node answers at a time"
    assert cut_off.name not in rounds[-1], "no machine holds the model alone"
    plans = served_at(five, [node.name for node in others])
    assert len(set(plans.values())) == 1, "and its side has one plan"
    assert next(iter(plans.values()))[0] > term
    chiefs = [node for node in others if five.watch.status(node)["coordinator"]["is_self"]]
    assert len(chiefs) == 1
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
        tokens = five.ask()
        assert tokens is None or tuple(tokens) == five.whole, f"answered while {node.name} was replaced"
    five.watch.until("one coordinator", 60, lambda: five.watch.coordinator() is not None)
    five.wait_until_serving(90)
    assert five.answers() == five.whole
