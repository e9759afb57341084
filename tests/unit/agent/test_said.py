"""What operators said, through a restart of the node on a real state directory."""

import pytest

from protocol.errors import StateError
from protocol.ids import NodeId
from protocol.orders import EXCLUDE, LOCK, OperatorOrder, OrderedStage
from stage_agent.clock import monotonic_us
from stage_agent.said import ORDERS_SPACE, forget_said, is_drained, keep_drained, restored_orders
from stage_agent.state.store import StateStore

LOCKED = (OrderedStage(node_id="b", layer_start=0, layer_end=3),)
ORDERS = [
    OperatorOrder(kind=EXCLUDE, subject="x", author="here"),
    OperatorOrder(kind=LOCK, subject="default", stages=LOCKED, author="here"),
]


def at(minute: int):
    return lambda: f"2030-01-01T00:{minute:02d}:00.000+00:00"


def test_orders_survive_a_restart_and_their_age_goes_on_while_the_node_is_down(tmp_path):
    with StateStore.open(tmp_path) as store:
        restored_orders(store, NodeId("a"), at(0)).say(ORDERS, monotonic_us())
    with StateStore.open(tmp_path) as store:
        back = restored_orders(store, NodeId("a"), at(30)).known(monotonic_us())
    assert [(each.kind, each.stages, each.author) for each in back] == [(EXCLUDE, (), "a"), (LOCK, LOCKED, "a")]
    assert all(1800 <= each.age_us / 1e6 < 1830 for each in back)


def test_a_wall_clock_that_ran_backwards_makes_nobody_younger_than_kept(tmp_path):
    with StateStore.open(tmp_path) as store:
        restored_orders(store, NodeId("a"), at(30)).say(ORDERS, monotonic_us())
        (first, _) = restored_orders(store, NodeId("a"), at(0)).known(monotonic_us())
    assert 0 <= first.age_us < 30_000_000


def test_a_document_that_is_no_order_is_a_clear_error(tmp_path):
    with StateStore.open(tmp_path) as store:
        store.put(ORDERS_SPACE, "all", {"orders": [{"kind": 3}]})
        with pytest.raises(StateError, match="orders"):
            restored_orders(store, NodeId("a"))


def test_a_drained_node_stays_drained_until_it_is_resumed(tmp_path):
    with StateStore.open(tmp_path) as store:
        assert not is_drained(store)
        keep_drained(store, drained=True)
    with StateStore.open(tmp_path) as store:
        assert is_drained(store)
        keep_drained(store, drained=False)
        assert not is_drained(store)


def test_what_was_said_in_a_mesh_is_forgotten_with_it(tmp_path):
    with StateStore.open(tmp_path) as store:
        restored_orders(store, NodeId("a")).say(ORDERS, monotonic_us())
        keep_drained(store, drained=True)
        store.put("served", "default", {"slot": "default"})
        forget_said(store)
        assert restored_orders(store, NodeId("a")).known(monotonic_us()) == ()
        assert not is_drained(store)
        assert store.documents("served") == {}
