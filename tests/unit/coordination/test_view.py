"""From rows to the planner's input."""

from dataclasses import replace

from config.settings import PlannerSettings
from coordinator.calibrated import NodeSpeed, fingerprint
from coordinator.planner.memory import usable_bytes
from coordinator.planner.participants import participant_set_hash
from coordinator.view import ProblemTerms, SignalQuantiser, build_problem, partners
from protocol.ids import NodeId
from protocol.rows import DeviceFact, ModelFact
from tests.unit.coordination.builders import GIB, MODEL, ballot, link, member, serving, view


def terms(**fields):
    return ProblemTerms(model=MODEL, planner=PlannerSettings(), **fields)


def built(cluster, quantiser=None, **fields):
    return build_problem(cluster, terms(**fields), quantiser or SignalQuantiser())


def test_only_connected_members_that_are_not_excluded_take_part():
    cluster = view(member("a"), member("b", state="dead"), member("c", state="suspect"), member("d"))
    problem = built(cluster, excluded={NodeId("d"): "draining"})
    assert [node.node_id for node in problem.participants] == ["a", "c"]


def test_the_device_with_the_layers_stands_for_the_node():
    devices = tuple(
        DeviceFact(
            name=name,
            kind="other",
            memory_bytes=1,
            memory_bandwidth_bytes_per_s=speed,
            source="measured",
            holds_layers=holds,
        )
        for name, speed, holds in (("cpu", 2_000, False), ("gpu", 900, True), ("igpu", None, False))
    )
    (node,) = built(view(member("a", devices=devices))).participants
    assert (node.memory_bandwidth_bytes_per_s, node.bandwidth_source) == (900, "measured")


def test_memory_that_other_slots_use_is_not_offered_again():
    cluster = view(member("a", gib=10))
    free = usable_bytes(built(cluster).participants[0])
    left = usable_bytes(built(cluster, held_bytes={NodeId("a"): 3 * GIB}).participants[0])
    assert left == free - 3 * GIB


def test_links_become_edges_with_their_ages_and_estimates_are_left_out():
    links = (link("b", 700, send_bytes_per_s=99), link("c", 1), link("a", 1))
    cluster = view(
        member("a", links=(*links[:1], links[1].model_copy(update={"estimated": True}), links[2])),
        member("b"),
        member("c"),
    )
    (edge,) = built(cluster).edges
    assert (edge.source, edge.target, edge.rtt_us, edge.large_frame_bytes_per_s) == ("a", "b", 700, 99)
    assert (edge.rtt_samples, edge.rtt_first_age_us, edge.rtt_last_age_us) == (9, 20_000_000, 1)


def test_the_frames_bandwidth_of_an_edge_is_what_both_of_its_ends_saw():
    def edges(a: dict[str, object], b: dict[str, object]) -> dict[tuple[str, str], int | None]:
        cluster = view(member("a", links=(link("b", 700, **a),)), member("b", links=(link("a", 700, **b),)))
        return {(edge.source, edge.target): edge.large_frame_bytes_per_s for edge in built(cluster).edges}

    seven = {"send_bytes_per_s": 7, "bandwidth_limited_by": "link"}
    five = {"receive_bytes_per_s": 5, "bandwidth_limited_by": "link"}
    assert edges(seven, five) == {("a", "b"): 5, ("b", "a"): None}
    assert edges({}, five) == {("a", "b"): 5, ("b", "a"): None}, "only the receiver knows"
    assert edges(seven, {}) == {("a", "b"): 7, ("b", "a"): None}
    assert edges(seven, {**five, "bandwidth_limited_by": "app"})["a", "b"] == 7, "at least 5 is no word against 7"
    assert edges({**seven, "bandwidth_limited_by": "app"}, five)["a", "b"] == 5
    both = {"send_bytes_per_s": 9, "receive_bytes_per_s": 6, "bandwidth_limited_by": "link"}
    assert edges(both, both) == {("a", "b"): 6, ("b", "a"): 6}
    assert edges(both, {**both, "receive_limited_by": "app"}) == {("a", "b"): 9, ("b", "a"): 6}


def test_noise_at_either_end_of_a_link_changes_no_hash_and_a_receiver_that_gets_far_less_does():
    quantiser, hashes = SignalQuantiser(), set()
    for sent, received in ((100, 101), (103, 98), (97, 104), (100, 96), (104, 99)):
        cluster = view(
            member("a", links=(link("b", 500, send_bytes_per_s=sent * 10**6),)),
            member("b", links=(link("a", 500, receive_bytes_per_s=received * 10**6),)),
        )
        hashes.add(participant_set_hash(built(cluster, quantiser)))
    assert len(hashes) == 1
    slow = view(
        member("a", links=(link("b", 500, send_bytes_per_s=100 * 10**6),)),
        member("b", links=(link("a", 500, receive_bytes_per_s=50 * 10**6),)),
    )
    assert participant_set_hash(built(slow, quantiser)) not in hashes


