"""Every metric of the interface document, straight from the snapshot."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from stage_agent.api.snapshot import CounterView, LinkView, MemberView, SlotView
from tests.unit.api.pictures import ALPHA, BETA, MEMBERS, PLAN, SLOT, ask, shown


def samples(**changes):
    answer = ask(shown(**changes), "GET", "/metrics")
    assert answer.status_code == 200
    found = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            key = (sample.name, *sorted(sample.labels.items()))
            assert key not in found, key
            found[key] = sample.value
    return found


def value(found, name, **labels):
    return found.get((f"stagemesh_{name}", *sorted(labels.items())))


S = {"slot": "default"}


@pytest.mark.parametrize(
    ("name", "labels", "expected"),
    [
        ("plan_generation", S, 2),
        (
            "plan_info",
            {
                "plan_id": PLAN["plan_id"],
                "coordinator": "alpha",
                "placement": "performance_aware",
                "calibration": "skippy",
                **S,
            },
            1,
        ),
        ("plan_modeled_tpot_seconds", S, 0.05),
        ("plan_network_seconds_per_token", S, 0.03),
        ("plan_target_met", S, 0),
        ("plan_search_gap_ratio", S, 0),
        ("plan_search_seconds_bucket", {"le": "0.005"}, 1),
        ("plan_search_seconds_count", {}, 1),
        ("plan_search_seconds_sum", {}, 0.003),
        ("plan_stage_layers", {"node": "alpha", "stage": "0", **S}, 27),
        ("plan_stage_layers", {"node": "beta", "stage": "1", **S}, 13),
        ("plan_stage_required_bytes", {"node": "alpha", "stage": "0", **S}, 3_000),
        ("plan_stage_usable_bytes", {"node": "alpha", "stage": "0", **S}, 4_000),
        ("plan_hop_seconds", {"source": "alpha", "target": "beta", **S}, 0.015),
        ("replan_total", {"reason": "node_lost", "outcome": "replaced"}, 5),
        ("measured_tpot_seconds", S, 0.1),
        ("predicted_over_measured_ratio", S, 0.5),
        ("coordinator_term", {}, 4),
        ("is_coordinator", {}, 1),
        ("claims_total", {"result": "won"}, 3),
        ("assignments_total", {"result": "active"}, 4),
        ("stale_frames_total", {"kind": "decode"}, 2),
        ("stage_frames_total", {"direction": "sent"}, 3),
        ("stage_frames_total", {"direction": "received"}, 0),
        ("stage_frame_bytes_total", {"direction": "sent"}, 3_300),
        ("stage_frames_dropped_total", {"reason": "wrong_sender"}, 1),
        ("stage_state", {"state": "serving"}, 1),
        ("stage_state", {"state": "failed"}, 0),
        ("link_rtt_seconds", {"peer": "beta"}, 0.002),
        ("link_rtt_settled", {"peer": "beta"}, 1),
        ("link_large_frame_bytes_per_second", {"peer": "beta", "direction": "send"}, 50_000_000),
        ("link_degraded", {"peer": "beta"}, 1),
        ("node_memory_bandwidth_bytes_per_second", {"device": "cpu"}, 100_000_000_000),
        ("node_usable_memory_bytes", {"device": "cpu"}, 4_000),
        ("peers", {"state": "alive"}, 0),
        ("peers", {"state": "suspect"}, 1),
        ("peers", {"state": "dead"}, 1),
        ("gossip_bytes_total", {"direction": "sent"}, 10),
        ("gossip_messages_total", {"direction": "received", "lane": "stream"}, 5),
        ("gossip_packets_total", {"direction": "sent"}, 6),
        ("gossip_rejected_total", {"reason": "oversized"}, 1),
        ("quic_connections", {}, 2),
        ("tunnel_bytes_total", {"peer": "beta", "direction": "send"}, 7),
        ("tunnel_bytes_total", {"peer": "beta", "direction": "receive"}, 0),
        ("tunnel_bytes_total", {"peer": "gone", "direction": "send"}, 0),
        ("tunnel_errors_total", {"reason": "busy"}, 1),
        ("tunnel_errors_total", {"reason": "reset"}, 0),
        ("tunnel_connections", {}, 2),
    ],
)
def test_a_metric_has_its_name_labels_and_base_unit(name, labels, expected):
    assert value(samples(), name, **labels) == expected


def test_an_unknown_figure_is_absent_and_never_zero():
    found = samples()
    assert value(found, "plan_hop_seconds", source="beta", target="alpha", **S) is None
    assert value(found, "link_large_frame_bytes_per_second", peer="beta", direction="receive") is None
    estimate = LinkView(ALPHA, BETA, rtt_us=5_000, estimated=True)
    assert value(samples(links=(estimate,)), "link_rtt_seconds", peer="beta") is None, "nobody measured it"
    unknown = {**PLAN, "modeled": dict.fromkeys(PLAN["modeled"]), "target": {"decode_tpot_ms": 33, "met": None}}
    found = samples(slots=(SlotView("default", "active", plan=unknown, measured_tpot_us=5),))
    for name in ("plan_modeled_tpot_seconds", "plan_target_met", "predicted_over_measured_ratio"):
        assert value(found, name, **S) is None
    assert value(found, "measured_tpot_seconds", **S) == 5e-6


def test_only_this_nodes_links_and_stages_are_its_metrics():
    found = samples(links=(LinkView(BETA, ALPHA, rtt_us=3_000),), stages=())
    assert not [key for key in found if key[0].startswith("stagemesh_link_rtt")]
    assert value(found, "stage_state", state="serving") == 0


def test_two_nodes_of_one_name_stay_two_time_series():
    twin = MemberView("twin" + "a" * 28, "beta", "alive")
    links = (LinkView(ALPHA, BETA, rtt_us=1), LinkView(ALPHA, twin.node_id, rtt_us=2))
    found = samples(members=(*MEMBERS, twin), links=links)
    assert value(found, "link_rtt_seconds", peer="beta-betaaaaa") == 1e-6
    assert value(found, "link_rtt_seconds", peer="beta-twinaaaa") == 2e-6


def test_a_link_that_a_plan_uses_twice_is_one_sample():
    hop = PLAN["hops"][0]
    star = {**PLAN, "hops": [hop, {**hop, "kind": "return"}]}
    found = samples(slots=(SlotView("default", "active", plan=star),))
    assert value(found, "plan_hop_seconds", source="alpha", target="beta", **S) == 0.015


def test_two_slots_have_their_own_plan_metrics():
    found = samples(slots=(SLOT, SlotView("second", "active", plan=PLAN, generation=7)))
    assert (value(found, "plan_generation", **S), value(found, "plan_generation", slot="second")) == (2, 7)


def test_a_name_with_quotes_and_newlines_stays_inside_its_label():
    odd = 'a"\n} 1\nfake_metric 2\\'
    members = (MEMBERS[0], MemberView(BETA, odd, "alive"))
    found = samples(members=members)
    assert value(found, "link_rtt_seconds", peer=odd) == 0.002
    assert not [key for key in found if key[0] == "fake_metric"]


def test_an_empty_node_has_metrics_too_and_those_of_its_process():
    found = samples(members=(), links=(), slots=(), stages=(), counters=CounterView(), coordinator_id="")
    assert value(found, "is_coordinator") == 1
    assert ("process_resident_memory_bytes",) in found
    assert value(found, "build_info", version="0.1.0", node="alpha") == 1


def test_openmetrics_is_spoken_when_asked_for():
    accept = {"accept": "application/openmetrics-text; version=1.0.0"}
    answer = ask(shown(), "GET", "/metrics", headers=accept)
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")
