"""Whatever stands in a scenario file, reading it ends in a scenario or in the typed error."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.planner.plan import Plan, PlanRefused
from coordinator.planner.planning import plan
from coordinator.planner.problem import PlanningProblem
from coordinator.planner.validate import InvalidProblem
from coordinator.simulator.scenario import Scenario, ScenarioError
from tests.unit.simulator.scenarios import CORPUS, read

TEXTS = [path.read_text(encoding="utf-8") for path in sorted(CORPUS.glob("*.toml"))]
NASTY = [
    "nan",
    "-inf",
    "1e999",
    "-1",
    "0",
    "9223372036854775808",
    "true",
    '""',
    "[]",
    "{}",
    '"a -> b"',
    "1.5",
    "2020-01-01",
]


def read_or_refused(text: str) -> Scenario | ScenarioError:
    try:
        return read(text)
    except ScenarioError as error:
        return error


def planned_or_refused(problem: PlanningProblem) -> Plan | PlanRefused | InvalidProblem:
    try:
        return plan(problem)
    except InvalidProblem as error:
        return error


def outcome(text: str) -> None:
    scenario = read_or_refused(text)
    if isinstance(scenario, ScenarioError):
        assert str(scenario).startswith("mesh.toml")
    elif isinstance(scenario.problem, PlanningProblem) and len(scenario.problem.model.layers) <= 100:
        answer = planned_or_refused(scenario.problem)
        assert not isinstance(answer, InvalidProblem) or answer.field


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(TEXTS), st.integers(0, 10**9))
def test_any_value_may_be_replaced_by_a_nasty_one(text: str, seed: int) -> None:
    rng = random.Random(seed)
    lines = text.splitlines()
    numbered = [index for index, line in enumerate(lines) if "=" in line and not line.startswith("[")]
    for index in rng.sample(numbered, k=min(len(numbered), rng.randint(1, 3))):
        lines[index] = lines[index].split("=", 1)[0] + "= " + rng.choice(NASTY)
    outcome("\n".join(lines))


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(TEXTS), st.integers(0, 10**9))
def test_any_line_may_be_lost_doubled_or_cut(text: str, seed: int) -> None:
    rng = random.Random(seed)
    lines = text.splitlines()
    index = rng.randrange(len(lines))
    change = rng.randrange(3)
    if change == 0:
        del lines[index]
    elif change == 1:
        lines.insert(rng.randrange(len(lines)), lines[index])
    else:
        lines[index] = lines[index][: rng.randint(0, len(lines[index]))]
    outcome("\n".join(lines))


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=200))
def test_any_text_is_read_or_refused(text: str) -> None:
    outcome(text)
