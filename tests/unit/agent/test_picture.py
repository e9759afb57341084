"""What a node shows of its mesh: the agents' own words, not what was planned once."""

import json
from dataclasses import dataclass, field, replace
from random import Random
from types import SimpleNamespace

from config.settings import AssignmentSettings, ElectionSettings, LinkSettings, PlannerSettings, ReplanSettings
from coordinator.assignment.moment import ServedModelSpec
from coordinator.coordinator import Coordinator
from coordinator.view import facts_of
from protocol.ballots import PublishedPlan
from protocol.fencing import epoch_to_wire
from protocol.ids import Instance, NodeId, Term
from protocol.links.facts import fact_of
from protocol.links.link import Link
from protocol.membership.member import Member
from protocol.orders import EXCLUDE, OperatorOrder
from protocol.quic.interface import TransportCounters
from protocol.rows import LinkFact
from stage_agent.api.documents import links_document, stages_document, status_document
from stage_agent.api.readiness import not_ready_reasons
from stage_agent.cli.mesh_view import links_view, status_view
from stage_agent.clock import monotonic_us
from stage_agent.documents import PublishedPlans
from stage_agent.journal import Journal
from stage_agent.narrator import Narrator
from stage_agent.orders import Orders
from stage_agent.own_row import Identification
from stage_agent.picture import ESTIMATES_SHOWN, Picture
from stage_agent.switches import Switches
from tests.unit.api.pictures import PLAN
from tests.unit.coordination.builders import MODEL, SLOT, ballot, link, member, serving

SPLIT = PLAN | {
    "stages": [
        {**stage, "node_id": node, "layer_start": start, "layer_end": end}
        for stage, (node, start, end) in zip(PLAN["stages"], (("b", 0, 5), ("c", 5, 8)), strict=True)
    ]
}
AT = ballot(4, "b")


@dataclass
class Members:
    """A membership whose members a test may exchange."""

    now: dict[NodeId, Member] = field(default_factory=dict)
    own_links: tuple[LinkFact, ...] = ()
    estimates: dict[NodeId, int] = field(default_factory=dict)

    def members(self, _now_us: int = 0) -> dict[NodeId, Member]:
        return self.now

    def link_facts(self, _now_us: int) -> tuple[LinkFact, ...]:
        return self.own_links

    def estimate_rtt_us(self, _source: NodeId, target: NodeId) -> int | None:
        return self.estimates.get(target)


def seen(name: str, state: str = "alive", **fields) -> Member:
    facts = member(name, **fields)
    return Member(
        node_id=facts.node_id, row=facts.row, state=state, direct=True, address="", received_us=0, changed_us=0,
        heard_us=0, flaps=(), conflict=False, link=None, is_self=name == "a",
    )  # fmt: skip


class Shown:
    """Node ``a``, a follower, looks at a plan that ``b`` coordinates on ``b`` and ``c``."""

    def __init__(self) -> None:
        self.membership, journal = Members(), Journal()
        self.narrator = Narrator(self.membership, journal)
        self.coordinator = Coordinator(
            node_id=NodeId("a"), instance=Instance("1" * 32), last_term=Term(0), election=ElectionSettings(settle_us=0),
            assignment=AssignmentSettings(), replan=ReplanSettings(), planner=PlannerSettings(), random=Random(1),
            now_us=0,
        )  # fmt: skip
        spec = ServedModelSpec(SLOT, "/models/m.gguf", MODEL)
        self.coordinator.serve((spec,), 0)
        self.published = PublishedPlans()
        message = PublishedPlan(
            ballot=epoch_to_wire(AT), slot=SLOT, generation=4, state="serving", document=json.dumps(SPLIT).encode()
        )
        assert self.published.learn(NodeId("b"), message)
        self.orders = Orders(NodeId("a"), lambda _: None)
        transport = SimpleNamespace(counters=TransportCounters(), connected=frozenset())
        driver = SimpleNamespace(
            membership=self.membership, coordinator=self.coordinator, transport=transport, journal=journal,
            narrator=self.narrator, orders=self.orders, published=self.published,
            wishes=SimpleNamespace(specs=(spec,)),
        )  # fmt: skip
        who = Identification(NodeId("a"), b"k" * 32, Instance("1" * 32), 1, "a", "1")
        self.picture = Picture(driver, who, "mesh", "0.0.0.0:1", 0, LinkSettings(), Switches())

    def look(self, *members: Member):
        self.membership.now = {each.node_id: each for each in (seen("a"), *members)}
        self.coordinator.on_members(tuple(map(facts_of, self.membership.now.values())), monotonic_us())
        return self.picture.snapshot()


