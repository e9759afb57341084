"""One seed of the fault mix: a mesh, ninety virtual seconds of trouble, healing, and what must hold all along.

The mix holds the nine faults of ``NINE`` and a few beside them (a cut both ways, blocked datagrams, a goodbye, replayed
rows). What a seed really contained is counted where it happened, in the network, and told in its ``Story``.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random

from protocol.messages import Gossip, GossipPush
from tests.simulation.membership_mesh import SECOND, Mesh
from tests.simulation.membership_watcher import Watcher
from tests.simulation.network_parts import Shape

TROUBLE_S = 90
HEALED_S = 30
NINE = (
    "loss",
    "delay",
    "duplication",
    "reordering",
    "asymmetric partition",
    "crash",
    "suspend",
    "clock jump",
    "stall",
)
"""Names under which the network counts them; a restart follows every crash at the latest when all is healed."""


@dataclass(frozen=True)
class Story:
    """What one seed was: two runs of it must be equal."""

    digest: str
    converged_s: float
    happened: tuple[tuple[str, int], ...]

    @property
    def kinds(self) -> frozenset[str]:
        """Faults that were effective at least once."""
        return frozenset(kind for kind, times in self.happened if times)


class Faults:
    """One method per fault, aimed at random nodes."""

    def __init__(self, mesh: Mesh, random: Random) -> None:
        self._mesh, self._network, self._random, self._ids = mesh, mesh.network, random, mesh.ids
        self.kinds: tuple[Callable[[], None], ...] = (
            *(partial(self._weather, change) for change in (_loss, _delay, _duplication, _reordering, _blocked)),
            self._cut_one_way,
            self._crash_and_restart,
            self._suspend,
            self._clock_jump,
            self._stall,
            self._split_both_ways,
            self._goodbye,
            self._replay,
            self._crash_and_replay,
        )

    def _later(self, at_least_s: int, at_most_s: int, action: Callable[[], None]) -> None:
        self._network.at(self._network.now_us + self._random.randint(at_least_s, at_most_s) * SECOND, action)

    def _weather(self, change: Callable[[Shape, Random], None]) -> None:
        """One way between two nodes, or every way into or out of one, becomes worse and stays so."""
        one, *others = self._random.sample(self._ids, len(self._ids))
        into = self._random.random() < 0.5
        for other in others[: self._random.choice([1, len(others)])]:
            change(self._network.shape(other, one) if into else self._network.shape(one, other), self._random)

    def _cut_one_way(self) -> None:
        sources = self._random.sample(self._ids, self._random.randint(1, len(self._ids)))
        targets = self._random.sample(self._ids, self._random.randint(1, len(self._ids)))
        self._network.partition(sources, targets)
        self._later(2, 25, lambda: self._network.partition(sources, targets, blocked=False))

    def _split_both_ways(self) -> None:
        order = self._random.sample(self._ids, len(self._ids))
        split = self._random.randint(1, len(self._ids))
        for sources, targets in ((order[:split], order[split:]), (order[split:], order[:split])):
            self._network.partition(sources, targets)
        self._later(5, 25, lambda: self._network.partition(self._ids, self._ids, blocked=False))

    def _crash_and_restart(self) -> None:
        number = self._random.choice(self._mesh.numbers)
        if number in self._mesh.ports:
            self._mesh.crash(number)
            self._later(1, 30, partial(self._restart, number))

    def _goodbye(self) -> None:
        """A node leaves properly and is started again."""
        number = self._random.choice(self._mesh.numbers)
        port = self._mesh.ports.get(number)
        if port is not None and not self._network.is_away(port.name):
            port.carry_out(port.core.leave(port.now_us))
            self._mesh.exit(number)
            self._later(1, 30, partial(self._restart, number))

    def _restart(self, number: int) -> None:
        if number not in self._mesh.ports:
            self._mesh.start(number, seeds=tuple(self._mesh.address(other) for other in self._mesh.numbers))

    def _suspend(self) -> None:
        self._network.suspend(self._random.choice(self._ids), self._random.randint(6, 60) * SECOND)

    def _stall(self) -> None:
        self._network.stall(self._random.choice(self._ids), self._random.randint(5, 10) * SECOND)

    def _clock_jump(self) -> None:
        """The clock leaps, or the two clocks whose difference tells of sleep drift apart without any."""
        number, by_us = self._random.choice(self._mesh.numbers), self._random.choice([1, 7, 60, 3_600]) * SECOND
        port = self._mesh.ports.get(number)
        if self._random.random() < 0.7:
            self._network.jump(self._ids[number], by_us)
        elif port is not None and not self._network.is_away(port.name):
            self._network.happened["clock jump"] += 1
            port.on_clock_gap(by_us, port.now_us)

    def _replay(self, subject: int | None = None) -> None:
        """Somebody with a good memory tells everybody rows of a node, old and new, perhaps in its absence."""
        subject = self._random.choice(self._mesh.numbers) if subject is None else subject
        history = self._mesh.history[self._ids[subject]]
        for number, port in list(self._mesh.ports.items()):
            if self._network.is_away(port.name):
                continue
            tellers = [other for other in self._mesh.ports if other not in {number, subject}]
            if number != subject and history and tellers:
                rows = (*tuple(self._random.sample(history[:-1], min(3, len(history) - 1))), history[-1])
                push = GossipPush(gossip=Gossip(rows=rows))
                teller = self._ids[self._random.choice(tellers)]
                port.carry_out(port.core.on_message(teller, push, port.now_us, lane="stream"))
                self._network.happened["replay"] += 1
                if self._network.after_event is not None:
                    self._network.after_event(port.name)

    def _crash_and_replay(self) -> None:
        """A node that others had not heard lately dies, and its latest row is told afterwards."""
        number, network = self._random.choice(self._mesh.numbers), self._network
        if number not in self._mesh.ports:
            return
        network.partition([self._ids[number]], self._ids)
        self._later(14, 14, lambda: self._mesh.crash(number) if number in self._mesh.ports else None)
        self._later(20, 20, lambda: network.partition([self._ids[number]], self._ids, blocked=False))
        for after_s in (22, 30):
            self._later(after_s, after_s, partial(self._replay, number))
        self._later(40, 40, partial(self._restart, number))


def _loss(shape: Shape, random: Random) -> None:
    shape.loss_milli = random.choice([50, 200, 400])


def _delay(shape: Shape, random: Random) -> None:
    shape.delay_us = random.choice([20_000, 80_000, 250_000])


def _duplication(shape: Shape, random: Random) -> None:
    shape.duplicate_milli = random.choice([100, 500])


def _reordering(shape: Shape, random: Random) -> None:
    shape.jitter_us = random.choice([50_000, 300_000, 1_500_000])


def _blocked(shape: Shape, random: Random) -> None:
    shape.datagrams_blocked = random.random() < 0.7


def run_seed(seed: int) -> Story:
    """Raises ``AssertionError`` when an invariant breaks or the mesh does not converge after healing."""
    random = Random(f"faults {seed}")
    mesh = Mesh(random.randint(2, 7), seed)
    mesh.network.default.loss_milli = random.choice([0, 10, 50])
    mesh.network.default.jitter_us = random.choice([200, 20_000])
    mesh.network.after_event = Watcher(mesh)
    mesh.start_all()
    faults = Faults(mesh, random)
    for _ in range(random.randint(4, 14)):
        mesh.network.at(mesh.network.now_us + random.randint(0, TROUBLE_S) * SECOND, random.choice(faults.kinds))
    mesh.run(TROUBLE_S + random.randint(0, 20))
    while any(host.suspended for host in mesh.network.hosts.values()):
        mesh.run(1)
    calm(mesh)
    seconds = mesh.run_until(mesh.converged, HEALED_S, step=0.5)
    assert seconds is not None, f"seed {seed} did not converge within {HEALED_S} s of healing"
    return Story(mesh.network.digest, seconds, tuple(sorted(mesh.network.happened.items())))


def seeds_by_kind(stories: list[Story]) -> Counter[str]:
    """In how many seeds each fault was effective."""
    return Counter(kind for story in stories for kind in story.kinds)


def calm(mesh: Mesh) -> None:
    """Heal everything: full connectivity, no loss, everybody up."""
    network = mesh.network
    for source in mesh.ids:
        for target in mesh.ids:
            shape = network.shape(source, target)
            shape.blocked = shape.datagrams_blocked = False
            shape.loss_milli = shape.duplicate_milli = 0
            shape.delay_us, shape.jitter_us = 500, 200
    for number in mesh.numbers:
        if number not in mesh.ports:
            mesh.start(number, seeds=tuple(mesh.address(other) for other in mesh.numbers))
