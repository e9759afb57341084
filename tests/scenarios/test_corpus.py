"""Every file of the corpus says why it exists and is planned and executed as it expects."""

import itertools
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.planner.document import plan_document
from coordinator.planner.plan import Plan
from coordinator.planner.planning import plan
from coordinator.planner.problem import PlanningProblem
from coordinator.simulator.execution import simulate
from coordinator.simulator.outcome import Outcome
from coordinator.simulator.placement import place_scenario
from coordinator.simulator.scenario import Scenario, parse_scenario
from stage_agent.cli.scenario_files import engine_profiles, hardware_priors, load_scenario
from tests.unit.simulator.scenarios import no_model

CORPUS = sorted((Path(__file__).parent / "corpus").glob("*.toml"))
PROFILES = engine_profiles()
HARDWARE = hardware_priors()
FILES = pytest.mark.parametrize("path", CORPUS, ids=[path.stem for path in CORPUS])


def variant(name: str, *changes: tuple[str, str]) -> Scenario:
    text = (Path(__file__).parent / "corpus" / f"{name}.toml").read_text(encoding="utf-8")
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    return parse_scenario(name, text, profiles=PROFILES, open_model=no_model, hardware=HARDWARE)


def planned(scenario: Scenario) -> Plan:
    assert isinstance(scenario.problem, PlanningProblem)
    answer = plan(scenario.problem)
    assert isinstance(answer, Plan), answer
    return answer


def test_the_corpus_is_not_empty() -> None:
    assert len(CORPUS) >= 20


@FILES
def test_every_file_says_why(path: Path) -> None:
    document = tomllib.loads(path.read_text(encoding="utf-8"))
    assert len(document["why"]) > 40
    assert document["name"]
    assert document["expect"]


@FILES
def test_the_plan_is_as_the_file_expects(path: Path) -> None:
    assert place_scenario(load_scenario(path)).disappointments == ()


@FILES
def test_one_stream_in_the_simulator_takes_the_planners_time_per_token(path: Path) -> None:
    scenario = load_scenario(path)
    traffic = replace(scenario.traffic, arrivals="closed", requests=1, streams=1, output_tokens=32, trace=())
    outcome = simulate(replace(scenario, traffic=traffic, events=()))
    if not isinstance(outcome, Outcome) or outcome.plan.modeled.decode_tpot_us is None:
        return
    if "disk_bound" in outcome.flags:
        return
    assert outcome.tpot_us.p50 == pytest.approx(outcome.plan.modeled.decode_tpot_us, rel=0.01)
    assert outcome.ttft_us.p50 == pytest.approx(outcome.plan.modeled.ttft_us, rel=0.01)


@FILES
def test_no_run_delivers_more_than_one_token_per_period_or_loses_one(path: Path) -> None:
    scenario = load_scenario(path)
    traffic = replace(scenario.traffic, arrivals="closed", requests=24, streams=8, output_tokens=40, trace=())
    outcome = simulate(replace(scenario, traffic=traffic, events=()))
    if isinstance(outcome, Outcome):
        assert outcome.tokens == 24 * 40
        if outcome.plan.modeled.pipelined_period_us is not None and "disk_bound" not in outcome.flags:
            assert outcome.tokens_per_s <= 1e6 / outcome.plan.modeled.pipelined_period_us


@pytest.mark.parametrize("nodes", [3, 4, 5])
def test_every_millisecond_of_round_trip_is_paid_once_per_hop(nodes: int) -> None:
    times = [
        planned(variant(f"latency-sweep-{nodes}", ("rtt_ms = 0\n", f"rtt_ms = {rtt}\n"))).modeled.decode_tpot_us
        for rtt in range(0, 31, 5)
    ]
    assert all(time is not None for time in times)
    steps = [after - before for before, after in itertools.pairwise(times)]  # type: ignore[operator]
    assert steps == [5_000 * nodes] * 6


