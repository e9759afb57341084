"""One seed: a minute and a half of everything that can go wrong, then a healed mesh that must converge.

python -m tests.simulation.ballot_chaos SEED        replays a seed and prints what happened
"""

import sys

from coordinator.assignment.commands import Exclude
from tests.simulation.ballot_checkers import ViolationError
from tests.simulation.ballot_mesh import SECOND, BallotMesh, Process, Variant, Weather

CHAOS_US = 90 * SECOND
HEAL_US = 30 * SECOND
STAY_US = 4 * SECOND


class SeedFailedError(AssertionError):
    """Names the seed, the violation, the last events and the command that replays it."""

    def __init__(self, seed: int, problem: str, mesh: BallotMesh) -> None:
        recent = "\n".join(mesh.history[-60:])
        super().__init__(f"seed {seed}: {problem}\nreplay: python -m tests.simulation.ballot_chaos {seed}\n{recent}")
        self.problem = problem


def run_seed(
    seed: int, variant: Variant | None = None, *, nodes: int | None = None, chaos_us: int = CHAOS_US
) -> BallotMesh:
    """Safety phase, then heal and liveness phase. Raises ``SeedFailedError``."""
    mesh = BallotMesh(seed, variant, nodes, slots=1 if seed % 5 else 2)
    try:
        Chaos(mesh).begin(chaos_us)
        mesh.run_until(mesh.now_us + chaos_us)
        heal(mesh)
        _await_convergence(mesh)
    except (ViolationError, AssertionError) as error:
        raise SeedFailedError(seed, str(error) or repr(error), mesh) from error
    return mesh


def heal(mesh: BallotMesh) -> None:
    """Good weather, everybody up and awake."""
    mesh.log("healed")
    mesh.weather = Weather()
    for node_id, running in mesh.processes.items():
        if not running:
            mesh.start(node_id)
        for clone in running[1:]:
            mesh.crash(clone)
    for disk in mesh.disks.values():
        disk.full = False
    for process in mesh.live():
        process.frozen_until_us = 0
        mesh.thaw(process)
    for process in mesh.live():
        process.status = "running"
        process.agent.resume()
        mesh.arm(process)


