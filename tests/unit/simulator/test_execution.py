import json
from dataclasses import replace

import pytest

from coordinator.planner.document import plan_document
from coordinator.planner.plan import Plan, PlanRefused
from coordinator.planner.planning import plan
from coordinator.planner.problem import PlanningProblem
from coordinator.simulator.execution import simulate
from coordinator.simulator.outcome import Outcome, outcome_document
from coordinator.simulator.scenario import Scenario
from tests.unit.simulator.scenarios import CORPUS, PAIR, SINGLE, read


def run(scenario: Scenario, **options: object) -> Outcome:
    outcome = simulate(scenario, **options)  # type: ignore[arg-type]
    assert isinstance(outcome, Outcome)
    return outcome


def planned(scenario: Scenario) -> Plan:
    assert isinstance(scenario.problem, PlanningProblem)
    answer = plan(scenario.problem)
    assert isinstance(answer, Plan)
    return answer


def test_without_traffic_one_stream_of_512_and_128_tokens_runs() -> None:
    outcome = run(read(PAIR))
    assert (outcome.completed, outcome.failed, outcome.tokens) == (1, 0, 128)


def test_one_stream_takes_exactly_what_the_planner_models() -> None:
    scenario = read(PAIR)
    outcome, modeled = run(scenario), planned(scenario).modeled
    assert outcome.tpot_us.p50 == modeled.decode_tpot_us
    assert outcome.ttft_us.p50 == modeled.ttft_us


def test_a_chunked_prompt_overlaps_its_chunks_between_stages() -> None:
    whole = run(read(PAIR + "[workload]\nprompt_tokens = 2048\nprefill_chunk_tokens = 2048\n"))
    chunked = run(read(PAIR + "[workload]\nprompt_tokens = 2048\nprefill_chunk_tokens = 512\n"))
    slow = PAIR.replace("[nodes.beta]", "sustained_compute_gflop_per_s = 2000\n[nodes.beta]").replace(
        "mib_per_s = 200000\n", "mib_per_s = 200000\nsustained_compute_gflop_per_s = 2000\n"
    )
    slow_whole = run(read(slow + "[workload]\nprompt_tokens = 2048\nprefill_chunk_tokens = 2048\n"))
    slow_chunked = run(read(slow + "[workload]\nprompt_tokens = 2048\nprefill_chunk_tokens = 512\n"))
    assert whole.ttft_us.p50 is not None
    assert chunked.ttft_us.p50 is not None
    assert slow_whole.ttft_us.p50 is not None
    assert slow_chunked.ttft_us.p50 is not None
    assert whole.ttft_us.p50 < chunked.ttft_us.p50  # memory-bound: every chunk reads all weights again
    assert slow_chunked.ttft_us.p50 < slow_whole.ttft_us.p50  # compute-bound: the second stage starts earlier


def test_lanes_share_the_stages_and_a_full_house_queues() -> None:
    traffic = "[workload]\nparallel_lanes = 2\nconcurrency = {}\nrequests = 8\noutput_tokens = 50\n"
    one, two, four = (run(read(PAIR + traffic.format(users))) for users in (1, 2, 4))
    assert one.tokens_per_s < two.tokens_per_s
    assert four.tokens_per_s == pytest.approx(two.tokens_per_s, rel=0.02)
    assert one.ttft_us.p90 is not None
    assert four.ttft_us.p90 is not None
    assert four.ttft_us.p90 > 5 * one.ttft_us.p90


def test_a_request_longer_than_the_context_fails_and_is_counted() -> None:
    text = (
        SINGLE
        + """[workload]
arrivals = "trace"
[[workload.trace]]
at_s = 0
prompt_tokens = 5000
[[workload.trace]]
at_s = 1
"""
    )
    outcome = run(read(text))
    assert (outcome.completed, outcome.failed) == (1, 1)
    assert {"requests_failed", "exceeds_context"} <= set(outcome.flags)


def test_the_default_request_is_cut_to_a_short_context_and_a_stated_one_is_not() -> None:
    short = PAIR.replace("native_context_length = 4096", "native_context_length = 200")
    scenario = read(short)
    outcome = run(scenario)
    assert (outcome.completed, outcome.tokens) == (1, 100)
    assert outcome.tpot_us.p50 == planned(scenario).modeled.decode_tpot_us
    stated = run(read(short + "[workload]\nprompt_tokens = 512\n"))
    assert (stated.completed, stated.failed) == (0, 1)
    assert "exceeds_context" in stated.flags


