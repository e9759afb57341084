from protocol.fencing import PlanEpoch, epoch_to_wire
from protocol.ids import Instance, NodeId
from protocol.rows import StageFact
from stage_agent.api.snapshot import MemberView, NodeSnapshot, SlotView, StageView
from stage_agent.router.heads import choose_slot, find_head


def stage(node: str, term: int, *, index: int = 0, state: str = "serving", slot: str = "default") -> StageView:
    epoch = PlanEpoch(term, NodeId("c"), Instance("0" * 32))
    return StageView(node, node, StageFact(slot=slot, state=state, stage_index=index, active=epoch_to_wire(epoch)))


def snapshot(*stages: StageView, dead: tuple[str, ...] = (), slots: tuple[str, ...] = ("default",)) -> NodeSnapshot:
    members = tuple(MemberView(each.node_id, each.name, "dead" if each.node_id in dead else "alive") for each in stages)
    return NodeSnapshot(
        0, "me", "me", "1", members=members, stages=stages, slots=tuple(SlotView(s, "active") for s in slots)
    )


def test_the_head_is_the_living_node_that_serves_stage_0_of_the_newest_plan() -> None:
    old, new, other = stage("a", 3), stage("b", 4), stage("c", 5, index=1)
    assert find_head(snapshot(old, new, other), "default").node_id == "b"
    assert find_head(snapshot(old, new, other, dead=("b",)), "default").node_id == "a"


def test_there_is_no_head_while_stage_0_loads_or_for_another_slot() -> None:
    assert find_head(snapshot(stage("a", 3, state="loading")), "default") is None
    assert find_head(snapshot(stage("a", 3)), "other") is None


def test_a_request_s_model_chooses_the_slot_and_any_other_name_means_the_default() -> None:
    several = snapshot(slots=("default", "small"))
    assert choose_slot(several, "small") == "small"
    assert choose_slot(several, "gpt-4o") == "default"
    assert choose_slot(several, None) == "default"
    assert choose_slot(snapshot(slots=("only",)), "x") == "only"
    assert choose_slot(snapshot(slots=("a", "b")), "x") is None
    assert choose_slot(snapshot(slots=()), None) is None
