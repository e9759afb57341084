"""A mesh of real coordinators, agents and stage fences on virtual time, with a deliberately bad network and membership.

Ballot messages and stage frames pass through the real codecs. Membership is a small gossip model, worse than the real one on purpose: rows
with versions, liveness by age of evidence, one-way partitions that only one side notices. Every effect list can be cut
short by a crash between any two effects, with the write in progress lost or not. Checkers look after every event.
"""

import heapq
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

from coordinator.assignment.moment import ServedModelSpec
from coordinator.model.package import Layer, ModelPackage
from protocol.ids import NodeId, Slot
from tests.simulation.ballot_checkers import Checkers
from tests.simulation.ballot_frames import Paths
from tests.simulation.ballot_process import Process
from tests.simulation.ballot_world import GIB, SECOND, Disk, Variant, Weather, short_waits

__all__ = ["GIB", "SECOND", "BallotMesh", "Process", "Variant", "Weather", "short_waits"]

LONG_DELAY_US = 50_000
"""A message that is on its way for longer is counted as delayed."""


class BallotMesh:
    """Nodes, weather, one queue. ``seed`` decides everything."""

    def __init__(self, seed: int, variant: Variant | None = None, nodes: int | None = None, slots: int = 1) -> None:
        self.seed, self.variant = seed, variant or Variant()
        self.random = Random(seed)
        self.now_us = SECOND
        self.weather = Weather()
        self.checkers = Checkers(self)
        self.paths = Paths()
        self.history: list[str] = []
        self.counts: Counter[str] = Counter()
        """What went wrong, by kind, and what was decided: each counted where it takes effect."""
        self._sent: Counter[tuple[str, NodeId]] = Counter()
        self._arrived: Counter[tuple[str, NodeId]] = Counter()
        count = nodes or self.random.choice((2, 3, 3, 4, 4, 5, 6, 7, 9, 12))
        self.node_ids = tuple(NodeId(f"n{number:02d}") for number in range(count))
        self.memory = {node_id: self.random.choice((4, 6, 8, 12)) * GIB for node_id in self.node_ids}
        self.bandwidth = {node_id: self.random.randint(10, 80) * 10**9 for node_id in self.node_ids}
        self.rtt_us = self.random.choice((300, 1_500, 8_000))
        self.sizes: dict[int, int] = {}
        self.cloned: set[NodeId] = set()
        self.excluded: set[NodeId] = set()
        """Whom an operator excluded at some time."""
        self.unsettled: set[NodeId] = set()
        self.timings: dict[NodeId, int] = {}
        self.specs = tuple(self._spec(number, slots) for number in range(slots))
        self.disks = {node_id: Disk() for node_id in self.node_ids}
        self.processes: dict[NodeId, list[Process]] = {node_id: [] for node_id in self.node_ids}
        self._queue: list[tuple[int, int, Callable[[], None]]] = []
        self._order = 0
        self._loads = 0
        for node_id in self.node_ids:
            self.at(self.now_us + self.random.randrange(SECOND), lambda node_id=node_id: self.start(node_id))
        self.at(self.now_us, self._request)

    def _spec(self, number: int, slots: int) -> ServedModelSpec:
        layers = self.random.choice((8, 12, 16))
        usable = sum(self.usable_bytes(node_id) for node_id in self.node_ids)
        each = usable * self.random.choice((20, 30, 40)) // (100 * slots * layers)
        package = ModelPackage(
            f"m{number}",
            f"{number:064x}",
            tuple(Layer(each, each, 1024) for _ in range(layers)),
            each // 4,
            each // 4,
            4096,
            8192,
        )
        return ServedModelSpec(Slot(f"s{number}"), f"/models/{number}", package, priority=number)

    # -- time

    def at(self, at_us: int, action: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._queue, (max(at_us, self.now_us), self._order, action))

    def run_until(self, until_us: int) -> None:
        while self._queue and self._queue[0][0] <= until_us:
            self.now_us, _, action = heapq.heappop(self._queue)
            action()
        self.now_us = max(self.now_us, until_us)

    def run_in(self, process: Process, action: Callable[[], None]) -> None:
        """Run ``action`` in a process, after its stall if it is stalled; then check and arm its timer."""
        if process.frozen_until_us > self.now_us:
            if not process.deferred:
                self.at(process.frozen_until_us, lambda: self.thaw(process))
            process.deferred.append(action)
            return
        action()
        if process.alive:
            self.checkers.after(process)
            self.arm(process)

    def thaw(self, process: Process) -> None:
        """Everything that waited for a stalled process arrives at once."""
        if process.frozen_until_us > self.now_us:
            self.at(process.frozen_until_us, lambda: self.thaw(process))
            return
        process.wake_up()
        waiting, process.deferred = process.deferred, []
        for action in waiting:
            if process.alive:
                self.run_in(process, action)

    def arm(self, process: Process) -> None:
        due = max(process.deadline(), self.now_us)
        if process.wake_us < self.now_us or due < process.wake_us:
            process.wake_us = due

            def wake() -> None:
                if process.alive and process.wake_us == due:
                    process.wake_us = -1
                    self.run_in(process, process.timer)

            self.at(due, wake)

    # -- network

    def send(self, source: Process, peer: NodeId, payload: Any) -> None:
        weather = self.weather
        local = peer == source.node_id and source.alive
        if local:
            self.at(self.now_us, lambda: self._deliver(source, peer, payload))
            return
        if (source.node_id, peer) in weather.blocked:
            mutual = (peer, source.node_id) in weather.blocked
            self.counts["message cut both ways" if mutual else "message cut one way"] += 1
            return
        if self.chance(weather.loss_milli):
            self.counts["message lost"] += 1
            return
        copies = 2 if self.chance(weather.duplicate_milli) else 1
        self.counts["message duplicated"] += copies - 1
        link = (source.instance, peer)
        self._sent[link] += 1
        number = self._sent[link]
        for _ in range(copies):
            delay = weather.delay_us + self.random.randint(0, weather.jitter_us)
            if self.chance(weather.duplicate_milli // 4):
                delay += self.random.randrange(10 * SECOND)  # a very late one
            self.counts["message delayed"] += delay >= LONG_DELAY_US
            self.at(self.now_us + delay, lambda: self._arrive(source, peer, payload, number))

    def _arrive(self, source: Process, peer: NodeId, payload: Any, number: int) -> None:
        link = (source.instance, peer)
        self.counts["message reordered"] += number < self._arrived[link]
        self._arrived[link] = max(self._arrived[link], number)
        self._deliver(source, peer, payload)

    def _deliver(self, source: Process, peer: NodeId, payload: Any) -> None:
        """To the process that has the id; one of them when it was cloned; nobody hears while the machine sleeps."""
        local = peer == source.node_id
        targets = [process for process in self.processes[peer] if process.alive and (process is source or not local)]
        if targets:
            target = self.random.choice(targets)
            if target.asleep_since_us is None:
                self.run_in(target, lambda: target.receive(source.node_id, payload))

    def chance(self, milli: int) -> bool:
        return milli > 0 and self.random.randrange(1000) < milli

    # -- nodes

    def usable_bytes(self, node_id: NodeId) -> int:
        return self.memory[node_id] - -(-self.memory[node_id] // 10)

    def start(self, node_id: NodeId, *, clone: bool = False, exclude: tuple[NodeId, ...] = ()) -> None:
        """Unless it runs already. ``exclude``: nodes that its own configuration leaves out of plans."""
        running = [process for process in self.processes[node_id] if process.alive]
        if running and not clone:
            return
        disk = self.disks[node_id]
        if clone:
            self.cloned.add(node_id)
            copied = Disk()
            copied.term, copied.boots, copied.slots = disk.term, disk.boots - 1, dict(disk.slots)
            disk = copied
        process = Process(self, node_id, disk, copy=len(running), exclude=exclude)
        if not process.alive:
            return
        self.processes[node_id].append(process)
        self.counts["restart"] += process.boot > 1 and not clone
        self.log(f"{node_id} starts, boot {process.boot}")
        self.arm(process)

    def crash(self, process: Process) -> None:
        self.counts["crash"] += process.alive
        process.alive = False
        if process in self.processes[process.node_id]:  # else it dies while it starts
            self.processes[process.node_id].remove(process)
        self.log(f"{process.node_id} crashes")

    def live(self) -> list[Process]:
        return [process for running in self.processes.values() for process in running if process.alive]

    def next_load(self) -> int:
        self._loads += 1
        return self._loads

    def load_time_us(self) -> int:
        return self.random.randrange(self.weather.load_us // 4, self.weather.load_us + 1)

    def log(self, text: str) -> None:
        self.history.append(f"{self.now_us / SECOND:9.3f} {text}")

    def _request(self) -> None:
        for process in self.live():
            for slot, (node_id, _) in process.routes.items():
                for target in self.processes[node_id]:
                    self.run_in(target, lambda target=target, slot=slot: target.request(slot))
        self.at(self.now_us + 400_000, self._request)
