"""A mesh of reference runtimes in one loop, joined by an in-memory link."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from config.settings import RuntimeSettings
from protocol.ballots import CacheEpoch, StageAssignment
from protocol.fencing import PlanEpoch
from protocol.ids import Instance, NodeId
from stage_agent.runtimes.budget import StartBudget
from stage_agent.runtimes.context import RuntimeContext
from stage_agent.runtimes.reference.runtime import ReferenceRuntime

if TYPE_CHECKING:
    from collections.abc import Callable

EPOCH = PlanEpoch(1, NodeId("coordinator"), Instance("ab" * 16))
LATER = PlanEpoch(2, NodeId("coordinator"), Instance("ab" * 16))


def assignments(
    ranges: list[tuple[int, int]], *, lanes: int = 2, context: int = 512, cache_epochs: list[int] | None = None
) -> list[StageAssignment]:
    """One assignment per range, nodes named n0, n1, …"""
    count = len(ranges)
    result = []
    for index, (start, end) in enumerate(ranges):
        roles = ["driver", "embedding"] if index == 0 else []
        roles += ["readout"] if index == count - 1 else []
        result.append(
            StageAssignment.model_validate(
                {
                    "slot": "default",
                    "stage_index": index,
                    "stage_count": count,
                    "node_id": f"n{index}",
                    "instance": "cd" * 16,
                    "model_digest": "0" * 64,
                    "model_source": "demo",
                    "layer_start": start,
                    "layer_end": end,
                    "roles": tuple(roles or ["intermediate"]),
                    "required_bytes": 1,
                    "parameter_bytes": 1,
                    "context_length": context,
                    "lanes": lanes,
                    "previous": f"n{index - 1}" if index else "",
                    "next": f"n{index + 1}" if index + 1 < count else "",
                    "driver": "n0",
                    "cache_epoch": CacheEpoch(value=cache_epochs[index] if cache_epochs else 0),
                    "first_request_id": 100,
                }
            )
        )
    return result


class MemoryLink:
    """Delivers every frame to the receiving runtime, through ``tamper`` when a test wants to interfere."""

    def __init__(self) -> None:
        self.runtimes: dict[str, ReferenceRuntime] = {}
        self.sent: list[tuple[str, str, bytes]] = []
        self.down: set[str] = set()
        self.tamper: Callable[[str, str, bytes], bytes | None] = lambda _source, _target, sealed: sealed

    def from_node(self, source: str) -> "_Sender":
        return _Sender(self, source)


class _Sender:
    def __init__(self, link: MemoryLink, source: str) -> None:
        self._link = link
        self._source = source

    async def send(self, peer: str, sealed: bytes) -> None:
        if peer in self._link.down:
            raise ConnectionError(peer)
        self._link.sent.append((self._source, peer, sealed))
        delivered = self._link.tamper(self._source, peer, sealed)
        await asyncio.sleep(0)
        if delivered is not None:
            self._link.runtimes[peer].on_frame(self._source, delivered)


class Chain:
    """Loaded and activated stages of one plan; ``driver`` is stage 0."""

    def __init__(self, tasks: asyncio.TaskGroup, model: Path, settings: RuntimeSettings | None = None) -> None:
        self.link = MemoryLink()
        self.reports: list[tuple[int, int]] = []
        self._tasks = tasks
        self._model = model
        self._settings = settings or RuntimeSettings(kind="reference")

    @property
    def runtimes(self) -> list[ReferenceRuntime]:
        return [self.link.runtimes[name] for name in sorted(self.link.runtimes)]

    async def start(self, plan: list[StageAssignment], epoch: PlanEpoch = EPOCH) -> "Chain":
        for assignment in plan:
            node = assignment.node_id
            context = RuntimeContext(
                tasks=self._tasks,
                node_id=node,
                epoch=epoch,
                link=self.link.from_node(node),
                model_path=lambda _: self._model,
                peer_address=lambda _: "",
                budget=StartBudget(3, 600_000_000),
            )
            runtime = ReferenceRuntime(self._settings, context)
            await runtime.load(assignment, lambda done, total: self.reports.append((done, total)))
            self.link.runtimes[node] = runtime
        await self.activate(plan, epoch)
        self.driver = self.link.runtimes["n0"]
        return self

    async def activate(self, plan: list[StageAssignment], epoch: PlanEpoch) -> None:
        for assignment in reversed(plan):
            await self.link.runtimes[assignment.node_id].activate(epoch, assignment)

    async def stop(self) -> None:
        for runtime in self.runtimes:
            await runtime.unload()
