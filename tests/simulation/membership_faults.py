"""One seed of the fault mix: a mesh, ninety virtual seconds of trouble, healing, and what must hold all along."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from protocol.ids import NodeId
from protocol.membership import MemberChanged
from protocol.messages import Gossip, GossipPush
from tests.simulation.membership_mesh import SECOND, MembershipPort, Mesh

TROUBLE_S = 90
HEALED_S = 30


@dataclass
class Watcher:
    """PROTOCOL invariants that concern membership, checked after every event at the node it touched."""

    mesh: Mesh
    versions: dict[int, dict[NodeId, tuple[int, int]]] = field(default_factory=dict)
    states: dict[tuple[MembershipPort, NodeId], str | None] = field(default_factory=dict)
    graves: dict[tuple[MembershipPort, NodeId], tuple[int, int]] = field(default_factory=dict)
    seen: int = 0

    def __call__(self, name: str) -> None:
        port = next((port for port in self.mesh.ports.values() if port.name == name), None)
        if port is None:
            return
        port.core.validate()
        for change in self.mesh.changes[self.seen :]:
            self._change(port, change.observer, change.change)
        self.seen = len(self.mesh.changes)
        versions = self.versions.setdefault(id(port), {})
        for node_id, state, version in port.core.standings():
            assert version >= versions.get(node_id, (0, 0)), "a row went back"
            versions[node_id] = version
            assert state == self.states[port, node_id], "a member changed without a word"

    def _change(self, port: MembershipPort, observer: NodeId, change: MemberChanged) -> None:
        assert observer == port.name
        key = (port, change.node_id)
        assert self.states.get(key) == change.old, "the story of a member has a gap"
        self.states[key] = change.new
        member = port.core.members()[change.node_id]
        version = (member.row.boot_counter, member.row.seq)
        if change.new in {"dead", "left"}:
            self.graves[key] = version
        elif change.old in {"dead", "left"}:
            assert self.mesh.ran_lately(change.node_id), "resurrected although it does not run"
            assert version > self.graves[key], "resurrected by an old row"


def faults(mesh: Mesh, random: Random) -> list[Callable[[], None]]:
    """One of each kind, aimed at random nodes."""
    network, ids = mesh.network, mesh.ids

    def crash_and_restart() -> None:
        number = random.choice(mesh.numbers)
        if number in mesh.ports:
            mesh.crash(number)
            network.at(network.now_us + random.randint(1, 30) * SECOND, lambda: restart(number))

    def restart(number: int) -> None:
        if number not in mesh.ports:
            mesh.start(number, seeds=tuple(mesh.address(other) for other in mesh.numbers))

    def cut_one_way() -> None:
        split = random.randint(1, len(ids))
        order = random.sample(ids, len(ids))
        sources, targets = order[:split], random.sample(ids, random.randint(1, len(ids)))
        network.partition(sources, targets)
        network.at(
            network.now_us + random.randint(2, 25) * SECOND, lambda: network.partition(sources, targets, blocked=False)
        )

    def split_both_ways() -> None:
        order = random.sample(ids, len(ids))
        split = random.randint(1, len(ids))
        for sources, targets in ((order[:split], order[split:]), (order[split:], order[:split])):
            network.partition(sources, targets)
        network.at(network.now_us + random.randint(5, 25) * SECOND, heal)

    def heal() -> None:
        network.partition(ids, ids, blocked=False)

    def worse_weather() -> None:
        shape = network.shape(random.choice(ids), random.choice(ids))
        shape.loss_milli = random.choice([0, 50, 200, 400])
        shape.delay_us = random.choice([100, 5_000, 80_000])
        shape.jitter_us = random.choice([0, 50_000, 300_000])
        shape.duplicate_milli = random.choice([0, 100])
        shape.datagrams_blocked = random.random() < 0.2

    def stall() -> None:
        network.stall(random.choice(ids), random.randint(5, 10) * SECOND)

    def suspend() -> None:
        network.suspend(random.choice(ids), random.randint(6, 60) * SECOND)

    def replay() -> None:
        """Somebody with a good memory tells everybody rows of a node, old and new, in its absence."""
        subject = random.choice(mesh.numbers)
        history = mesh.history[ids[subject]]
        for number, port in list(mesh.ports.items()):
            tellers = [other for other in mesh.ports if other not in {number, subject}]
            if number != subject and history and tellers:
                rows = (*tuple(random.sample(history[:-1], min(3, len(history) - 1))), history[-1])
                push = GossipPush(gossip=Gossip(rows=rows))
                teller = ids[random.choice(tellers)]
                port.carry_out(port.core.on_message(teller, push, port.now_us, lane="stream"))
                mesh.network.after_event and mesh.network.after_event(port.name)

    def crash_and_replay() -> None:
        """A node that others had not heard lately dies, and its latest row is told afterwards."""
        number = random.choice(mesh.numbers)
        if number not in mesh.ports:
            return
        network.partition([ids[number]], ids)
        network.at(network.now_us + 14 * SECOND, lambda: number in mesh.ports and mesh.crash(number))
        network.at(network.now_us + 20 * SECOND, lambda: network.partition([ids[number]], ids, blocked=False))
        for after_s in (22, 30):
            network.at(network.now_us + after_s * SECOND, replay)
        network.at(network.now_us + 40 * SECOND, lambda: restart(number))

    return [replay, crash_and_replay, crash_and_restart, cut_one_way, split_both_ways, worse_weather, stall, suspend]


def run_seed(seed: int) -> tuple[str, float]:
    """Event hash and seconds to convergence after healing. Raises ``AssertionError`` naming the seed."""
    random = Random(f"faults {seed}")
    mesh = Mesh(random.randint(2, 7), seed)
    mesh.network.default.loss_milli = random.choice([0, 10, 50])
    mesh.network.default.jitter_us = random.choice([200, 20_000])
    mesh.network.after_event = Watcher(mesh)
    mesh.start_all()
    kinds = faults(mesh, random)
    for _ in range(random.randint(4, 12)):
        at_us = mesh.network.now_us + random.randint(0, TROUBLE_S) * SECOND
        mesh.network.at(at_us, random.choice(kinds))
    mesh.run(TROUBLE_S + random.randint(0, 20))
    while any(host.suspended for host in mesh.network.hosts.values()):
        mesh.run(1)
    calm(mesh)
    seconds = mesh.run_until(mesh.converged, HEALED_S, step=0.5)
    assert seconds is not None, f"seed {seed} did not converge within {HEALED_S} s of healing"
    return mesh.network.digest, seconds


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