def test_more_hops_never_help_one_stream() -> None:
    for rtt in (0, 1, 10, 30):
        times = [
            planned(variant(f"latency-sweep-{nodes}", ("rtt_ms = 0\n", f"rtt_ms = {rtt}\n"))).modeled.decode_tpot_us
            for nodes in (3, 4, 5)
        ]
        assert times == sorted(times, key=lambda time: time or 0)
        assert len(set(times)) == 3


def test_a_free_planner_uses_fewer_nodes_as_latency_grows() -> None:
    counts = []
    for rtt in (0, 5, 30):
        text = (Path(__file__).parent / "corpus" / "latency-sweep-5.toml").read_text(encoding="utf-8")
        text = text[: text.index("[locked]")].replace("rtt_ms = 0\n", f"rtt_ms = {rtt}\n")
        scenario = parse_scenario("free", text, profiles=PROFILES, open_model=no_model)
        counts.append(len(planned(scenario).stages))
    assert counts == [2, 2, 2]


@pytest.mark.parametrize(
    ("samples", "first", "last", "placement"),
    [
        (1, 60, 1, "capacity_only"),
        (2, 4.9, 0, "capacity_only"),
        (2, 5, 0, "performance_aware"),
        (50, 600, 30, "performance_aware"),
        (50, 600, 31, "capacity_only"),
        (50, 3600, 900, "capacity_only"),
    ],
)
def test_trust_in_a_link_settles_and_decays_to_the_memory_only_plan(
    samples: int, first: float, last: float, placement: str
) -> None:
    scenario = variant(
        "stale-signals",
        ("rtt_samples = 1\n", f"rtt_samples = {samples}\n"),
        ("rtt_first_age_s = 1\n", f"rtt_first_age_s = {first}\n"),
        ("rtt_last_age_s = 1\n", f"rtt_last_age_s = {last}\n"),
    )
    assert planned(scenario).placement == placement


@pytest.mark.parametrize(
    ("samples", "age", "believed"), [(7, 1, False), (8, 1, True), (500, 120, True), (500, 121, False)]
)
def test_an_observed_timing_is_a_floor_only_while_it_is_fresh_and_backed(
    samples: int, age: int, believed: bool
) -> None:
    plain = planned(variant("homogeneous-pair"))
    loaded = variant(
        "homogeneous-pair",
        (
            "[nodes.b]\n",
            (
                f"observed_decode_us_per_layer = 5000\nobserved_decode_samples = {samples}\n"
                f"observed_decode_age_s = {age}\n[nodes.b]\n"
            ),
        ),
    )
    layers = {stage.node_id: stage.layer_end - stage.layer_start for stage in planned(loaded).stages}
    before = {stage.node_id: stage.layer_end - stage.layer_start for stage in plain.stages}
    if believed:
        assert layers["a"] < before["a"] or planned(loaded).modeled.decode_tpot_us != plain.modeled.decode_tpot_us
    else:
        assert layers == before


def test_a_busy_node_loses_layers_step_by_step() -> None:
    held = []
    for observed in (1, 650, 1_300, 2_600, 10_000):
        scenario = variant(
            "straggler-triplet",
            (
                "[nodes.box2]\n",
                f"observed_decode_us_per_layer = {observed}\nobserved_decode_samples = 100\n[nodes.box2]\n",
            ),
        )
        layers = {stage.node_id: stage.layer_end - stage.layer_start for stage in planned(scenario).stages}
        held.append(layers.get("box1", 0))
    assert held == sorted(held, reverse=True)
    assert held[0] > held[-1]


def test_without_signals_the_plan_is_the_kill_switchs_plan() -> None:
    bare = variant("capacity-only")
    switched = variant("capacity-only", ("parallel_lanes = 1", "parallel_lanes = 1\nperformance_aware = false"))
    ours, theirs = plan_document(planned(bare)), plan_document(planned(switched))
    for key in ("stages", "context_length", "parallel_lanes", "placement", "plan_id", "modeled"):
        assert ours[key] == theirs[key]
