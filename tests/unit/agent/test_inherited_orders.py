"""A rotated key takes the standing orders about its node along."""

from protocol.ids import NodeId
from protocol.orders import EXCLUDE, LOCK, PIN_COORDINATOR, PIN_STAGE0, POLICY, OperatorOrder, OrderedStage
from stage_agent.orders import Orders, in_place_of


def order(kind: str, subject: str = "", value: str = "", **fields) -> OperatorOrder:
    return OperatorOrder(kind=kind, subject=subject, value=value, author="z", **fields)


def stages(*nodes: str) -> tuple[OrderedStage, ...]:
    return tuple(OrderedStage(node_id=node, layer_start=at, layer_end=at + 1) for at, node in enumerate(nodes))


def test_pins_exclusions_and_locks_move_to_the_new_id() -> None:
    orders = Orders(NodeId("new"), lambda _: None)
    orders.say(
        [
            order(PIN_STAGE0, value="old"), order(PIN_COORDINATOR, value="other"), order(EXCLUDE, "old"),
            order(LOCK, "default", stages=stages("other", "old")), order(POLICY, "objective", '"capacity"'),
        ],
        0,
    )  # fmt: skip
    said = in_place_of(orders.known(0), {"old": "new"})
    orders.say(said, 1)
    standing = {each.key: each for each in orders.known(1) if not each.removed}
    assert standing["pin_stage0", ""].value == "new"
    assert standing["pin_coordinator", ""].value == "other"
    assert ("exclude", "new") in standing
    assert ("exclude", "old") not in standing
    assert [stage.node_id for stage in standing["lock", "default"].stages] == ["other", "new"]
    assert in_place_of(orders.known(2), {"old": "new"}) == [], "once is enough"


def test_what_was_taken_back_or_is_said_of_the_new_id_already_stays_as_it_is() -> None:
    orders = [
        order(EXCLUDE, "old"), order(EXCLUDE, "new", removed=True), order(PIN_STAGE0, value="old", removed=True),
    ]  # fmt: skip
    assert in_place_of(orders, {"old": "new"}) == [orders[0].model_copy(update={"removed": True})]
    assert in_place_of(orders, {}) == []
