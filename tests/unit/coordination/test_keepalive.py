"""A plan lives as long as its coordinator says so, whether or not anybody asks it anything."""

from collections import defaultdict

from config.settings import AssignmentSettings, ElectionSettings, PlannerSettings, ReplanSettings
from coordinator.assignment.effects import Decided, Send
from coordinator.assignment.moment import ServedModelSpec
from protocol.ballots import Keepalive
from protocol.fencing import epoch_to_wire
from protocol.ids import NodeId, Slot
from tests.simulation.ballot_mesh import GIB, BallotMesh, Variant
from tests.simulation.test_ballots_reports import model, run, slot
from tests.unit.coordination.builders import MINUTE, MODEL, SECOND, SLOT, ballot, member, serving
from tests.unit.coordination.test_orders import coordinator

B1 = ballot(1, "a")


def test_every_stage_hears_a_keepalive_every_five_seconds():
    core, now_us = coordinator(), 0
    core.serve((ServedModelSpec(SLOT, "/m", MODEL),), now_us)
    members = tuple(
        member(node, stages=(serving(B1, start, end, index, 3),))
        for index, (node, start, end) in enumerate((("a", 0, 3), ("b", 3, 6), ("c", 6, 8)))
    )
    effects = core.on_members(members, now_us)
    heard: dict[NodeId, list[int]] = defaultdict(list)
    while now_us <= MINUTE:
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.message, Keepalive):
                assert effect.message == Keepalive(ballot=epoch_to_wire(B1), slot=SLOT)
                heard[effect.peer].append(now_us)
        now_us = core.next_deadline(now_us)
        effects = core.on_timer(now_us)
    every_five_seconds = [5 * SECOND * number for number in range(13)]
    assert heard == {NodeId(node): every_five_seconds for node in "abc"}
    assert not any(isinstance(effect, Decided) for effect in effects)


class IdleMesh(BallotMesh):
    """Nobody asks it anything: no frame resets an orphan's timer."""

    def _request(self) -> None:
        pass


def idle_mesh() -> BallotMesh:
    """Two nodes of 8 GiB, a model of 12 GiB that needs both, default settings."""
    variant = Variant(
        election=ElectionSettings(),
        assignment=AssignmentSettings(),
        replan=ReplanSettings(),
        planner=PlannerSettings(context_length=4096, parallel_lanes=1, search_budget_ms=5),
    )
    made = IdleMesh(1, variant, nodes=2)
    made.memory = dict.fromkeys(made.node_ids, 8 * GIB)
    made.specs = (ServedModelSpec(Slot("s0"), "/m", model(12)),)
    return made


def test_a_mesh_that_nobody_asks_anything_for_twelve_minutes_serves_on_under_the_same_plan():
    made = idle_mesh()
    run(made, 30)
    before, begun = slot(made), len(made.history)
    assert before.routable
    assert len(before.nodes) > 1
    run(made, 12 * 60)
    after = slot(made)
    assert after.routable
    assert (after.ballot, after.nodes) == (before.ballot, before.nodes)
    assert made.checkers.completed_requests == 0, "nothing but keepalives kept it"
    assert made.history[begun:] == []
    for process in made.live():
        (fact,) = process.agent.facts(made.now_us) or (None,)
        assert process.node_id not in after.nodes or fact.state == "serving"