def _await_convergence(mesh: BallotMesh) -> None:
    """Once after healing, and once more after it had time to change its mind (a better plan may be worth a move)."""
    for attempt in ("after healing", "a second time"):
        deadline, missing = mesh.now_us + HEAL_US, "not looked yet"
        while missing and mesh.now_us < deadline:
            mesh.run_until(mesh.now_us + SECOND // 2)
            missing = mesh.checkers.converged()
        if missing:
            mesh.checkers.fail(6, f"not converged within {HEAL_US // SECOND} s {attempt}: {missing}")
        mesh.log("converged")
        mesh.run_until(mesh.now_us + STAY_US)


class Chaos:
    """Breaks something every few seconds."""

    def __init__(self, mesh: BallotMesh) -> None:
        self.mesh = mesh
        self.until_us = 0
        self.faults = (
            self.crash,
            self.crash,
            self.change_weather,
            self.cut_one_way,
            self.cut_in_two,
            self.stall,
            self.pause_coordinator,
            self.kill_runtime,
            self.drain,
            self.mend,
        )

        if mesh.variant.full_disks:
            self.faults += (self.fill_disk, self.fill_disk)

    def begin(self, for_us: int) -> None:
        self.until_us = self.mesh.now_us + for_us
        if self.mesh.variant.clones:
            self.mesh.at(self.mesh.now_us + 12 * SECOND, self.clone)
        self.change_weather()
        self.mesh.at(self.mesh.now_us + 8 * SECOND, self.strike)

    def strike(self) -> None:
        mesh = self.mesh
        if mesh.now_us >= self.until_us:
            return
        mesh.random.choice(self.faults)()
        mesh.at(mesh.now_us + mesh.random.randrange(SECOND // 2, 7 * SECOND), self.strike)

    def victim(self) -> Process | None:
        live = self.mesh.live()
        return self.mesh.random.choice(live) if live else None

    def crash(self) -> None:
        victim, mesh = self.victim(), self.mesh
        if victim is not None:
            mesh.crash(victim)
            mesh.at(mesh.now_us + mesh.random.randrange(SECOND // 2, 20 * SECOND), lambda: mesh.start(victim.node_id))

    def change_weather(self) -> None:
        random, blocked = self.mesh.random, self.mesh.weather.blocked
        self.mesh.weather = Weather(
            loss_milli=random.choice((0, 10, 100, 300)),
            duplicate_milli=random.choice((0, 50, 200)),
            delay_us=random.choice((500, 5_000, 80_000)),
            jitter_us=random.choice((0, 5_000, 300_000)),
            crash_milli=random.choice((0, 0, 2, 10)),
            load_us=random.choice((SECOND, 4 * SECOND, 30 * SECOND)),
            load_failure_milli=random.choice((0, 0, 100, 500)),
            runtime_death_milli=random.choice((0, 0, 100)),
            blocked=blocked,
        )
        for node_id in self.mesh.node_ids:
            if not self.mesh.processes[node_id]:
                self.mesh.start(node_id)

    def cut_one_way(self) -> None:
        random, ids = self.mesh.random, self.mesh.node_ids
        for _ in range(random.randint(1, 3)):
            source, target = random.sample(ids, 2)
            self._cut({(source, target)})

    def cut_in_two(self) -> None:
        random, ids = self.mesh.random, self.mesh.node_ids
        left = {node_id for node_id in ids if random.random() < 0.5}
        self._cut({(a, b) for a in ids for b in ids if (a in left) != (b in left)})

    def _cut(self, pairs: set[tuple[str, str]]) -> None:
        mesh = self.mesh
        mesh.log(f"cut {sorted(pairs)[:4]} …")
        mesh.weather.blocked |= pairs
        mesh.at(mesh.now_us + mesh.random.randrange(2 * SECOND, 25 * SECOND), lambda: self._join(pairs))

    def _join(self, pairs: set[tuple[str, str]]) -> None:
        self.mesh.weather.blocked -= pairs

    def mend(self) -> None:
        self.mesh.weather.blocked.clear()

    def stall(self) -> None:
        self._freeze(self.victim(), self.mesh.random.randrange(SECOND, 15 * SECOND))

    def pause_coordinator(self) -> None:
        leaders = [
            item for item in self.mesh.live() if item.coordinator.snapshot(self.mesh.now_us).role == "coordinator"
        ]
        if leaders:
            self._freeze(self.mesh.random.choice(leaders), 60 * SECOND)

    def _freeze(self, process: Process | None, for_us: int) -> None:
        if process is not None:
            self.mesh.log(f"{process.node_id} freezes for {for_us / SECOND:.1f} s")
            process.frozen_until_us = max(process.frozen_until_us, self.mesh.now_us + for_us)

    def kill_runtime(self) -> None:
        victim = self.victim()
        if victim is not None and victim.loads:
            label = self.mesh.random.choice(list(victim.loads))
            self.mesh.run_in(victim, lambda: victim.die(*label))

    def drain(self) -> None:
        victim, mesh = self.victim(), self.mesh
        if victim is None:
            return
        victim.status = "draining"
        victim.agent.drain()

        def resume() -> None:
            victim.status = "running"
            victim.agent.resume()

        mesh.log(f"{victim.node_id} drains")
        mesh.at(mesh.now_us + mesh.random.randrange(3 * SECOND, 20 * SECOND), resume)

    def fill_disk(self) -> None:
        mesh = self.mesh
        node_id = mesh.random.choice(mesh.node_ids)
        disk = mesh.disks[node_id]
        disk.full = True
        mesh.log(f"the disk of {node_id} is full")

        def empty() -> None:
            disk.full = False

        mesh.at(mesh.now_us + mesh.random.randrange(SECOND, 20 * SECOND), empty)

    def clone(self) -> None:
        victim, mesh = self.victim(), self.mesh
        if victim is not None:
            mesh.log(f"{victim.node_id} is cloned")
            mesh.start(victim.node_id, clone=True)
            other = mesh.random.choice([node_id for node_id in mesh.node_ids if node_id != victim.node_id])
            clone = mesh.processes[victim.node_id][-1]
            # The two see different meshes, so they want different plans.
            mesh.run_in(clone, lambda: clone.carry(clone.coordinator.on_operator(Exclude(other), mesh.now_us)))


def main() -> None:
    mesh = run_seed(int(sys.argv[1]))
    print("\n".join(mesh.history))
    print(f"{mesh.checkers.completed_requests} requests, {mesh.checkers.activations} activations: all invariants hold")


if __name__ == "__main__":
    main()