def test_bursts_arrive_together_and_wait_for_each_other() -> None:
    text = (
        SINGLE
        + '[workload]\narrivals = "burst"\nburst_size = 8\nburst_every_s = 1000\nrequests = 16\nparallel_lanes = 1\n'
    )
    outcome = run(read(text))
    assert outcome.completed == 16
    assert outcome.ttft_us.p50 is not None
    assert outcome.ttft_us.p99 is not None
    assert outcome.ttft_us.p99 > 5 * outcome.latency_us.p50 / 8  # type: ignore[operator]


def test_the_same_seed_gives_the_same_bytes_and_another_seed_does_not() -> None:
    text = SINGLE + '[workload]\narrivals = "poisson"\nrate_per_s = 0.5\nrequests = 50\n'

    def document(seed: int) -> str:
        outcome = run(read(text), seed=seed)
        return json.dumps(outcome_document(outcome, plan_document(outcome.plan)))

    assert document(7) == document(7)
    assert document(7) != document(8)


def test_skipping_rounds_changes_no_figure() -> None:
    text = (CORPUS / "failure-cold-start.toml").read_text()
    fast, slow = run(read(text)), run(read(text), skip_rounds=False)
    assert replace(fast, spans=(), tokens_by_second={}) == replace(slow, spans=(), tokens_by_second={})


