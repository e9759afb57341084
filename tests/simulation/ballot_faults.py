"""Faults as data, and the one who strikes with them.

A fault says when, what, whom and for how long; whom is a number that picks among those it can hit at that moment. So a
list of faults replays on any version of the program, which a seed of the generator would not.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from tests.simulation.ballot_mesh import SECOND, BallotMesh, Process, Weather
from tests.simulation.ballot_orders import exclude

Kind = Literal[
    "crash",
    "crash while writing",
    "weather",
    "cut one way",
    "cut in two",
    "mend",
    "stall",
    "sleep",
    "pause the coordinator",
    "engine dies",
    "drain",
    "full disk",
    "clone",
    "exclude",
    "lull",
]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Fault:
    """``at_us`` after the first plan served. ``numbers``: whom, by kind; ``weather``: see ``Weather``, for that kind only."""

    at_us: int
    kind: Kind
    for_us: int = 0
    numbers: tuple[int, ...] = ()
    weather: dict[str, int] | None = None


class Striker:
    """Carries out a list of faults on a mesh."""

    def __init__(self, mesh: BallotMesh, faults: tuple[Fault, ...]) -> None:
        self.mesh = mesh
        self.faults = faults
        self.over = False
        self._by_kind: dict[Kind, Callable[[Fault], bool]] = {
            "crash": self._crash,
            "crash while writing": self._crash_while_writing,
            "weather": self._weather,
            "cut one way": self._cut_one_way,
            "cut in two": self._cut_in_two,
            "mend": self._mend,
            "stall": self._stall,
            "sleep": self._sleep,
            "pause the coordinator": self._pause_coordinator,
            "engine dies": self._kill_engine,
            "drain": self._drain,
            "full disk": self._fill_disk,
            "clone": self._clone,
            "exclude": self._exclude,
            "lull": self._lull,
        }

    def begin(self) -> None:
        """The list's zero is now."""
        for fault in self.faults:
            self.mesh.at(self.mesh.now_us + fault.at_us, lambda fault=fault: self._strike(fault))

    def end(self) -> None:
        """Cuts that would end later end no more: whoever heals the mesh says what stays cut."""
        self.over = True

    def _strike(self, fault: Fault) -> None:
        """Counted when somebody was there to be hit."""
        self.mesh.counts[f"fault: {fault.kind}"] += self._by_kind[fault.kind](fault)

    def _victim(self, fault: Fault) -> Process | None:
        live = self.mesh.live()
        return live[fault.numbers[0] % len(live)] if live else None

    def _later(self, delay_us: int, action: Callable[[], None]) -> None:
        self.mesh.at(self.mesh.now_us + delay_us, action)

    # -- processes

    def _crash(self, fault: Fault) -> bool:
        victim = self._victim(fault)
        if victim is None:
            return False
        self.mesh.crash(victim)
        self._later(fault.for_us, lambda: self.mesh.start(victim.node_id))
        return True

    def _crash_while_writing(self, fault: Fault) -> bool:
        """At its next write, whenever that is; the write reaches the disk when the second number is odd."""
        victim = self._victim(fault)
        if victim is None:
            return False
        victim.doom = (bool(fault.numbers[1] % 2), fault.for_us)
        return True

    def _stall(self, fault: Fault) -> bool:
        return self._freeze(self._victim(fault), fault.for_us)

    def _sleep(self, fault: Fault) -> bool:
        """The machine is suspended: its clock stands still and what is sent to it is lost."""
        victim = self._victim(fault)
        if victim is None or victim.frozen_until_us > self.mesh.now_us:
            return False
        victim.asleep_since_us = self.mesh.now_us
        self._freeze(victim, fault.for_us)
        self._later(fault.for_us, lambda: self.mesh.thaw(victim))
        return True

    def _pause_coordinator(self, fault: Fault) -> bool:
        """Stopped with its clock running: it comes back believing that it still coordinates."""
        leaders = [
            process
            for process in self.mesh.live()
            if process.coordinator.snapshot(process.now_us).role == "coordinator"
        ]
        if not leaders:
            return False
        leader = leaders[fault.numbers[0] % len(leaders)]

        def returns() -> None:
            self.mesh.counts["a paused coordinator came back"] += leader.alive

        self._later(fault.for_us, returns)
        return self._freeze(leader, fault.for_us)

    def _freeze(self, process: Process | None, for_us: int) -> bool:
        if process is not None:
            self.mesh.log(f"{process.node_id} freezes for {for_us / SECOND:.1f} s")
            process.frozen_until_us = max(process.frozen_until_us, self.mesh.now_us + for_us)
        return process is not None

    def _kill_engine(self, fault: Fault) -> bool:
        loaded = [process for process in self.mesh.live() if process.loads]
        if not loaded:
            return False
        victim = loaded[fault.numbers[0] % len(loaded)]
        label = sorted(victim.loads)[fault.numbers[0] % len(victim.loads)]
        self.mesh.run_in(victim, lambda: victim.die(*label))
        return True

    def _drain(self, fault: Fault) -> bool:
        victim = self._victim(fault)
        if victim is None:
            return False
        victim.status = "draining"
        victim.agent.drain()

        def resume() -> None:
            victim.status = "running"
            victim.agent.resume()

        self.mesh.log(f"{victim.node_id} drains")
        self._later(fault.for_us, resume)
        return True

    def _fill_disk(self, fault: Fault) -> bool:
        busy = [process.node_id for process in self.mesh.live() if process.loads] or self.mesh.node_ids
        node_id = busy[fault.numbers[0] % len(busy)]
        disk = self.mesh.disks[node_id]
        disk.full = True
        self.mesh.log(f"the disk of {node_id} is full")

        def empty() -> None:
            disk.full = False

        self._later(fault.for_us, empty)
        return True

    def _clone(self, fault: Fault) -> bool:
        victim, mesh = self._victim(fault), self.mesh
        if victim is None:
            return False
        mesh.log(f"{victim.node_id} is cloned")
        others = [node_id for node_id in mesh.node_ids if node_id != victim.node_id]
        # The two are configured differently, so they want different plans.
        mesh.start(victim.node_id, clone=True, exclude=(others[fault.numbers[1] % len(others)],))
        return True

    def _exclude(self, fault: Fault) -> bool:
        """The first number says where the order is given, the second who is not wanted; then the same takes it back."""
        where, mesh = self._victim(fault), self.mesh
        if where is None or mesh.disks[where.node_id].full:
            return False
        subject = mesh.node_ids[fault.numbers[1] % len(mesh.node_ids)]
        mesh.excluded.add(subject)
        mesh.log(f"{subject} is excluded at {where.node_id}")
        mesh.run_in(where, lambda: where.say(exclude(subject)))

        def include() -> None:
            if where.alive and not mesh.disks[where.node_id].full:
                mesh.run_in(where, lambda: where.say(exclude(subject, removed=True)))

        self._later(fault.for_us, include)
        return True

    # -- network

    def _weather(self, fault: Fault) -> bool:
        self.mesh.weather = Weather(**(fault.weather or {}), blocked=self.mesh.weather.blocked)
        return True

    def _lull(self, _: Fault) -> bool:
        """A good network and every machine that is down comes up: the mesh may serve again. Loads stay as slow."""
        before = self.mesh.weather
        self.mesh.weather = Weather(load_us=before.load_us, load_failure_milli=before.load_failure_milli // 2)
        for node_id in self.mesh.node_ids:
            if not self.mesh.processes[node_id]:
                self.mesh.start(node_id)
        return True

    def _cut_one_way(self, fault: Fault) -> bool:
        """Two numbers a pair: who is not heard by whom."""
        ids = self.mesh.node_ids
        numbers = iter(fault.numbers)
        pairs = {(ids[a % len(ids)], ids[b % len(ids)]) for a, b in zip(numbers, numbers, strict=True)}
        return self._cut({(a, b) for a, b in pairs if a != b}, fault.for_us)

    def _cut_in_two(self, fault: Fault) -> bool:
        """A node whose number is odd is on the left."""
        ids = self.mesh.node_ids
        left = {node_id for node_id, number in zip(ids, fault.numbers, strict=False) if number % 2}
        return self._cut({(a, b) for a in ids for b in ids if (a in left) != (b in left)}, fault.for_us)

    def _cut(self, pairs: set[tuple[str, str]], for_us: int) -> bool:
        mesh = self.mesh
        mesh.log(f"cut {sorted(pairs)[:4]} …")
        mesh.weather.blocked |= pairs

        def join() -> None:
            if not self.over:
                mesh.weather.blocked -= pairs

        self._later(for_us, join)
        return bool(pairs)

    def _mend(self, _: Fault) -> bool:
        self.mesh.weather.blocked.clear()
        return True
