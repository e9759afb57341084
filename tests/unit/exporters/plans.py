"""A plan with three stages of 10, 12 and 8 layers."""

from coordinator.exporters.export import ExportRequest, Host
from coordinator.planner.document import plan_document
from coordinator.planner.plan import Plan
from coordinator.planner.problem import LockedStage, LockedTopology
from tests.unit.planner.builders import both, model, node, placed, problem

COUNTS = (10, 12, 8)
NAMES = ("alpha", "beta", "gamma")


def locked_plan(counts: tuple[int, ...] = COUNTS) -> Plan:
    names = NAMES[: len(counts)]
    stages, first = [], 0
    for name, count in zip(names, counts, strict=True):
        stages.append(LockedStage(name, first, first + count))
        first += count
    edges = [edge for a in names for b in names if a < b for edge in both(a, b)]
    question = problem(
        [node(name, 100 * 10**9) for name in names], edges, package=model(first), locked=LockedTopology(tuple(stages)),
        context_length=2_048, parallel_lanes=2,
    )  # fmt: skip
    return placed(question)


def request(counts: tuple[int, ...] = COUNTS, **other: object) -> ExportRequest:
    found = locked_plan(counts)
    assert plan_document(found)["placement"] == "locked"
    hosts = {name: Host(name, f"10.0.0.{index + 1}") for index, name in enumerate(NAMES)}
    told = {"plan": found, "hosts": hosts, "model": "M.gguf", "port": 21_061, **other}
    return ExportRequest(**told)
