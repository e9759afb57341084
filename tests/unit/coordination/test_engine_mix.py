from random import Random

from config.settings import AssignmentSettings, ElectionSettings, PlannerSettings, ReplanSettings
from coordinator.coordinator import Coordinator
from coordinator.engine_mix import other_engines
from protocol.ids import Instance, NodeId
from tests.unit.coordination.builders import member

OLD, NEW = "llama.cpp aaa rpc 4.0.3", "llama.cpp bbb rpc 7.0.0"


def test_one_engine_everywhere_leaves_nobody_out() -> None:
    assert other_engines([member("a", engine=OLD), member("b", engine=OLD)]) == {}
    assert other_engines([]) == {}


def test_the_build_with_the_most_memory_stays_and_the_reason_names_both() -> None:
    left_out = other_engines(
        [member("a", gib=8, engine=OLD), member("b", gib=8, engine=OLD), member("c", gib=12, engine=NEW)]
    )
    assert left_out == {"c": f"runs {NEW}, the mesh {OLD}"}


def test_a_tie_is_broken_by_the_label_whatever_the_order() -> None:
    pair = [member("a", engine=NEW), member("b", engine=OLD)]
    assert set(other_engines(pair)) == set(other_engines(pair[::-1])) == {"a"}


def test_the_coordinator_shows_the_mix_and_plans_without_it() -> None:
    made = Coordinator(
        node_id=NodeId("a"), instance=Instance("1" * 32), last_term=0, election=ElectionSettings(settle_us=0),
        assignment=AssignmentSettings(), replan=ReplanSettings(), planner=PlannerSettings(), random=Random(1), now_us=0,
    )  # fmt: skip
    made.on_members((member("a", engine=OLD), member("b", engine=NEW, gib=4)), 1)
    assert made.snapshot(2).left_out == {"b": f"runs {NEW}, the mesh {OLD}"}
