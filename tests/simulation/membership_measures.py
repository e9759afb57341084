"""What is measured of the membership core in the simulated network; small in the tests, large in the bench."""

import statistics
from dataclasses import dataclass

from pydantic import BaseModel

from protocol.codec import encode
from tests.simulation.membership_mesh import SECOND, Mesh


@dataclass(frozen=True)
class Detection:
    """Seconds from a crash to the verdict, over all survivors of all trials."""

    p50_s: float
    worst_s: float
    first_p50_s: float


def detection(nodes: int, trials: int, *, settle_s: float = 12.0, loss_milli: int = 0) -> Detection:
    """Crash one node of a settled mesh, at another phase of the probes in every trial."""
    verdicts: list[float] = []
    firsts: list[float] = []
    for trial in range(trials):
        mesh = Mesh(nodes, 1_000 * nodes + trial, codec=False)
        mesh.network.default.loss_milli = loss_milli
        mesh.start_all()
        mesh.run(settle_s + trial / trials)
        mesh.crash(nodes - 1)
        crash_us = mesh.network.now_us
        mesh.run_until(lambda mesh=mesh, crash_us=crash_us: len(mesh.deaths(crash_us)) >= nodes - 1, 60, step=0.5)
        times = sorted((change.at_us - crash_us) / SECOND for change in mesh.deaths(crash_us))
        assert len(times) == nodes - 1, f"{len(times)} of {nodes - 1} noticed"
        verdicts += times
        firsts.append(times[0])
    return Detection(statistics.median(verdicts), max(verdicts), statistics.median(firsts))


def false_deaths(nodes: int, hours: float, loss_milli: int, seed: int = 1) -> int:
    """Verdicts ``dead`` in a mesh in which nobody dies."""
    mesh = Mesh(nodes, seed, codec=False)
    mesh.network.default.loss_milli = loss_milli
    mesh.start_all()
    mesh.run(hours * 3600)
    assert mesh.agreed()
    return len(mesh.deaths())


@dataclass(frozen=True)
class Cost:
    """Per node and second in a settled, idle mesh; bytes are encoded envelopes without transport overhead."""

    datagrams: float
    datagram_bytes: float
    stream_messages: float
    stream_bytes: float


def settled_mesh(nodes: int, *, join_s: int, settle_s: int, seeds: int = 1) -> tuple[Mesh, float | None]:
    """A mesh whose nodes joined one after the other, and the seconds until all agreed after the last had started."""

    def size_of(message: BaseModel) -> int:
        return len(encode(message))

    mesh = Mesh(nodes, nodes, codec=False, seeds=seeds, size_of=size_of)
    for number in mesh.numbers:
        at_us = mesh.network.now_us + number * join_s * SECOND // nodes
        mesh.network.at(at_us, lambda number=number: mesh.start(number))
    mesh.run(join_s)
    agreed_s = mesh.run_until(mesh.agreed, 120, step=0.5)
    mesh.run(settle_s)
    return mesh, agreed_s


def cost(mesh: Mesh, seconds: int) -> Cost:
    """Traffic of the next seconds."""
    before = [(t.datagrams, t.datagram_bytes, t.stream_messages, t.stream_bytes) for t in mesh.network.traffic.values()]
    mesh.run(seconds)
    after = [(t.datagrams, t.datagram_bytes, t.stream_messages, t.stream_bytes) for t in mesh.network.traffic.values()]
    share = len(after) * seconds
    totals = [sum(new[k] - old[k] for new, old in zip(after, before, strict=True)) / share for k in range(4)]
    return Cost(*(round(total, 1) for total in totals))


def spread_s(mesh: Mesh, share_milli: int = 950, limit_s: float = 60.0) -> float | None:
    """Seconds until that share of the mesh holds a new row of one node."""
    port = mesh.ports[len(mesh.ports) // 2]
    port.publish(status="draining")
    row = port.core.own_row
    assert row is not None

    def reached() -> bool:
        holders = 1
        for other in mesh.ports.values():
            entry = other.core._ground.table.get(port.name)
            holders += entry is not None and entry.row.seq >= row.seq
        return holders * 1000 >= share_milli * len(mesh.ports)

    return mesh.run_until(reached, limit_s, step=0.1)