def stage(start: int, end: int, index: int, **fields):
    return serving(AT, start, end, index, 2, **fields)


def b(**fields) -> Member:
    return seen("b", stages=(stage(0, 5, 0),), **fields)


def c(state: str = "alive", word: str = "serving", **fields) -> Member:
    return seen("c", state, stages=(stage(5, 8, 1, state=word),), **fields)


def text(document: dict, view=status_view) -> str:
    from rich.console import Console

    console = Console(width=240, no_color=True)
    with console.capture() as captured:
        console.print(view(document))
    return captured.get()


def test_a_plan_whose_stages_all_serve_is_active_and_routable():
    snapshot = Shown().look(b(), c())
    (slot,) = snapshot.slots
    assert (slot.state, slot.routable, slot.epoch) == ("active", True, str(AT))
    assert slot.active_age_us is not None


def test_a_lost_workers_stage_is_not_shown_as_ready_by_any_node():
    shown = Shown()
    shown.look(b(), c())
    snapshot = shown.look(b(), c("dead"))
    (slot,) = snapshot.slots
    assert (slot.state, slot.routable) == ("degraded", False)
    assert [each["name"] for each in stages_document(snapshot)["stages"]] == ["b"]
    assert "degraded" in text(status_document(snapshot))


def test_a_second_worker_that_only_stands_by_is_not_ready_whatever_was_published():
    shown = Shown()
    shown.look(b(), c())
    snapshot = shown.look(b(), c(word="ready"))
    (slot,) = snapshot.slots
    assert (slot.state, slot.routable) == ("degraded", False)
    facts = {each["name"]: each["state"] for each in stages_document(snapshot)["stages"]}
    assert facts == {"b": "serving", "c": "ready"}


def test_a_node_that_never_saw_the_plan_whole_does_not_believe_the_publication_over_a_death():
    snapshot = Shown().look(b(), c("dead"))
    (slot,) = snapshot.slots
    assert (slot.state, slot.routable) == ("degraded", False)


def test_a_node_whose_own_stage_stands_by_says_so_when_asked_whether_it_is_ready():
    shown = Shown()
    mine = SPLIT | {"stages": [SPLIT["stages"][0], {**SPLIT["stages"][1], "node_id": "a"}]}
    shown.published.learn(
        NodeId("b"),
        PublishedPlan(
            ballot=epoch_to_wire(AT), slot=SLOT, generation=4, state="serving", document=json.dumps(mine).encode()
        ),
    )
    shown.membership.now = {NodeId("a"): seen("a", stages=(stage(5, 8, 1, state="ready"),)), NodeId("b"): b()}
    assert not_ready_reasons(shown.picture.snapshot()) == ("stage of slot default is ready, assigned to serve",)


