"""The register of operators' orders: who wins, what is kept, how old it is, and where it ends."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import StateError
from protocol.ids import NodeId
from protocol.orders import EXCLUDE, LOCK, MAX_LOCKS, MAX_ORDERS, PIN_STAGE0, OperatorOrder, OrderedStage
from protocol.rows import NodeRow
from protocol.wire import MAX_INTEGER
from stage_agent.orders import OrderRefusedError, Orders

SECOND = 1_000_000


def order(kind: str = EXCLUDE, subject: str = "x", **fields) -> OperatorOrder:
    return OperatorOrder(**{"kind": kind, "subject": subject, "author": "here", **fields})


def register(name: str = "a", kept: list | None = None) -> Orders:
    return Orders(NodeId(name), (kept if kept is not None else []).append)


ROWS = itertools.count(1)


def row(*orders: OperatorOrder, name: str = "z") -> NodeRow:
    """Each one newer than those before."""
    return NodeRow(
        node_id=name, public_key=b"k" * 32, boot_counter=1, seq=next(ROWS), instance="1" * 32, name=name, version="1",
        orders=orders,
    )  # fmt: skip


def told(source: Orders, target: Orders, now_us: int) -> bool:
    return target.adopt([row(*source.known(now_us))], now_us)


def words(orders: Orders) -> list[tuple]:
    return [(each.kind, each.subject, each.value, each.removed, each.version, each.author) for each in orders.known(0)]


def test_an_order_says_who_said_it_and_how_long_ago():
    one = register()
    one.say([order(PIN_STAGE0, "", value="b")], 5 * SECOND)
    (said,) = one.known(65 * SECOND)
    assert (said.author, said.age_us, said.version, said.value) == ("a", 60 * SECOND, 1, "b")


def test_the_newer_order_wins_wherever_it_was_said():
    one, other = register("a"), register("b")
    one.say([order()], 0)
    assert told(one, other, 0)
    other.say([order(removed=True)], 0)
    assert told(other, one, 0)
    assert words(one) == words(other) == [(EXCLUDE, "x", "", True, 2, "b")]


def test_an_order_that_was_taken_back_does_not_come_back_from_a_node_that_missed_it():
    one, late = register("a"), register("b")
    one.say([order()], 0)
    told(one, late, 0)
    one.say([order(removed=True)], 0)
    assert not told(late, one, 0)
    assert one.known(0)[0].removed


def test_of_two_orders_said_at_once_every_node_takes_the_same():
    one, other = register("a"), register("b")
    one.say([order(PIN_STAGE0, "", value="n1")], 0)
    other.say([order(PIN_STAGE0, "", value="n2")], 0)
    third = register("c")
    told(one, third, 0), told(other, third, 0), told(other, one, 0), told(one, other, 0)
    assert words(one) == words(other) == words(third) == [(PIN_STAGE0, "", "n2", False, 1, "b")]


@given(st.permutations(range(6)), st.lists(st.integers(0, 2), min_size=6, max_size=6))
def test_every_way_of_telling_ends_in_the_same_orders(sequence, versions):
    """A merge must not depend on order, grouping or repetition."""
    orders = [order(value=str(index), version=versions[index], author=f"n{index % 3}") for index in range(6)]
    together, piecewise = register(), register()
    together.adopt([row(each, name=f"z{index}") for index, each in enumerate(orders)], 0)
    for index in [*sequence, *sequence]:
        piecewise.adopt([row(orders[index])], 0)
    assert words(together) == words(piecewise)


def test_of_several_tellings_the_oldest_counts():
    one, other = register("a"), register("b")
    one.say([order()], 0)
    other.adopt([row(*one.known(10 * SECOND))], 70 * SECOND)  # the row was a minute old
    assert other.known(70 * SECOND)[0].age_us == 10 * SECOND
    assert not told(one, other, 80 * SECOND)
    assert other.known(80 * SECOND)[0].age_us == 80 * SECOND


def test_several_orders_are_kept_together_or_not_at_all():
    kept: list = []
    one = register("a", kept)
    one.say([order(subject="x"), order(subject="y")], 0)
    assert [[each.subject for each in orders] for orders in kept] == [["x", "y"]]

    def full(_orders) -> None:
        raise StateError("full")

    broken = Orders(NodeId("a"), full)
    with pytest.raises(StateError):
        broken.say([order()], 0)
    with pytest.raises(StateError):
        broken.adopt([row(order(version=1, author="b"))], 0)
    assert broken.known(0) == ()


def test_what_was_kept_comes_back_with_its_age_and_is_outbid_by_the_next():
    one = register()
    one.restore([order(version=7, author="b", age_us=90 * SECOND)], 10 * SECOND)
    assert one.known(20 * SECOND)[0].age_us == 100 * SECOND
    one.say([order(removed=True)], 20 * SECOND)
    assert one.known(20 * SECOND)[0].version == 8


def test_a_row_is_read_once_and_again_when_it_could_not_be_kept():
    full = [True]

    def keep(_orders) -> None:
        if full[0]:
            raise StateError("full")

    one, told_once = Orders(NodeId("a"), keep), row(order(version=1, author="b"))
    with pytest.raises(StateError):
        one.adopt([told_once], 0)
    full[0] = False
    assert one.adopt([told_once], 0)
    assert not one.adopt([told_once], 0)
    assert one.adopt(
        [told_once.model_copy(update={"seq": told_once.seq + 1, "orders": (order(version=2, author="b"),)})], 0
    )


def test_at_the_limit_new_subjects_are_refused_and_known_ones_can_be_changed():
    one = register()
    one.say([order(subject=f"n{number}") for number in range(MAX_ORDERS)], 0)
    with pytest.raises(OrderRefusedError, match=str(MAX_ORDERS)):
        one.say([order(subject="more")], 0)
    assert not one.adopt([row(order(subject="more", version=9, author="b"))], 0)
    one.say([order(subject="n0", removed=True)], 0)
    assert len(one.known(0)) == MAX_ORDERS


def test_no_more_slots_are_locked_than_there_are():
    one = register()
    stage = OrderedStage(node_id="a", layer_start=0, layer_end=1)
    one.say([order(LOCK, f"s{number}", stages=(stage,)) for number in range(MAX_LOCKS)], 0)
    with pytest.raises(OrderRefusedError, match="release"):
        one.say([order(LOCK, "more", stages=(stage,))], 0)
    one.say([order(LOCK, "s0", removed=True), order(LOCK, "more", stages=(stage,))], 0)


def test_a_version_at_the_end_of_the_numbers_is_a_refusal_not_a_crash():
    one = register()
    one.adopt([row(order(version=MAX_INTEGER, author="b"))], 0)
    with pytest.raises(OrderRefusedError, match="newer version"):
        one.say([order(removed=True)], 0)


def test_a_kind_that_only_newer_versions_know_is_repeated_as_it_is():
    one = register()
    one.adopt([row(order("quota", "n1", value="3", version=2, author="b"))], 0)
    assert words(one) == [("quota", "n1", "3", False, 2, "b")]


def test_a_full_row_of_orders_and_locks_fits_a_signed_row():
    from protocol.codec import encode_row

    stages = tuple(OrderedStage(node_id="n" * 32, layer_start=k, layer_end=k + 1) for k in range(64))
    locks = [order(LOCK, f"s{number}", stages=stages, author="a" * 32) for number in range(MAX_LOCKS)]
    others = [order(EXCLUDE, f"n{number:031d}", author="a" * 32) for number in range(MAX_ORDERS - MAX_LOCKS)]
    for each in itertools.chain(locks, others):
        assert each.version == 0
    size = len(encode_row(row(*locks, *others)))
    assert size < 131_072, size
