"""A plan that is measured far slower than predicted: one sentence that names who is to blame."""

import pytest

from coordinator.assignment.blame import far_below_predicted
from coordinator.assignment.running import RunningPlan, RunningStage
from coordinator.planner.plan import Modeled
from coordinator.replan import Observation
from protocol.ids import Instance, NodeId
from tests.unit.coordination.builders import DIGEST, SLOT, ballot, member, plan, serving, view

B1 = ballot(1, "a")
SPLIT = (("a", 0, 3), ("b", 3, 7), ("c", 7, 8))
PREDICTED_US = 950
"""Eight layers of 100 µs and three hops of 50 µs, as ``plan`` models them."""


def running(**fields) -> RunningPlan:
    made = plan(*SPLIT, tpot_us=PREDICTED_US, **fields)
    stages = tuple(RunningStage(NodeId(node), Instance("1" * 32), start, end, 10) for node, start, end in SPLIT)
    return RunningPlan(SLOT, B1, made.plan_hash, DIGEST, stages, 512, 1, 0, made)


def measured(per_layer_us: dict[str, int]):
    """What the rows say of each stage's own timing; nothing for those that are not named."""
    return view(
        *(
            member(node, stages=(serving(B1, start, end, index, 3, decode_us_per_layer=per_layer_us.get(node)),))
            for index, (node, start, end) in enumerate(SPLIT)
        )
    )


def sentence(tpot_us: int, per_layer_us: dict[str, int], tokens: int = 64) -> str | None:
    return far_below_predicted(running(), Observation(tpot_us=tpot_us, tokens=tokens), measured(per_layer_us))


def test_a_stage_whose_own_timing_explains_it_is_named():
    as_predicted = {"a": 100, "b": 100, "c": 100}
    assert sentence(4_550, as_predicted | {"b": 1_000}) == ("measured 4550 us per token, predicted 950: stage 1 on b")
    assert sentence(3_650, as_predicted | {"a": 1_000}) == ("measured 3650 us per token, predicted 950: stage 0 on a")


def test_the_stage_with_the_greatest_excess_is_named_not_the_one_with_the_slowest_layers():
    """Stage 1 has four layers, stage 2 one: 4 × 300 µs over is more than 1 × 900."""
    assert sentence(3_050, {"a": 100, "b": 400, "c": 1_000}).endswith(": stage 1 on b")


def test_what_the_stages_do_not_explain_is_put_on_the_dearest_hop():
    as_predicted = {"a": 100, "b": 100, "c": 100}
    assert sentence(4_550, as_predicted).startswith("measured 4550 us per token, predicted 950: hop ")
    assert sentence(4_550, as_predicted | {"b": 300}).split(": ")[1].startswith("hop "), (
        "800 µs of 3 600 are the stage's"
    )


def test_a_stage_that_says_nothing_is_taken_at_its_prediction():
    assert sentence(4_550, {}).split(": ")[1].startswith("hop ")
    assert sentence(4_550, {"b": 1_000}).endswith(": stage 1 on b")


def test_timings_of_a_node_that_is_gone_accuse_nobody():
    alone = view(member("a", stages=(serving(B1, 0, 3, 0, 3, decode_us_per_layer=100),)))
    said = far_below_predicted(running(), Observation(tpot_us=4_550, tokens=64), alone)
    assert said.split(": ")[1].startswith("hop ")


@pytest.mark.parametrize(
    ("tpot_us", "tokens"), [(2 * PREDICTED_US, 64), (4_550, 63)], ids=["twice is not more than twice", "too few tokens"]
)
def test_nothing_is_said_before_it_is_proven(tpot_us, tokens):
    assert sentence(tpot_us, {"b": 1_000}, tokens) is None
    assert sentence(2 * PREDICTED_US + 1, {"b": 1_000}, 64) is not None


def test_nothing_is_said_of_a_plan_without_a_prediction():
    unknown = running(modeled=Modeled(decode_tpot_us=None))
    assert far_below_predicted(unknown, Observation(tpot_us=4_550, tokens=64), measured({})) is None
