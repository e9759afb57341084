"""What standing orders amount to for a coordinator, above the configuration of its own node."""

from random import Random

import pytest

from config.settings import AssignmentSettings, ElectionSettings, PlannerSettings, ReplanSettings
from coordinator.assignment.effects import Decided
from coordinator.assignment.moment import ServedModelSpec
from coordinator.calibrated import HopCosts, costs_text, profile_name
from coordinator.coordinator import Coordinator
from coordinator.orders import spoken, standing, with_setting
from coordinator.planner.problem import Calibration, LockedStage
from protocol.ids import Instance, NodeId, Slot, Term
from protocol.orders import (
    EXCLUDE,
    HOP_COSTS,
    LOCK,
    NODE_SPEED,
    PIN_COORDINATOR,
    PIN_STAGE0,
    POLICY,
    OperatorOrder,
    OrderedStage,
)
from tests.unit.coordination.builders import MODEL, SLOT, member


def order(kind: str, subject: str = "", value: str = "", **fields) -> OperatorOrder:
    return OperatorOrder(kind=kind, subject=subject, value=value, version=1, author="z", **fields)


def lock(*spans: tuple[str, int, int], slot: str = SLOT) -> OperatorOrder:
    stages = tuple(OrderedStage(node_id=node, layer_start=start, layer_end=end) for node, start, end in spans)
    return order(LOCK, slot, stages=stages, removed=not stages)


def coordinator(**planner) -> Coordinator:
    return Coordinator(
        node_id=NodeId("a"), instance=Instance("1" * 32), last_term=Term(0), election=ElectionSettings(settle_us=0),
        assignment=AssignmentSettings(), replan=ReplanSettings(), planner=PlannerSettings(**planner),
        random=Random(1), now_us=0,
    )  # fmt: skip


def asked(core: Coordinator, now_us: int = 1):
    """The problem of the round that the core wants now."""
    effects = core.on_members((member("a"), member("b"), member("c")), now_us)
    return next(effect.problem for effect in effects if hasattr(effect, "problem"))


def test_a_follower_knows_the_orders_before_it_is_elected():
    core = coordinator()
    core.serve((ServedModelSpec(SLOT, "/m", MODEL),), 0)
    core.on_orders((order(EXCLUDE, "b"), order(PIN_STAGE0, value="c"), order(POLICY, "concurrency", "7")), 0)
    request = (problem := asked(core)).request
    assert [node.node_id for node in problem.participants] == ["a", "c"]
    assert (request.pin_stage0, request.concurrency) == ("c", 7)


def test_a_lock_said_before_the_model_holds_when_the_model_comes():
    core = coordinator()
    core.on_orders((lock(("c", 0, 4), ("b", 4, 8)),), 0)
    core.serve((ServedModelSpec(SLOT, "/m", MODEL),), 0)
    assert asked(core).request.locked.stages == (LockedStage("c", 0, 4), LockedStage("b", 4, 8))


def test_a_lock_that_is_taken_back_frees_the_planner():
    core = coordinator()
    core.serve((ServedModelSpec(SLOT, "/m", MODEL),), 0)
    core.on_orders((lock(("c", 0, 4), ("b", 4, 8)),), 0)
    core.on_orders((lock().model_copy(update={"version": 2}),), 0)
    assert asked(core).request.locked is None


def test_orders_stand_above_the_configuration_in_both_directions():
    read = standing([order(EXCLUDE, "x"), order(EXCLUDE, "y", removed=True), order(PIN_COORDINATOR, removed=True)])
    assert read.left_out(("y", "z")) == {"x", "z"}
    assert read.coordinator("configured") == ""
    assert standing([]).coordinator("configured") == "configured"
    settings = PlannerSettings(pin_stage0="configured", concurrency=3)
    assert standing([order(PIN_STAGE0, removed=True)]).planner(settings).pin_stage0 == ""
    assert standing([order(POLICY, "concurrency", removed=True)]).planner(settings).concurrency == 3


