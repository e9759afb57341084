"""What is measured of the membership core in the simulated network; small in the tests, large in the bench.

Up to 256 nodes every message goes through the codec, both ways. Above, messages are handed over as the frozen objects that
they are and only those of the measured seconds are encoded, for their size: a thousand nodes send two million messages
while they join. Rows are encoded, signed and verified at every size, but from 64 nodes on the same bytes are opened once
for the whole mesh and not once per node.
"""

import gc
import statistics
from dataclasses import dataclass

from pydantic import BaseModel

from protocol.codec import encode
from tests.simulation.membership_mesh import SECOND, Mesh

CODEC_UP_TO = 256
SHARED_ROWS_FROM = 64


@dataclass(frozen=True)
class Detection:
    """Seconds from a crash to the verdict, over all survivors of all trials."""

    p50_s: float
    worst_s: float
    first_p50_s: float


def crash_and_detect(mesh: Mesh, number: int) -> list[float]:
    """Crash one node of a settled mesh; seconds to the verdict of every survivor, in order."""
    survivors, seen = len(mesh.ports) - 1, len(mesh.changes)
    mesh.crash(number)
    crash_us = mesh.network.now_us

    def verdicts() -> list[float]:
        return [
            (change.at_us - crash_us) / SECOND
            for change in mesh.changes[seen:]
            if change.change.new == "dead" and change.change.node_id == mesh.ids[number]
        ]

    mesh.run_until(lambda: len(verdicts()) >= survivors, 60, step=0.5)
    times = sorted(verdicts())
    assert len(times) == survivors, f"{len(times)} of {survivors} noticed"
    return times


def summary(trials: list[list[float]]) -> Detection:
    """Over all survivors of all trials, and over the first observer of each."""
    verdicts = [seconds for times in trials for seconds in times]
    return Detection(statistics.median(verdicts), max(verdicts), statistics.median(times[0] for times in trials))


def detection(nodes: int, trials: int, *, settle_s: float = 12.0, loss_milli: int = 0) -> Detection:
    """Crash one node of a settled mesh, at another phase of the probes in every trial."""
    seen: list[list[float]] = []
    for trial in range(trials):
        mesh = Mesh(
            nodes, 1_000 * nodes + trial, codec=nodes <= 20, shared_rows=nodes > 8, seeds=min(8, -(-nodes // 8))
        )
        mesh.network.default.loss_milli = loss_milli
        mesh.start_all()
        mesh.run(settle_s + trial / trials)
        seen.append(crash_and_detect(mesh, nodes - 1))
        assert not [change for change in mesh.deaths() if change.change.node_id != mesh.ids[nodes - 1]]
    return summary(seen)


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
    """Per node and second in an idle mesh; bytes are encoded envelopes without transport overhead."""

    datagrams: float
    datagram_bytes: float
    stream_messages: float
    stream_bytes: float


def settled_mesh(nodes: int, *, join_s: int, settle_s: int, seeds: int = 1) -> tuple[Mesh, float | None]:
    """A mesh whose nodes joined one after the other, and the seconds until all agreed after the last had started."""
    mesh = Mesh(nodes, nodes, codec=nodes <= CODEC_UP_TO, shared_rows=nodes >= SHARED_ROWS_FROM, seeds=seeds)
    for number in mesh.numbers:
        at_us = mesh.network.now_us + number * join_s * SECOND // nodes
        mesh.network.at(at_us, lambda number=number: mesh.start(number))
    # A million table entries hold no cycles, and looking for them takes longer than the mesh.
    gc.disable()
    try:
        mesh.run(join_s)
        agreed_s = mesh.run_until(mesh.agreed, 300, step=0.5)
        mesh.run(settle_s)
    finally:
        gc.enable()
    return mesh, agreed_s


def cost(mesh: Mesh, seconds: int) -> Cost:
    """Traffic of the next seconds."""
    if not mesh.codec:
        mesh.network.size_of = encoded_bytes
    before = totals(mesh)
    mesh.run(seconds)
    share = len(mesh.ports) * seconds
    return Cost(*(round((new - old) / share, 1) for new, old in zip(totals(mesh), before, strict=True)))


def totals(mesh: Mesh) -> tuple[int, int, int, int]:
    """Counters of all hosts."""
    traffic = mesh.network.traffic.values()
    return (
        sum(each.datagrams for each in traffic),
        sum(each.datagram_bytes for each in traffic),
        sum(each.stream_messages for each in traffic),
        sum(each.stream_bytes for each in traffic),
    )


def encoded_bytes(message: BaseModel) -> int:
    """On the wire."""
    return len(encode(message))


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