def test_a_lost_node_stops_service_until_a_plan_without_it_has_loaded() -> None:
    outcome = run(read((CORPUS / "failure-cold-start.toml").read_text()))
    kinds = [event.kind for event in outcome.events]
    assert kinds[:2] == ["node_down", "replanned"]
    assert "a new plan serves in" in outcome.events[0].effect
    # settle 2 s + 25 of 60 layers of 800 MB at 2 000 MiB/s
    assert outcome.events[1].at_us == 20_000_000 + 2_000_000 + -(-25 * 800_000_000 * 1_000_000 // (2_000 * 1_048_576))
    assert "c[35:60]" in outcome.events[1].effect
    assert outcome.downtime_us > 9_000_000
    assert (outcome.completed, outcome.failed) == (40, 0)
    assert outcome.interrupted >= 4


def test_a_returning_node_is_used_again_only_after_the_dwell() -> None:
    outcome = run(read((CORPUS / "failure-cold-start.toml").read_text()))
    back = next(event for event in outcome.events if event.kind == "node_up")
    assert "must be active for 300 s" in back.effect
    last = outcome.events[-1]
    assert last.kind == "replanned"
    assert last.at_us >= 331_000_000


NO_WAY_OUT = """
[workload]
output_tokens = 1000
[[events]]
at_s = 5
kind = "node_down"
target = "beta"
"""


def test_requests_fail_when_nothing_can_ever_serve_them_again() -> None:
    outcome = run(read(PAIR + NO_WAY_OUT))
    assert (outcome.completed, outcome.failed) == (0, 1)
    assert "no other node can hold the model" in outcome.events[0].effect
    assert "requests_failed" in outcome.flags


def test_service_resumes_when_the_lost_node_comes_back() -> None:
    back = '[[events]]\nat_s = 60\nkind = "node_up"\ntarget = "beta"\n'
    outcome = run(read(PAIR + NO_WAY_OUT + back))
    assert (outcome.completed, outcome.failed, outcome.tokens) == (1, 0, 1000)
    assert outcome.downtime_us == 57_000_000
    modeled = outcome.plan.modeled
    assert modeled.ttft_us is not None
    assert modeled.decode_tpot_us is not None
    delivered = 1 + (5_000_000 - modeled.ttft_us) // modeled.decode_tpot_us
    assert outcome.prefilled_again == 512 + delivered


def test_a_slower_link_is_paid_from_the_next_pass_on() -> None:
    event = '[[events]]\nat_s = 0\nkind = "link"\ntarget = "alpha -> beta"\nrtt_ms = 102.5\n'
    before, after = run(read(PAIR)), run(read(PAIR + event))
    assert before.tpot_us.p50 is not None
    assert after.tpot_us.p50 == before.tpot_us.p50 + 100_000
    assert "ms per token" in after.events[0].effect


def test_a_straggler_slows_its_stage_and_an_end_of_it_is_noticed() -> None:
    slow = '[[events]]\nat_s = 0\nkind = "straggler"\ntarget = "beta"\nfactor = 3\n'
    ends = '[[events]]\nat_s = 0.001\nkind = "straggler"\ntarget = "beta"\nfactor = 1\n'
    plain, slowed, ended = run(read(PAIR)), run(read(PAIR + slow)), run(read(PAIR + slow + ends))
    assert plain.tpot_us.p50 is not None
    assert slowed.tpot_us.p50 is not None
    assert ended.tpot_us.p50 == plain.tpot_us.p50
    beta = next(stage.stage_us for stage in plain.plan.stages if stage.node_id == "beta")
    assert beta is not None
    assert slowed.tpot_us.p50 - plain.tpot_us.p50 == pytest.approx(2 * (beta - 1_300), rel=0.001)


def test_a_cold_start_of_an_unused_node_costs_nothing() -> None:
    text = (CORPUS / "leave-one-out-wins.toml").read_text()
    event = '[[events]]\nat_s = 1\nkind = "cold_start"\ntarget = "big"\n'
    outcome = run(read(text + event))
    assert "nothing changes" in outcome.events[0].effect
    assert outcome.downtime_us == 0


def test_a_locked_plan_is_executed_as_it_stands_and_never_replaced() -> None:
    text = (CORPUS / "latency-sweep-3.toml").read_text() + NO_WAY_OUT.replace("[workload]\noutput_tokens = 1000\n", "")
    outcome = run(read(text))
    assert [stage.layer_end for stage in outcome.plan.stages] == [20, 40, 60]
    assert outcome.failed == 1
    assert "never replaced" in outcome.events[0].effect


def test_a_locked_split_larger_than_its_memory_runs_from_disk_and_says_so() -> None:
    outcome = run(read((CORPUS / "disk-bound-locked.toml").read_text().replace('device = "Apple M1"', "")))
    assert {"disk_bound", "does_not_fit"} <= set(outcome.flags)
    assert outcome.decode_tok_s_per_stream == pytest.approx(0.05, rel=0.1)  # as measured in public


def test_what_the_planner_refuses_is_refused() -> None:
    refused = simulate(read((CORPUS / "does-not-fit.toml").read_text()))
    assert isinstance(refused, PlanRefused)
    assert refused.code == "no_valid_topology"


def test_unknown_speeds_and_links_are_assumed_and_flagged() -> None:
    outcome = run(read((CORPUS / "capacity-only.toml").read_text()))
    assert outcome.plan.modeled.decode_tpot_us is None
    assert {"assumed_speed", "assumed_rtt"} <= set(outcome.flags)


def test_more_traffic_than_the_plan_serves_is_flagged() -> None:
    calm = SINGLE + '[workload]\narrivals = "poisson"\nrate_per_s = 0.01\nrequests = 50\n'
    flood = SINGLE + '[workload]\narrivals = "poisson"\nrate_per_s = 50\nrequests = 300\n'
    assert "overloaded" not in run(read(calm)).flags
    assert "overloaded" in run(read(flood)).flags


def test_the_document_has_exactly_the_documented_keys() -> None:
    outcome = run(read((CORPUS / "failure-cold-start.toml").read_text()))
    document = outcome_document(outcome, plan_document(outcome.plan))
    assert list(document) == [
        "plan", "seed", "requests", "tokens_per_s", "decode_tok_s_per_stream", "tpot_us", "ttft_us", "latency_us",
        "stages", "events", "flags",
    ]  # fmt: skip
    assert set(document["requests"]) == {"completed", "failed"}
    assert set(document["tpot_us"]) == {"p50", "p90", "p99"}
    assert set(document["stages"][0]) == {"stage_index", "node_id", "utilization", "bubble_share"}
    assert set(document["events"][0]) == {"at_s", "kind", "effect"}
    json.dumps(document, allow_nan=False)


def test_a_plan_whose_node_dies_while_it_loads_is_never_served() -> None:
    text = (CORPUS / "failure-cold-start.toml").read_text()
    text = text[: text.index("[[events]]")]
    for at, kind, target in ((20, "node_down", "b"), (25, "node_down", "c"), (60, "node_up", "b")):
        text += f'[[events]]\nat_s = {at}\nkind = "{kind}"\ntarget = "{target}"\n'
    outcome = run(read(text))
    assert [event.kind for event in outcome.events] == ["node_down", "node_down", "node_up", "reloaded"]
    assert outcome.downtime_us == 42_000_000
    assert outcome.completed == 40
