"""What the demo sees of its mesh: the nodes' HTTP APIs, polled; every new event once, in order of arrival."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from protocol.errors import DaemonUnreachable, StagemeshError
from stage_agent.cli.client import get_json, post_json
from stage_agent.demo.mesh import DemoError, DemoMesh, DemoNode

POLL_S = 0.2
Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class SeenEvent:
    """An event of one node, ``at_s`` seconds after the demo began to look."""

    at_s: float
    node: str
    kind: str
    text: str


@dataclass(slots=True)
class MeshWatch:
    """Polls all running nodes. Not concurrent: one command line, one loop."""

    mesh: DemoMesh
    on_event: Callable[[SeenEvent], None]
    began_s: float = field(default_factory=time.monotonic)
    _after: dict[tuple[str, int], int] = field(default_factory=dict)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the watch began."""
        return time.monotonic() - self.began_s

    def running(self) -> list[DemoNode]:
        """Nodes whose process should be alive."""
        return [node for node in self.mesh.nodes if node.process is not None]

    def poll(self) -> None:
        """Report new events of every running node. Raises ``DemoError`` when a daemon ended by itself."""
        for node in self.running():
            self.mesh.check_alive(node)
            assert node.process is not None
            key = (node.name, node.process.pid)
            with contextlib.suppress(DaemonUnreachable):
                events = get_json(node.api, "/api/v1/events", parameters={"after": str(self._after.get(key, 0))})[
                    "events"
                ]
                for event in events:
                    self._after[key] = event["seq"]
                    self.on_event(SeenEvent(self.elapsed_s, node.name, event["kind"], event["text"]))

    def until(self, what: str, limit_s: float, condition: Callable[[], bool]) -> float:
        """Poll until ``condition``; the seconds it took. Raises ``DemoError`` naming ``what`` after ``limit_s``."""
        start = time.monotonic()
        while True:
            self.poll()
            with contextlib.suppress(DaemonUnreachable):
                if condition():
                    self.poll()
                    return time.monotonic() - start
            if time.monotonic() - start > limit_s:
                raise DemoError(
                    f"{what} did not happen within {limit_s:.0f} s; logs are below {self.mesh.root}{self._why()}"
                )
            time.sleep(POLL_S)

    def serve(self, model: Path) -> None:
        """Ask the mesh, through its first node, to place ``model``."""
        post_json(self.running()[0].api, "/api/v1/models", {"model": str(model.absolute())})

    def status(self, node: DemoNode) -> Document:
        """``/api/v1/status`` of ``node``."""
        return dict(get_json(node.api, "/api/v1/status"))

    def everybody_alive(self) -> bool:
        """Every running node sees exactly the running nodes alive."""
        running = self.running()
        return all(self.status(node)["members"].get("alive", 0) == len(running) for node in running)

    def links_settled(self) -> bool:
        """Every directed link between running nodes is settled, as the first one knows it by gossip."""
        running = self.running()
        links = [link for link in self.links(running[0]) if link["settled"]]
        return len(links) >= len(running) * (len(running) - 1)

    def links(self, node: DemoNode) -> list[Document]:
        """Directed links between running nodes, as ``node`` knows them."""
        names = {each.name for each in self.running()}
        links = get_json(node.api, "/api/v1/links")["links"]
        return [link for link in links if link["source_name"] in names and link["target_name"] in names]

    def coordinator(self) -> DemoNode | None:
        """The node that all running nodes believe to coordinate, and that believes so itself."""
        found = None
        for node in self.running():
            status = self.status(node)["coordinator"]
            if not status["node_id"] or (found is not None and status["node_id"] != found):
                return None
            found = status["node_id"]
        for node in self.running():
            status = self.status(node)
            if status["node"]["node_id"] == found and status["coordinator"]["is_self"]:
                return node
        return None

    def slot(self, node: DemoNode) -> Document | None:
        """The first slot with a plan, as ``node`` knows it; the plan is in ``["plan"]``."""
        plans = get_json(node.api, "/api/v1/plans")["plans"]
        return next((plan for plan in plans if plan["plan"]), None)

    def serving(self) -> Document | None:
        """The coordinator's slot when stage 0 may be routed to."""
        node = self.coordinator()
        slot = self.slot(node) if node else None
        return slot if slot and slot["routable"] else None

    def names(self) -> dict[str, str]:
        """Node id → name over all running nodes."""
        first = self.running()[0]
        return {member["node_id"]: member["name"] for member in get_json(first.api, "/api/v1/nodes")["nodes"]}

    def _why(self) -> str:
        reasons: list[str] = []
        for node in self.running():
            with contextlib.suppress(StagemeshError):
                status = self.status(node)
                reasons += [f"{node.name}: {reason}" for reason in status["not_ready_reasons"][:1]]
        return f" ({'; '.join(reasons)})" if reasons else ""