def test_signals_of_a_node_whose_way_is_not_settled_are_marked_untrusted():
    problem = built(view(member("a", settled=False), member("b", settled=False)))
    assert [node.signals_trusted for node in problem.participants] == [True, False]
    assert problem.participants[0].coordinator_rtt_us == 0


def test_timings_and_cached_bytes_belong_to_this_very_model():
    models = (ModelFact(digest=MODEL.digest, cached_bytes=7, missing_bytes=5, artifact_transfer=True),)
    stages = (serving(ballot(1), 0, 8, decode_us_per_layer=40, decode_samples=9, decode_age_us=3),)
    node = built(view(member("a", models=models, stages=stages))).participants[0]
    assert (node.cached_bytes, node.missing_bytes, node.artifact_transfer) == (7, 5, True)
    assert (node.observed_decode_us_per_layer, node.observed_decode_samples, node.observed_decode_age_us) == (40, 9, 3)
    other = build_problem(
        view(member("a", models=models, stages=stages)),
        replace(terms(), model=replace(MODEL, digest="f" * 64)),
        SignalQuantiser(),
    ).participants[0]
    assert (other.cached_bytes, other.observed_decode_us_per_layer) == (None, None)


def test_noise_at_a_buckets_border_never_changes_the_hash_and_a_real_change_does():
    quantiser, hashes = SignalQuantiser(), set()
    for wobble in (0, 4, -4, 8, -8, 0):
        cluster = view(
            member("a", bandwidth=10**10 + wobble * 10**8, links=(link("b", 5_000 + wobble * 40),)), member("b")
        )
        hashes.add(participant_set_hash(built(cluster, quantiser)))
    assert len(hashes) == 1
    faster = view(member("a", bandwidth=10**10 * 12 // 10, links=(link("b", 5_000),)), member("b"))
    assert participant_set_hash(built(faster, quantiser)) not in hashes


def test_without_hysteresis_the_same_noise_flips_the_hash():
    quantiser, hashes = SignalQuantiser(hold_milli=0), set()
    for wobble in range(-8, 9):
        cluster = view(member("a", bandwidth=10**10 + wobble * 10**8))
        hashes.add(participant_set_hash(built(cluster, quantiser)))
    assert len(hashes) > 1


def test_a_signal_that_was_not_asked_for_is_forgotten():
    quantiser = SignalQuantiser()
    built(view(member("a", bandwidth=1000)), quantiser)
    built(view(member("b")), quantiser)
    assert built(view(member("a", bandwidth=1050)), quantiser).participants[0].memory_bandwidth_bytes_per_s == 1050


def test_the_highest_term_of_any_row_is_known():
    stages = (serving(ballot(9), 0, 8),)
    assert (
        view(member("a", max_term=4), member("b", stages=stages), member("c", state="dead", max_term=11)).max_term == 11
    )
    assert view(member("a", max_term=4), member("b", stages=stages)).max_term == 9


def test_partners_are_the_nodes_of_the_own_plan_and_its_coordinator():
    plan, other = ballot(3, "boss"), ballot(2, "elsewhere")
    members = [
        member("a", stages=(serving(plan, 0, 4),)),
        member("b", stages=(serving(plan, 4, 8, 1),)),
        member("gone", state="dead", stages=(serving(plan, 4, 8, 1),)),
        member("c", stages=(serving(other, 0, 8, slot="another"),)),
        member("boss"),
    ]
    assert partners(members, NodeId("a")) == {"b", "boss"}
    assert partners(members, NodeId("boss")) == {"a", "b"}
    assert partners(members, NodeId("idle")) == frozenset()


def test_a_calibrated_speed_holds_while_devices_and_engine_are_the_same():
    known = member("b", engine="llama.cpp b10068")
    speeds = {NodeId("b"): NodeSpeed(5 * 10**9, fingerprint(known.row))}
    changed = member("b", engine="llama.cpp b11434")
    other = DeviceFact(name="RTX 4090", kind="cuda", memory_bytes=8 * GIB, memory_bandwidth_bytes_per_s=10**12)
    for node, expected in (
        (known, 5 * 10**9),
        (changed, None),
        (member("b", engine="llama.cpp b10068", devices=(other,)), None),
    ):
        problem = built(view(member("a"), node), speeds=speeds)
        assert problem.participants[1].calibrated_bytes_per_s == expected
