"""Laws that hold of every run, whatever the mesh and the traffic."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.model.package import Layer, ModelPackage
from coordinator.planner.plan import Plan
from coordinator.planner.planning import plan
from coordinator.planner.problem import (
    Calibration,
    Edge,
    LockedStage,
    LockedTopology,
    Participant,
    PlanningProblem,
    PlanRequest,
)
from coordinator.simulator.execution import simulate
from coordinator.simulator.outcome import Outcome
from coordinator.simulator.scenario import Scenario
from coordinator.simulator.scenario_events import ColdStart, LinkChange, NodeDown, NodeUp, ScenarioEvent, Straggler
from coordinator.simulator.scenario_expectation import Expectation
from coordinator.simulator.scenario_workload import TraceEntry, Traffic

NAMES = ("a", "b", "c", "d", "e")


@st.composite
def problems(draw: st.DrawFn, *, least_nodes: int = 1) -> PlanningProblem:
    count = draw(st.integers(least_nodes, 5))
    names = NAMES[:count]
    layers = draw(st.integers(count, 12))
    model = ModelPackage(
        "m", "0" * 64, (Layer(draw(st.integers(1, 4)) * 10**8, 10**8, 64),) * layers, 0, 0, 4_096,
        draw(st.sampled_from((0, 4_096, 65_536))),
    )  # fmt: skip
    nodes = tuple(
        Participant(
            name,
            10**12,
            memory_bandwidth_bytes_per_s=draw(st.integers(10, 900)) * 10**9,
            compute_flops_per_s=draw(st.sampled_from((None, 10**12, 10**14))),
        )
        for name in names
    )
    edges = tuple(
        Edge(
            a,
            b,
            draw(st.integers(0, 40_000)),
            large_frame_bytes_per_s=draw(st.sampled_from((None, 10**7, 10**9))),
            direct_prediction_return_supported=draw(st.booleans()),
        )
        for a in names
        for b in names
        if a != b
    )
    calibration = Calibration(
        per_stage_us=draw(st.integers(0, 3_000)),
        per_hop_us=draw(st.integers(0, 13_000)),
        rtt_multiplier_milli=draw(st.integers(0, 2_000)),
        topology=draw(st.sampled_from(("chain", "star"))),
    )
    cuts = (
        sorted(draw(st.sets(st.integers(1, layers - 1), min_size=count - 1, max_size=count - 1))) if count > 1 else []
    )
    bounds = [0, *cuts, layers]
    locked = LockedTopology(tuple(LockedStage(name, *bounds[i : i + 2]) for i, name in enumerate(names)))
    request = PlanRequest(
        parallel_lanes=draw(st.integers(1, 6)),
        prefill_chunk_tokens=draw(st.sampled_from((16, 64, 256))),
        locked=locked,
    )
    return PlanningProblem(model, nodes, edges, calibration, request)


@st.composite
def traffics(draw: st.DrawFn) -> Traffic:
    kind = draw(st.sampled_from(("closed", "poisson", "burst", "trace")))
    prompt, output = draw(st.integers(1, 300)), draw(st.integers(1, 40))
    requests = draw(st.integers(1, 25))
    gap = draw(st.integers(1_000, 3_000_000))
    trace = tuple(
        TraceEntry(draw(st.integers(0, 5_000_000)), draw(st.integers(1, 300)), draw(st.integers(1, 40)))
        for _ in range(requests)
    )
    return Traffic(
        arrivals=kind,  # type: ignore[arg-type]
        requests=requests,
        streams=draw(st.integers(1, 9)),
        think_us=draw(st.sampled_from((0, 50_000))),
        gap_us=gap,
        burst_size=draw(st.integers(1, 5)),
        prompt_tokens=prompt,
        output_tokens=output,
        trace=tuple(sorted(trace, key=lambda entry: entry.at_us)) if kind == "trace" else (),
        load_bytes_per_s=10**9,
    )


def scenario_of(problem: PlanningProblem, traffic: Traffic, events: tuple[ScenarioEvent, ...] = ()) -> Scenario:
    return Scenario("s", "", problem, traffic, events, Expectation())


def run(scenario: Scenario, *, seed: int = 0, skip_rounds: bool = True) -> Outcome:
    outcome = simulate(scenario, seed=seed, skip_rounds=skip_rounds)
    assert isinstance(outcome, Outcome), outcome
    return outcome


def promised(traffic: Traffic) -> int:
    return sum(entry.output_tokens for entry in traffic.trace) or traffic.requests * traffic.output_tokens


@settings(max_examples=60, deadline=None)
@given(problems(), traffics(), st.integers(0, 99))
def test_every_token_that_was_promised_is_delivered_once(problem: PlanningProblem, traffic: Traffic, seed: int) -> None:
    outcome = run(scenario_of(problem, traffic), seed=seed)
    assert (outcome.completed, outcome.failed) == (traffic.requests, 0)
    assert outcome.tokens == promised(traffic)


@settings(max_examples=60, deadline=None)
@given(problems(), traffics(), st.integers(0, 99))
def test_skipped_rounds_are_exactly_the_rounds_that_were_skipped(
    problem: PlanningProblem, traffic: Traffic, seed: int
) -> None:
    scenario = scenario_of(problem, replace(traffic, output_tokens=traffic.output_tokens + 60))
    fast, slow = run(scenario, seed=seed), run(scenario, seed=seed, skip_rounds=False)
    assert replace(fast, spans=()) == replace(slow, spans=())


@settings(max_examples=60, deadline=None)
@given(problems(), st.integers(2, 40))
def test_one_stream_alone_takes_the_planners_time_per_token(problem: PlanningProblem, tokens: int) -> None:
    answer = plan(problem)
    assert isinstance(answer, Plan)
    outcome = run(scenario_of(problem, Traffic(output_tokens=tokens, prompt_tokens=7)))
    assert outcome.tpot_us.p50 == answer.modeled.decode_tpot_us


@settings(max_examples=60, deadline=None)
@given(problems(), traffics(), st.integers(0, 99))
def test_no_schedule_beats_one_token_per_period(problem: PlanningProblem, traffic: Traffic, seed: int) -> None:
    answer = plan(problem)
    assert isinstance(answer, Plan)
    assert answer.modeled.pipelined_period_us is not None
    outcome = run(scenario_of(problem, traffic), seed=seed)
    assert outcome.tokens * answer.modeled.pipelined_period_us <= outcome.span_us


@settings(max_examples=60, deadline=None)
@given(problems(), traffics())
def test_shares_of_time_are_shares(problem: PlanningProblem, traffic: Traffic) -> None:
    for stage in run(scenario_of(problem, traffic)).stages:
        assert 0 <= stage.utilization <= 1
        assert 0 <= stage.bubble_share <= 1


@settings(max_examples=40, deadline=None)
@given(problems(least_nodes=2), st.integers(0, 10_000), st.integers(0, 10_000))
def test_a_slower_hop_never_makes_one_stream_faster(problem: PlanningProblem, per_hop: int, more: int) -> None:
    slow = replace(problem, calibration=replace(problem.calibration, per_hop_us=per_hop + more))
    fast = replace(problem, calibration=replace(problem.calibration, per_hop_us=per_hop))
    traffic = Traffic(output_tokens=9, prompt_tokens=5)
    before, after = run(scenario_of(fast, traffic)), run(scenario_of(slow, traffic))
    assert before.tpot_us.p50 is not None
    assert after.tpot_us.p50 is not None
    assert after.tpot_us.p50 - before.tpot_us.p50 == more * len(before.plan.hops)


@settings(max_examples=30, deadline=None)
@given(problems(least_nodes=2), st.integers(1, 11))
def test_cutting_a_stage_in_two_never_helps_one_stream(problem: PlanningProblem, at: int) -> None:
    """The same speed on both halves, so that only the extra hop and stage remain."""
    locked = problem.request.locked
    assert locked is not None
    layers = problem.model.layer_count
    at = 1 + at % (layers - 1)
    speed = problem.participants[0]
    nodes = (speed, replace(speed, node_id="b"))
    edges = tuple(edge for edge in problem.edges if {edge.source, edge.target} == {"a", "b"})
    whole = LockedTopology((LockedStage("a", 0, layers),))
    halves = LockedTopology((LockedStage("a", 0, at), LockedStage("b", at, layers)))
    traffic = Traffic(output_tokens=5, prompt_tokens=5)

    def tpot(lock: LockedTopology) -> int:
        changed = replace(problem, participants=nodes, edges=edges, request=replace(problem.request, locked=lock))
        value = run(scenario_of(changed, traffic)).tpot_us.p50
        assert value is not None
        return value

    assert tpot(halves) >= tpot(whole)


def test_in_steady_state_the_number_in_the_system_is_rate_times_time() -> None:
    rng = random.Random(5)
    for load in (0.3, 0.6, 0.85):
        node = Participant("a", 10**12, memory_bandwidth_bytes_per_s=10**11)
        model = ModelPackage("m", "0" * 64, (Layer(10**8, 10**8, 64),) * 8, 0, 0, 4_096, 0)
        problem = PlanningProblem(model, (node,), request=PlanRequest(parallel_lanes=1))
        service_us = run(scenario_of(problem, Traffic(prompt_tokens=32, output_tokens=20))).latency_us.p50
        assert service_us is not None
        traffic = Traffic("poisson", requests=4_000, gap_us=int(service_us / load), prompt_tokens=32, output_tokens=20)
        outcome = run(scenario_of(problem, traffic), seed=rng.randrange(10**6))
        arrival_rate = outcome.completed / outcome.span_us
        assert outcome.mean_in_system == pytest.approx(arrival_rate * outcome.mean_latency_us, rel=0.02)


@st.composite
def events(draw: st.DrawFn) -> ScenarioEvent:
    at, node = draw(st.integers(0, 20_000_000)), draw(st.sampled_from(NAMES[:3]))
    match draw(st.integers(0, 4)):
        case 0:
            return NodeDown(at, node)
        case 1:
            return NodeUp(at, node)
        case 2:
            return Straggler(at, node, draw(st.integers(200, 5_000)))
        case 3:
            return ColdStart(at, node, draw(st.sampled_from((None, 0, 500_000))))
        case _:
            source, target = draw(st.sampled_from((("a", "b"), ("b", "c"), ("c", "a"))))
            return LinkChange(at, source, target, draw(st.integers(0, 80_000)), None)


@settings(max_examples=60, deadline=None)
@given(problems(least_nodes=3), traffics(), st.lists(events(), max_size=8), st.booleans())
def test_whatever_happens_every_request_ends_exactly_once(
    problem: PlanningProblem, traffic: Traffic, happenings: list[ScenarioEvent], locked: bool
) -> None:
    if not locked:
        problem = replace(problem, request=replace(problem.request, locked=None))
    script = tuple(sorted(happenings, key=lambda event: event.at_us))
    outcome = run(scenario_of(problem, traffic, script))
    assert outcome.completed + outcome.failed == traffic.requests
    again = run(scenario_of(problem, traffic, script), skip_rounds=False)
    assert replace(outcome, spans=(), tokens_by_second={}) == replace(again, spans=(), tokens_by_second={})
    if not outcome.failed:
        assert outcome.tokens == promised(traffic)