def test_a_configuration_read_again_does_not_undo_an_order():
    core = coordinator(concurrency=2)
    core.on_orders((order(POLICY, "concurrency", "9"),), 0)
    core.on_settings(PlannerSettings(concurrency=3, search_budget_ms=99), None, 0)
    assert (core.planner.concurrency, core.planner.search_budget_ms) == (9, 99)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("concurrency", "0"),
        ("concurrency", "1e9"),
        ("concurrency", "true"),
        ("objective", '"fun"'),
        ("target_decode_tpot_ms", "NaN"),
        ("target_decode_tpot_ms", "-1"),
        ("performance_aware", "1"),
        ("objective", "{"),
        ("objective", "[" * 200),
        ("search_budget_ms", "600000"),
        ("nonsense", "1"),
    ],
)
def test_a_policy_that_cannot_be_obeyed_changes_nothing(name, text):
    settings = PlannerSettings()
    assert standing([order(POLICY, name, text)]).planner(settings) == settings


def test_every_policy_can_be_ordered():
    settings = PlannerSettings()
    for name, text in {
        "objective": '"throughput"',
        "policy": '"must_meet_target"',
        "target_decode_tpot_ms": "20.5",
        "concurrency": "4",
        "performance_aware": "false",
    }.items():
        changed = with_setting(settings, name, text)
        assert changed is not None
        assert getattr(changed, name) != getattr(settings, name)
        assert standing([order(POLICY, name, text)]).planner(settings) == changed


def test_each_order_is_recorded_once_with_what_and_who():
    core = coordinator()
    orders = (order(EXCLUDE, "b"), lock(("c", 0, 8)), order("quota", "b"))
    said = [each.decision for each in core.on_orders(orders, 5) if isinstance(each, Decided)]
    assert [(each.kind, each.slot, each.reason) for each in said] == [
        ("operator", "", "exclude b, said on z"),
        ("operator", SLOT, "lock default: c [0, 8), said on z"),
        ("operator", "", "quota b (not known to this version), said on z"),
    ]
    older = tuple(each.model_copy(update={"age_us": 60_000_000}) for each in orders)
    assert core.on_orders(older, 6) == []


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (order(PIN_COORDINATOR, value="b"), "pin coordinator b"),
        (order(PIN_COORDINATOR, removed=True), "pin no coordinator"),
        (order(PIN_STAGE0, value="b"), "pin stage 0 b"),
        (order(PIN_STAGE0, removed=True), "pin no stage 0"),
        (order(EXCLUDE, "b", removed=True), "include b"),
        (lock(), "unlock default"),
        (order(POLICY, "concurrency", "4"), "policy concurrency = 4"),
        (order(POLICY, "concurrency", removed=True), "policy concurrency as configured"),
    ],
)
def test_orders_read_as_sentences(said, text):
    assert spoken(said) == text


def test_another_slots_lock_is_not_this_ones():
    core = coordinator()
    core.serve((ServedModelSpec(SLOT, "/m", MODEL),), 0)
    core.on_orders((lock(("c", 0, 8), slot=Slot("other")),), 0)
    assert asked(core).request.locked is None


def test_a_calibration_that_cannot_be_read_changes_nothing():
    for value in (
        "",
        "{",
        "[]",
        '{"bytes_per_s": 0, "of": "x"}',
        '{"bytes_per_s": true, "of": "x"}',
        '{"bytes_per_s": 5}',
    ):
        read = standing([OperatorOrder(kind=NODE_SPEED, subject="b", value=value, author="a")])
        assert read.speeds == {}
    for value in ("null", '{"rtt_multiplier_milli": -1, "per_hop_us": 0}', '{"rtt_multiplier_milli": 1}'):
        read = standing([OperatorOrder(kind=HOP_COSTS, subject="engine", value=value, author="a")])
        assert read.calibration(Calibration(name="engine")) == Calibration(name="engine")


def test_calibrated_hops_stand_above_their_own_profile_only_and_are_named_in_plans():
    said = OperatorOrder(
        kind=HOP_COSTS, subject="engine", value=costs_text(HopCosts(1_100, 300)), author="a", version=3
    )
    read = standing([said])
    found = read.calibration(Calibration(name="engine", per_stage_us=7))
    assert found == Calibration(name="engine+live.3", per_stage_us=7, rtt_multiplier_milli=1_100, per_hop_us=300)
    assert profile_name(found.name) == "engine"
    assert read.calibration(Calibration(name="other")).name == "other"
