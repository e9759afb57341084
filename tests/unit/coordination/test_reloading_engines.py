"""Engines that cannot go on with what they have loaded: the coordinator knows it and plans the memory of a move by it."""

import pytest

from config.settings import AssignmentSettings, ElectionSettings, ReplanSettings
from coordinator.assignment.attempt import Attempt
from coordinator.assignment.effects import Route, Send
from coordinator.assignment.rounds import Judgement
from coordinator.assignment.running import RunningPlan, RunningStage
from coordinator.replan import kept_stages, migration_cost_us
from protocol.ids import Instance, NodeId
from stage_agent.stage.agent import StageAgent
from stage_agent.stage.effects import ActivateRuntime, Load, Loaded, Reply, Unload, Unloaded
from tests.unit.coordination.builders import DIGEST, MINUTE, SECOND, SLOT, ballot, plan

CHIEF = NodeId("chief")
BEFORE = plan(("a", 0, 4), ("b", 4, 8))
AFTER = plan(("a", 0, 4), ("c", 4, 8))
"""Node ``a`` holds the same layers in both: 40 bytes."""


class Engines:
    """Two agents and their engines: every load takes a while, and its memory is really there until it is unloaded."""

    def __init__(self, memory: int, *, keeps: bool, told: bool | None = None) -> None:
        self.keeps = keeps
        self.agents = {
            NodeId(name): StageAgent(
                node_id=NodeId(name),
                instance=Instance(name * 32),
                restored={},
                usable_memory_bytes=memory,
                now_us=0,
                settings=ElectionSettings(),
                keeps_loads=keeps if told is None else told,
            )
            for name in "abc"
        }
        self.memory: dict[tuple, int] = {}
        self.peak = 0
        self.routed: list[NodeId | None] = []
        self.cache_epochs: dict[NodeId, list[int]] = {node_id: [] for node_id in self.agents}

    def drive(self, attempt: Attempt) -> RunningPlan:
        """Deliver everything until nothing is left, and look again each second until there is an outcome."""
        waiting = [(CHIEF, effect) for effect in attempt.start(0)]
        for now_us in range(0, 60 * SECOND, SECOND):
            for _ in range(10_000):
                if not waiting:
                    break
                node_id, effect = waiting.pop(0)
                waiting += self._carry(attempt, node_id, effect, now_us)
            assert not waiting
            if attempt.outcome is not None:
                break
            waiting = [(CHIEF, effect) for effect in attempt.on_timer(now_us + SECOND)]
        assert isinstance(attempt.outcome, RunningPlan), attempt.outcome
        return attempt.outcome

    def _carry(self, attempt, node_id, effect, now_us):
        agent = self.agents.get(node_id)
        match effect:
            case Send(peer, message):
                return [(peer, each) for each in self.agents[peer].on_message(CHIEF, message, now_us)]
            case Reply(_, message):
                return [(CHIEF, each) for each in attempt.on_reply(node_id, message, now_us)]
            case Route(_, to, _):
                self.routed.append(to)
            case Load(slot, at, assignment, reuse):
                shared = reuse is not None and self.keeps
                self.memory[node_id, at] = 0 if shared else assignment.required_bytes
                self.peak = max(self.peak, sum(size for (name, _), size in self.memory.items() if name == "a"))
                return [(node_id, each) for each in agent.on_runtime(Loaded(slot, at), now_us)]
            case Unload(slot, at):
                self.memory.pop((node_id, at), None)
                return [(node_id, each) for each in agent.on_runtime(Unloaded(slot, at), now_us)]
            case ActivateRuntime(_, _, _, cache_epoch, _):
                self.cache_epochs[node_id].append(cache_epoch)
        return []


def placed(engines: Engines, wanted, running=None, term=1) -> RunningPlan:
    attempt = Attempt(
        slot=SLOT, source="/m", ballot=ballot(term, CHIEF), plan=wanted, running=running, settings=AssignmentSettings()
    )
    return engines.drive(attempt)


@pytest.mark.parametrize(
    ("keeps", "memory", "stops", "peak"),
    [
        (True, 60, False, 40),  # what is loaded goes on
        (False, 100, False, 80),  # loaded a second time, beside the first
        (False, 60, True, 40),  # no room for both: the old plan is stopped first
    ],
)
def test_a_move_never_needs_more_memory_than_the_node_has(keeps, memory, stops, peak):
    engines = Engines(memory, keeps=keeps)
    running = placed(engines, BEFORE)
    moved = placed(engines, AFTER, running, term=2)
    assert moved.nodes == ("a", "c")
    assert (engines.routed == [None], engines.peak) == (stops, peak)
    first, second = engines.cache_epochs[NodeId("a")]
    assert (second == first) == keeps, "caches of an engine that was started anew are gone"


def test_an_engine_that_hides_that_it_reloads_would_need_the_memory_twice():
    """Why the agent has to say it: the same move, told wrongly, goes over the node's memory."""
    engines = Engines(60, keeps=False, told=True)
    running = placed(engines, BEFORE)
    placed(engines, AFTER, running, term=2)
    assert engines.peak == 80


def test_what_an_engine_reloads_is_part_of_the_price():
    slow = AssignmentSettings(load_bytes_per_s_floor=1)
    assert kept_stages(BEFORE, AFTER, frozenset()) == {"a"}
    assert kept_stages(BEFORE, AFTER, frozenset({NodeId("a")})) == frozenset()
    wider = plan(("a", 0, 6), ("b", 6, 8))
    here, there = plan(("a", 0, 6), ("c", 6, 8)), wider
    price = {"current": here, "candidate": there, "missing_bytes": {}, "break_first": False}
    kept = migration_cost_us(slow, **price)
    reloaded = migration_cost_us(slow, reloads=frozenset({NodeId("a")}), **price)
    assert (kept, reloaded) == (23 * SECOND, 63 * SECOND)


def test_a_stage_that_is_kept_does_not_make_a_move_break_first():
    def cost(reloads: frozenset[NodeId]) -> int:
        here = plan(("a", 0, 4), ("b", 4, 8), tpot_us=2000, usable=60)
        there = plan(("a", 0, 4), ("c", 4, 8), tpot_us=1000, usable=60)
        settings = AssignmentSettings(load_bytes_per_s_floor=1)
        judged = Judgement(ReplanSettings(), settings, 10 * MINUTE, None, {}, frozenset(), reloads)
        return judged.compare(here, there).cost_us

    assert cost(frozenset()) == 43 * SECOND
    assert cost(frozenset({NodeId("a")})) == 80 * SECOND, "40 bytes twice do not fit 60: nothing serves meanwhile"


def test_running_stages_are_what_the_agents_confirmed():
    engines = Engines(100, keeps=True)
    running = placed(engines, BEFORE)
    assert running.stages == (
        RunningStage(NodeId("a"), Instance("a" * 32), 0, 4, 40),
        RunningStage(NodeId("b"), Instance("b" * 32), 4, 8, 40),
    )
    assert running.model_digest == DIGEST