def test_orders_are_shown_with_names_author_and_age():
    shown = Shown()
    shown.orders.say([OperatorOrder(kind=EXCLUDE, subject="c", author="here")], monotonic_us() - 90_000_000)
    shown.look(b(), c())
    document = status_document(shown.picture.snapshot())
    (order,) = document["orders"]
    assert (order["text"], order["author_name"], order["age_us"] // 1_000_000) == ("exclude c", "a", 90)
    assert "exclude c" in text(document)
    assert "1 min 30 s ago" in text(document)
    shown.orders.say([OperatorOrder(kind=EXCLUDE, subject="c", author="here", removed=True)], monotonic_us())
    assert status_document(shown.picture.snapshot())["orders"] == []


def test_a_link_is_settled_by_the_configured_rule():
    shown = Shown()
    there = link("b")
    members = (seen("b", links=()), seen("c", links=(there,)))
    assert [each.settled for each in shown.look(*members).links] == [True]
    shown.picture.link_settings = LinkSettings(settle_samples=10)
    assert [each.settled for each in shown.look(*members).links] == [False]
    shown.picture.link_settings = LinkSettings(settle_span_us=30_000_000)
    assert [each.settled for each in shown.look(*members).links] == [False]


def test_a_plan_over_direct_engines_says_so_wherever_it_is_shown():
    calm = Shown().look(b(), c()).slots[0]
    assert calm.warning == ""
    snapshot = Shown().look(b(), c(degraded=("direct_engine",)))
    assert "direct mode on c" in snapshot.slots[0].warning
    assert "neither encrypted nor authenticated" in text(status_document(snapshot))


def coordinates(shown: Shown) -> None:
    """From now on ``a`` coordinates its own view."""
    shown.look()
    later_us = monotonic_us() + 20_000_000
    shown.coordinator.on_timer(later_us)
    assert shown.coordinator.snapshot(later_us).role == "coordinator"


def test_who_is_left_out_of_a_plan_and_why_is_said_by_its_coordinator():
    shown = Shown()
    coordinates(shown)
    assert status_document(shown.look())["slots"][0]["left_out"] == []
    culprits = shown.coordinator._slots[SLOT].culprits
    culprits.blame(NodeId("c"), "c refused to stage: load_failed (no such file)", monotonic_us())
    document = status_document(shown.look(seen("b", status="draining"), seen("c")))
    (slot,) = document["slots"]
    assert slot["left_out"] == [
        {"node_id": "b", "name": "b", "reason": "draining"},
        {"node_id": "c", "name": "c", "reason": "c refused to stage: load failed (no such file)"},
    ]
    assert "left out of default: b (draining), c (c refused to stage" in text(document)


def test_a_table_for_people_names_some_of_those_that_are_left_out_and_counts_the_others():
    shown = Shown()
    coordinates(shown)
    names = "bcdefghijkl"
    document = status_document(shown.look(*(seen(each, status="draining") for each in names)))
    assert [each["name"] for each in document["slots"][0]["left_out"]] == list(names)
    assert "i (draining) and 3 more" in text(document)


def test_a_follower_does_not_pretend_to_know_who_is_left_out():
    assert status_document(Shown().look(b(), c(status="draining")))["slots"][0]["left_out"] == []


def test_an_own_link_shows_its_jitter_the_best_under_load_and_when_its_path_changed():
    link_to_b, now_us = Link(LinkSettings()), monotonic_us()
    start_us = now_us - 60_000_000
    link_to_b.on_path("10.0.0.2:1", "eth0", start_us)
    link_to_b.on_path("10.0.0.2:1", "wlan0", start_us)
    for second in range(20):
        link_to_b.on_rtt(70_000 if second % 2 else 102_000, start_us + second * 1_000_000)
    link_to_b.on_rtt(3_000, start_us + 20_000_000)
    link_to_b.on_transfer("send", 50_000_000, 1_000_000, "link", start_us + 20_500_000)
    link_to_b.on_transfer("receive", 40_000_000, 1_000_000, "app", start_us + 20_500_000)
    shown, seen_link = Shown(), link_to_b.view(now_us)
    fact = fact_of(NodeId("b"), seen_link, now_us)
    shown.membership.own_links = (fact,)
    (own,) = shown.look(replace(seen("b", links=()), link=seen_link)).links
    assert 20_000 < own.jitter_us < 40_000
    assert (own.rtt_us, own.loaded_rtt_us, own.path_changes) == (3_000, 3_000, 1)
    assert 60_000_000 <= own.path_changed_age_us < 90_000_000
    assert (own.bandwidth_limited_by, own.receive_limited_by) == ("link", "app")
    assert own.bandwidth_source == "passive"
    shown.picture = replace(shown.picture, probed=lambda peer, at: (peer, at) == ("b", start_us + 20_500_000))
    assert shown.picture.snapshot().links[0].bandwidth_source == "active"
    assert "probed" in text(links_document(shown.picture.snapshot()), links_view)
    table = text(links_document(shown.picture.snapshot()), links_view)
    assert "under load 3.00 ms" in table
    assert "1 path change" in table


def test_in_a_large_mesh_the_ways_nobody_measured_are_shown_as_estimates_and_never_settled():
    shown = Shown()
    shown.membership.own_links = (link("b", 700),)
    shown.membership.estimates = {NodeId(name): rtt for name, rtt in (("a", 1), ("b", 5), ("c", 9_000), ("d", 4_000))}
    shown.membership.estimates[NodeId("dead")] = 3
    members = [seen(name, links=()) for name in ("b", "c", "d", "unplaced")] + [seen("dead", "dead", links=())]
    links = shown.look(*members).links
    assert [(each.target, each.rtt_us, each.estimated, each.settled) for each in links] == [
        ("b", 700, False, True),
        ("d", 4_000, True, False),
        ("c", 9_000, True, False),
    ]
    table = text(links_document(shown.picture.snapshot()), links_view).splitlines()
    assert ["estimated" in row for row in table if "a → " in row] == [False, True, True]


def test_no_more_estimates_are_shown_than_a_row_may_tell_links_and_the_nearest_first():
    shown = Shown()
    names = [f"n{number}" for number in range(ESTIMATES_SHOWN + 40)]
    shown.membership.estimates = {NodeId(name): 9_999 - at for at, name in enumerate(names)}
    links = shown.look(*(seen(name, links=()) for name in names)).links
    assert [each.target for each in links] == names[: -ESTIMATES_SHOWN - 1 : -1]
