"""Killing nodes of a live mesh at chosen moments, what a request in flight is told, and how long nothing served."""

import contextlib
import threading
import time
from collections.abc import Iterator

import httpx

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
    loads, _ = seen_loading(live, above_term, limit_s)
    live.mesh.kill(loads)
    return loads


def kill_the_coordinator_of_a_load(live: LiveMesh, above_term: int, limit_s: float = 30.0) -> tuple[DemoNode, int]:
    """Wait until another node loads for the coordinator, and kill the coordinator there and then; the term it loads for."""
    coordinator = live.watch.coordinator()
    assert coordinator is not None
    _, term = seen_loading(live, above_term, limit_s)
    live.mesh.kill(coordinator)
    return coordinator, term


def seen_loading(live: LiveMesh, above_term: int, limit_s: float) -> tuple[DemoNode, int]:
    """Who, other than the coordinator, loads its part of a plan above ``above_term`` by its own word; and that term."""
    coordinator = live.watch.coordinator()
    candidates = [node for node in live.watch.running() if node is not coordinator]
    until_s = time.monotonic() + limit_s
    while time.monotonic() < until_s:
        for node in candidates:
            with contextlib.suppress(DaemonUnreachable):
                stages = get_json(node.api, "/api/v1/stages")["stages"]
                for stage in stages:
                    if stage["name"] == node.name and _loads(stage, above_term):
                        return node, stage["accepted"]["term"]
    raise AssertionError("nobody was seen loading")


def _loads(stage: dict, above_term: int) -> bool:
    accepted = stage["accepted"]
    return stage["state"] in LOADING and accepted is not None and accepted["term"] > above_term


def served_at(live: LiveMesh, names: list[str]) -> dict[str, tuple[int, str]]:
    """Term and coordinator of what each of ``names`` serves by its own word; only those that serve."""
    found = {}
    for name in names:
        stages = get_json(live.node(name).api, "/api/v1/stages")["stages"]
        for stage in stages:
            if stage["name"] == name and stage["state"] == "serving":
                found[name] = stage["active"]["term"], stage["active"]["node_id"]
    return found


def bring_back(live: LiveMesh, *nodes: DemoNode) -> None:
    """Start them again and wait until everybody is there."""
    for node in nodes:
        live.mesh.start(node)
    for node in nodes:
        live.mesh.wait_for_api(node, 40)
    live.watch.until("everybody back", 60, live.watch.everybody_alive)


class Asked:
    """One long request, and what became of it."""

    def __init__(self, node: DemoNode, prompt: tuple[int, ...], max_tokens: int) -> None:
        self.body = {"slot": "default", "prompt": list(prompt), "max_tokens": max_tokens}
        self.node = node
        self.answer: httpx.Response | None = None
        """``None`` while it goes on, and when the connection broke."""
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        with contextlib.suppress(httpx.TransportError):
            self.answer = httpx.post(f"http://{self.node.api}/api/v1/generate", json=self.body, timeout=90)

    @property
    def goes_on(self) -> bool:
        """It has no answer yet."""
        return self._thread.is_alive()

    def ended(self, limit_s: float) -> httpx.Response | None:
        """Its answer, or ``None`` where the node that was asked died."""
        self._thread.join(limit_s)
        assert not self.goes_on, f"no word to the client within {limit_s} s"
        return self.answer


@contextlib.contextmanager
def in_the_middle_of_an_answer(
    live: LiveMesh, slot: dict, watched: DemoNode, prompt: tuple[int, ...]
) -> Iterator[Asked]:
    """A long request to stage 0 of ``slot``; the body runs when ``watched`` has worked for several of its tokens."""
    before = frames_received(watched)
    asked = Asked(live.node(names_of(live, slot)[0]), prompt, max_tokens=400)
    live.watch.until("tokens on their way", 20, lambda: frames_received(watched) >= before + 5)
    assert asked.goes_on, "it must not be answered before anything was killed"
    yield asked


def frames_received(node: DemoNode) -> float:
    """Stage frames that ``node`` took since it started."""
    return metric(node, 'stagemesh_stage_frames_total{direction="received"}')


def packets_lost(live: LiveMesh) -> dict[str, float]:
    """Packets that each node's shaped links have swallowed, by name."""
    name = 'stagemesh_gossip_rejected_total{reason="shaped_loss"}'
    return {node.name: metric(node, name) for node in live.watch.running()}


def metric(node: DemoNode, name: str) -> float:
    """One sample of ``/metrics``; 0 where it is not shown."""
    lines = httpx.get(f"http://{node.api}/metrics").text.splitlines()
    return next((float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name)), 0.0)
