"""One run: a calm mesh serves, storms break everything that can break, then a healed mesh must converge and serve again.

In a part of the scenarios everything but a clean cut heals first, and each side must come to rest by itself:
``ballot_calm``.

``python -m tests.simulation.ballot_chaos`` replays a seed or a kept scenario and prints what happened: ``ballot_replay``.

*Converged* means: one coordinator in the eyes of every node, one whole plan per model, loaded and serving by each agent's
own word whatever the coordinator's view still shows, and nothing else serving anywhere.
After healing that must be so within 30 s, in which moments do not count while the program's own back-off stands against a
node that is needed: nodes that flapped settle for 8 s × 2^flaps, nodes that failed a load are left out for a minute.
``Outcome`` tells both figures, with and without such waits.
"""

import sys
from collections import Counter
from dataclasses import dataclass

from tests.simulation.ballot_calm import Side, await_rest, two_sides
from tests.simulation.ballot_checkers import ViolationError
from tests.simulation.ballot_faults import Striker
from tests.simulation.ballot_mesh import SECOND, BallotMesh, Variant, Weather
from tests.simulation.ballot_orders import exclude
from tests.simulation.ballot_replay import command, read_command
from tests.simulation.ballot_scenario import STORMS, Scenario, make_scenario

OPENING_US = 60 * SECOND
HEAL_US = 30 * SECOND
BACK_OFF_MAX_US = 900 * SECOND
STAY_US = 6 * SECOND
SERVED_WHILE_STAYING = 10
"""Requests per model; 15 are sent."""


class SeedFailedError(AssertionError):
    """Names the seed, the violation, the last events and the command that replays it."""

    def __init__(self, scenario: Scenario, problem: str, mesh: BallotMesh, variant: Variant | None) -> None:
        recent = "\n".join(mesh.history[-60:])
        self.problem, self.replay = problem, command(scenario, variant)
        super().__init__(f"seed {scenario.seed}: {problem}\nreplay: {self.replay}\n{recent}")


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run that kept every invariant."""

    seed: int
    nodes: int
    counts: Counter[str]
    """What went wrong and what was decided, by kind."""
    history: tuple[str, ...]
    activations: int
    """Stages that confirmed."""
    requests: int
    """Completed ones, opening and end included."""
    requests_in_storms: int
    healed_us: int
    """From healing to convergence, everything counted."""
    counted_us: int
    """The same without moments in which a needed node was backing off."""
    sides_us: tuple[tuple[int, int], ...] = ()
    """For each side of a cut that stayed, how long it took to come to rest: everything, and without such moments."""


def run_seed(seed: int, variant: Variant | None = None, *, short: bool = False, storms: int = STORMS) -> Outcome:
    """Make the seed's scenario and run it. Raises ``SeedFailedError``."""
    made = variant or Variant()
    scenario = make_scenario(seed, short=short, storms=storms, clones=made.clones, full_disks=made.full_disks)
    return run_scenario(scenario, made)


def run_scenario(scenario: Scenario, variant: Variant | None = None) -> Outcome:
    """Opening, storms, healing. Raises ``SeedFailedError``."""
    mesh = scenario.mesh(variant)
    try:
        _await_opening(mesh)
        before = mesh.checkers.completed_requests
        striker = Striker(mesh, scenario.faults)
        striker.begin()
        mesh.run_until(mesh.now_us + scenario.length_us)
        in_storms = mesh.checkers.completed_requests - before
        striker.end()
        sides: tuple[Side, ...] = ()
        if scenario.standing:
            heal(mesh, but=two_sides(mesh.node_ids, scenario.standing))
            sides = await_rest(mesh)
        heal(mesh)
        healed_us, counted_us = _await_convergence(mesh, "after healing")
        _must_serve(mesh)
        # Once more after it had time to change its mind: a better plan may be worth a move.
        _await_convergence(mesh, "a second time")
    except (ViolationError, AssertionError) as error:
        raise SeedFailedError(scenario, str(error) or repr(error), mesh, variant) from error
    return Outcome(
        seed=scenario.seed,
        nodes=len(mesh.node_ids),
        counts=mesh.counts,
        history=tuple(mesh.history),
        activations=mesh.checkers.activations,
        requests=mesh.checkers.completed_requests,
        requests_in_storms=in_storms,
        healed_us=healed_us,
        counted_us=counted_us,
        sides_us=tuple((side.waited_us, side.counted_us) for side in sides),
    )


def heal(mesh: BallotMesh, but: set[tuple[str, str]] | None = None) -> None:
    """Good weather, everybody up and awake. ``but``: directed pairs that stay cut."""
    mesh.log("healed but for a cut in two" if but else "healed")
    mesh.weather = Weather(blocked=set(but or ()))
    for node_id, running in mesh.processes.items():
        if not running:
            mesh.start(node_id)
        for clone in running[1:]:
            mesh.crash(clone)
    for disk in mesh.disks.values():
        disk.full = False
    for process in mesh.live():
        process.frozen_until_us = 0
        process.doom = None
        mesh.thaw(process)
    for process in mesh.live():
        process.status = "running"
        process.agent.resume()
        # Everywhere: an order may wait on one disk that nobody else has heard of.
        process.say(*(exclude(node_id, removed=True) for node_id in sorted(mesh.excluded)))
        mesh.arm(process)


def _await_opening(mesh: BallotMesh) -> None:
    """Storms begin when every model is served: what is not there cannot break."""
    deadline_us = mesh.now_us + OPENING_US
    while mesh.checkers.converged():
        if mesh.now_us >= deadline_us:
            mesh.checkers.fail(6, f"a new mesh does not serve: {mesh.checkers.converged()}")
        mesh.run_until(mesh.now_us + SECOND // 2)
    mesh.run_until(mesh.now_us + 3 * SECOND)


def _await_convergence(mesh: BallotMesh, when: str) -> tuple[int, int]:
    """How long it took, and how much of that counts."""
    begun_us, counted_us = mesh.now_us, 0
    while missing := mesh.checkers.converged():
        if counted_us >= HEAL_US or mesh.now_us >= begun_us + BACK_OFF_MAX_US:
            mesh.checkers.fail(6, f"not converged within {HEAL_US // SECOND} s {when}: {missing}")
        counted_us += 0 if mesh.checkers.backs_off() else SECOND // 2
        mesh.run_until(mesh.now_us + SECOND // 2)
    mesh.log("converged")
    return mesh.now_us - begun_us, counted_us


def _must_serve(mesh: BallotMesh) -> None:
    before = dict(mesh.checkers.completed_by_slot)
    mesh.run_until(mesh.now_us + STAY_US)
    for spec in mesh.specs:
        served = mesh.checkers.completed_by_slot[spec.slot] - before.get(spec.slot, 0)
        if served < SERVED_WHILE_STAYING:
            mesh.checkers.fail(6, f"{spec.slot} answered only {served} requests in {STAY_US // SECOND} s after healing")


def main(words: list[str]) -> None:
    """See ``ballot_replay``."""
    asked = read_command(words)
    if asked.keep:
        print(asked.scenario.to_text(), end="")
        return
    outcome = run_scenario(asked.scenario, asked.variant)
    print("\n".join(outcome.history))
    print(f"{outcome.requests} requests, {outcome.activations} activations: all invariants hold")


if __name__ == "__main__":
    main(sys.argv[1:])
