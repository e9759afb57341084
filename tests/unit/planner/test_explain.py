import json

from coordinator.planner.explain import Rival, explain, explanation_document
from tests.unit.planner.builders import GB, both, link, node, placed, problem


def explained(question):
    return explain(question, placed(question))


def rival(explanation, kind: str, label: str = "") -> Rival:
    return next(each for each in explanation.rivals if each.kind == kind and label in each.label)


def test_leaving_out_the_best_node_is_priced_and_its_term_named() -> None:
    nodes = [node("a", 11 * GB // 2), node("b", 11 * GB // 2), node("c", 11 * GB // 2, 50 * GB)]
    edges = [link(x, y, 1_000) for x in "abc" for y in "abc" if x != y]
    explanation = explained(problem(nodes, edges))
    without = rival(explanation, "without_node", "without a")
    assert without.plan is not None
    assert {stage.node_id for stage in without.plan.stages} == {"b", "c"}
    assert without.difference_us == 5 * 20_000 - 5 * 10_000
    assert without.term is not None
    assert (without.term.kind, without.term.name) == ("stage", "c")


def test_memory_order_is_the_rival_that_ignores_speed() -> None:
    nodes = [node("huge", 9 * GB, 20 * GB), node("fast", 8 * GB, 800 * GB)]
    explanation = explained(problem(nodes, both("huge", "fast")))
    memory = rival(explanation, "memory_order")
    assert memory.plan is not None
    assert [stage.node_id for stage in memory.plan.stages] == ["huge", "fast"]
    assert memory.difference_us is not None
    assert memory.difference_us > 100_000
    assert memory.term is not None
    assert memory.term.name == "huge"


def test_the_best_single_node_is_a_rival_where_one_fits() -> None:
    nodes = [node("slow", 30 * GB, 20 * GB), node("a", 11 * GB // 2, 900 * GB), node("b", 11 * GB // 2, 900 * GB)]
    edges = [link(x, y, 500) for x in ("slow", "a", "b") for y in ("slow", "a", "b") if x != y]
    alone = rival(explained(problem(nodes, edges)), "single_node")
    assert alone.label == "slow alone"
    assert alone.difference_us is not None
    assert alone.difference_us > 0


def test_a_rival_that_cannot_be_says_why() -> None:
    explanation = explained(problem([node("a", 6 * GB), node("b", 6 * GB)], both("a", "b")))
    without = rival(explanation, "without_node", "without a")
    assert without.plan is None
    assert "no topology can hold" in without.reason
    assert rival(explanation, "single_node").reason == "does not fit"


def test_terms_add_up_to_the_decode_time() -> None:
    explanation = explained(problem([node("a", 6 * GB), node("b", 6 * GB)], both("a", "b")))
    assert sum(term.cost_us or 0 for term in explanation.terms) == explanation.plan.modeled.decode_tpot_us


def test_the_document_is_json_and_says_what_would_change_the_plan() -> None:
    explanation = explained(problem([node("a", 6 * GB), node("b", 6 * GB)], both("a", "b")))
    document = json.loads(json.dumps(explanation_document(explanation)))
    assert document["plan_id"] == explanation.plan.plan_id
    assert [rival["kind"] for rival in document["rivals"]] == [
        "memory_order",
        "without_node",
        "without_node",
        "single_node",
    ]
    assert any("dearest term" in sentence for sentence in document["changes"])
    assert any("target needs" in sentence for sentence in document["changes"])


def test_a_plan_that_answers_several_questions_is_listed_once() -> None:
    nodes = [node("fast", 12 * GB, 800 * GB), node("slow", 12 * GB, 20 * GB)]
    explanation = explained(problem(nodes, both("fast", "slow")))
    plans = [each.plan.plan_hash for each in explanation.rivals if each.plan is not None]
    assert len(plans) == len(set(plans))
    asked = [label for each in explanation.rivals for label in (each.label, *each.also)]
    assert sorted(asked) == sorted(["the same nodes in memory order", "without fast", "with slow", "fast alone"]), (
        "every question is answered"
    )
    assert len(explanation.changes) == len(set(explanation.changes))
    document = explanation_document(explanation)
    assert [entry["also"] for entry in document["rivals"]] == [list(each.also) for each in explanation.rivals]


def test_a_node_that_was_left_out_is_priced_and_the_reason_is_named() -> None:
    nodes = [node("a", 11 * GB // 2), node("b", 11 * GB // 2), node("snail", 30 * GB, 5 * GB)]
    edges = [link(x, y, 1_000) for x in ("a", "b", "snail") for y in ("a", "b", "snail") if x != y]
    explanation = explained(problem(nodes, edges))
    assert {stage.node_id for stage in explanation.plan.stages} == {"a", "b"}
    used = rival(explanation, "with_node", "with snail")
    assert used.difference_us is not None
    assert used.difference_us > 0
    assert used.term is not None
    assert (used.term.kind, used.term.name) == ("stage", "snail")
    assert any(sentence.startswith("snail is left out") for sentence in explanation.changes)
