"""What a plan says of itself to people."""

from rich.console import Console

from coordinator.planner.document import plan_document
from coordinator.planner.explain import explain, explanation_document
from coordinator.planner.problem import LockedStage, LockedTopology
from stage_agent.cli.explain_view import explanation_view
from stage_agent.cli.plan_view import plan_view
from tests.unit.planner.builders import GB, both, node, placed, problem

NODES = [node("a", 12 * GB, 800 * GB), node("b", 12 * GB, 20 * GB)]


def shown(view) -> str:
    console = Console(width=160, no_color=True)
    with console.capture() as captured:
        console.print(view)
    return captured.get()


def certificate(question) -> str:
    (line,) = [line for line in shown(plan_view(plan_document(placed(question)))).splitlines() if "certificate" in line]
    return line


def test_a_locked_plan_says_that_it_was_ordered_and_not_searched() -> None:
    split = LockedTopology((LockedStage("a", 0, 5), LockedStage("b", 5, 10)))
    line = certificate(problem(NODES, both("a", "b"), locked=split))
    assert "locked: exactly this split was ordered" in line
    assert "0 orders" not in line


def test_a_plan_without_known_speeds_says_what_is_missing() -> None:
    assert "not every speed and round trip is known" in certificate(problem([node("a", bandwidth=None)]))
    assert "capacity was asked for" in certificate(problem(NODES, both("a", "b"), objective="capacity"))
    assert "proven optimal" in certificate(problem(NODES, both("a", "b")))


def test_an_explanation_shows_one_line_for_one_plan() -> None:
    question = problem(NODES, both("a", "b"))
    text = shown(explanation_view(explanation_document(explain(question, placed(question)))))
    assert "same nodes, by memory, a alone" in text
    placements = [line.split("  ") for line in text.splitlines() if "(10)" in line]
    assert len(placements) == 2, text
