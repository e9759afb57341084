"""The same question gives the same bytes: in any order of nodes and links, and in another process with other hashes."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from random import Random

import pytest

from coordinator.planner.document import plan_document, refusal_document
from coordinator.planner.plan import Plan
from coordinator.planner.planning import plan
from coordinator.planner.problem import PlanningProblem, PlanRequest
from tests.property.planner.instances import small_problem
from tests.property.planner.meshes import mesh

PROGRAM = """
from tests.property.planner.test_determinism import answers
print(answers())
"""


def bytes_of(question: PlanningProblem) -> str:
    found = plan(question)
    return json.dumps(plan_document(found) if isinstance(found, Plan) else refusal_document(found))


def shuffled(question: PlanningProblem, rng: Random) -> PlanningProblem:
    nodes, edges = list(question.participants), list(question.edges)
    rng.shuffle(nodes)
    rng.shuffle(edges)
    return replace(question, participants=tuple(nodes), edges=tuple(edges))


def questions() -> list[PlanningProblem]:
    wide = PlanRequest(objective="throughput", concurrency=4, context_length=16_384, search_budget_ms=20)
    return [
        mesh(1, 9),
        mesh(2, 14, request=PlanRequest()),
        mesh(3, 8, request=wide),
        mesh(4, 48, degree=6),
        *(small_problem(Random(seed)) for seed in (3, 17, 24, 41)),
    ]


def answers() -> str:
    return "\n".join(bytes_of(question) for question in questions())


@pytest.mark.parametrize("seed", range(40))
def test_the_order_of_nodes_and_links_never_matters(seed: int) -> None:
    question = small_problem(Random(seed))
    assert bytes_of(question) == bytes_of(shuffled(question, Random(seed + 1)))


def test_a_large_mesh_is_planned_alike_in_any_order() -> None:
    question = mesh(7, 16)
    assert bytes_of(question) == bytes_of(shuffled(question, Random(1)))


def test_two_processes_with_different_hash_seeds_agree_byte_for_byte() -> None:
    printed = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "77")
    }
    assert printed == {answers() + "\n"}
