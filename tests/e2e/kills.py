"""Killing stages of a live mesh at chosen moments, and how long nothing served."""

import contextlib
import time

from protocol.errors import DaemonUnreachable
from stage_agent.cli.client import get_json
from stage_agent.demo.mesh import DemoNode
from tests.e2e.conftest import LiveMesh

LOADING = frozenset({"loading", "ready"})


def names_of(live: LiveMesh, slot: dict) -> list[str]:
    """The nodes of a plan, in stage order."""
    names = live.watch.names()
    return [names[stage["node_id"]] for stage in slot["plan"]["stages"]]


def a_stage_apart_from_the_coordinator(live: LiveMesh, slot: dict) -> DemoNode:
    """Somebody whose loss costs a stage and no election."""
    coordinator = live.watch.coordinator()
    return next(live.node(name) for name in names_of(live, slot) if live.node(name) is not coordinator)


def served_again_s(live: LiveMesh, victim: DemoNode, before: dict) -> float:
    """Kill ``victim``; seconds until a later plan without it may be routed to, detection included."""
    began_s = time.monotonic()
    live.mesh.kill(victim)
    slot = live.wait_until_serving(60, before["term"])
    took_s = time.monotonic() - began_s
    assert victim.name not in names_of(live, slot)
    return took_s


def kill_while_loading(live: LiveMesh, above_term: int, limit_s: float = 30.0) -> DemoNode:
    """Wait until a node that does not coordinate loads its part of a plan above ``above_term``, and kill it there and then."""
    coordinator = live.watch.coordinator()
    candidates = [node for node in live.watch.running() if node is not coordinator]
    until_s = time.monotonic() + limit_s
    while time.monotonic() < until_s:
        for node in candidates:
            with contextlib.suppress(DaemonUnreachable):
                stages = get_json(node.api, "/api/v1/stages")["stages"]
                if any(stage["name"] == node.name and _loads(stage, above_term) for stage in stages):
                    live.mesh.kill(node)
                    return node
    raise AssertionError("nobody was seen loading")


def _loads(stage: dict, above_term: int) -> bool:
    accepted = stage["accepted"]
    return stage["state"] in LOADING and accepted is not None and accepted["term"] > above_term


def bring_back(live: LiveMesh, *nodes: DemoNode) -> None:
    """Start them again and wait until everybody is there."""
    for node in nodes:
        live.mesh.start(node)
    for node in nodes:
        live.mesh.wait_for_api(node, 40)
    live.watch.until("everybody back", 60, live.watch.everybody_alive)
