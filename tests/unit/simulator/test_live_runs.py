"""What live plans say of nodes and engine: exact when they tell everything apart, honest when they do not."""

import json
import random
from dataclasses import replace

import pytest
import typer
from typer.testing import CliRunner

from coordinator.calibrated import HopCosts, with_costs
from coordinator.planner.document import plan_document, plan_from_document
from coordinator.planner.plan import Plan
from coordinator.planner.planning import plan
from coordinator.planner.problem import Calibration, LockedStage, LockedTopology
from coordinator.planner.readout import as_placed
from coordinator.simulator.live_runs import MIN_TOKENS, LiveRun, LiveStage, fit_live, parse_live_runs
from coordinator.simulator.toml_table import ScenarioError
from protocol.errors import ConfigurationError
from stage_agent.cli import calibrate
from stage_agent.cli.live_run import live_run
from stage_agent.node import load_calibration
from tests.unit.planner.builders import both, model, node, problem

PROFILE = Calibration(
    name="llama-cpp-rpc", per_stage_us=226, per_hop_us=5_100, rtt_multiplier_milli=1_536, topology="star"
)
RTT_US = {"fast": None, "middle": 2_700, "slow": 6_500}
TRUTH = {"fast": 1.1, "middle": 2.2, "slow": 4.0}
MULTIPLIER, HOP_US = 1.1, 300
CUTS = ((30, 0, 0), (15, 15, 0), (15, 0, 15), (22, 8, 0), (22, 0, 8), (10, 10, 10), (6, 8, 16))
US_PER_LAYER = 700


def run_of(cut, *, noise=0.0, seed=0, tokens=1_000) -> LiveRun:
    source = random.Random(f"{seed}{cut}")
    stages = tuple(
        LiveStage(node=name, layers=count, work_us=count * US_PER_LAYER, rtt_us=RTT_US[name])
        for name, count in zip(TRUTH, cut, strict=True)
        if count
    )
    hops = [stage.rtt_us for stage in stages if stage.rtt_us]
    overhead_us = PROFILE.per_stage_us * len(stages)
    measured_us = (
        sum(TRUTH[stage.node] * stage.work_us for stage in stages)
        + MULTIPLIER * sum(hops) + HOP_US * len(hops) + overhead_us
    )  # fmt: skip
    measured_us *= 1 + source.uniform(-noise, noise)
    return LiveRun(
        id=str(cut), profile="llama-cpp-rpc", stages=stages, predicted_us=30_000, measured_us=round(measured_us), tokens=tokens
    )  # fmt: skip


def test_plans_with_different_cuts_tell_nodes_and_hops_apart() -> None:
    fit = fit_live([run_of(cut) for cut in CUTS], PROFILE)
    for name, slowness in TRUTH.items():
        assert fit.slowness[name].after == pytest.approx(slowness, rel=0.05)
        assert fit.slowness[name].determined > 0.8
    assert fit.rtt_multiplier.after == pytest.approx(MULTIPLIER, abs=0.2)
    assert fit.per_hop_us.after == pytest.approx(HOP_US, abs=1_000)
    assert max(abs(after) for _, _, after in fit.errors) < 0.01


@pytest.mark.parametrize("seed", range(5))
def test_five_per_cent_of_noise_leaves_the_order_of_the_nodes_and_their_speeds_within_a_fifth(seed) -> None:
    fit = fit_live([run_of(cut, noise=0.05, seed=seed) for cut in CUTS], PROFILE)
    for name, slowness in TRUTH.items():
        assert fit.slowness[name].after == pytest.approx(slowness, rel=0.2)


def test_one_plan_explains_itself_but_decides_nothing_about_the_engine() -> None:
    fit = fit_live([run_of((10, 10, 10))], PROFILE)
    assert abs(fit.errors[0][2]) < 0.02
    assert fit.rtt_multiplier.determined < 0.4
    assert fit.per_hop_us.determined < 0.4
    assert fit.values == {}


def test_hops_of_one_round_trip_time_are_known_as_a_whole_and_both_parameters_are_given() -> None:
    alone = (LiveStage(node="fast", layers=30, work_us=700 * 30),)
    runs = [run_of((30, 0, 0)).model_copy(update={"stages": alone, "measured_us": 700 * 30 + PROFILE.per_stage_us})]
    for layers in (2, 8, 20):
        stages = (
            LiveStage(node="fast", layers=30 - layers, work_us=700 * (30 - layers)),
            LiveStage(node="slow", layers=layers, work_us=700 * layers, rtt_us=20_000),
        )
        measured_us = 700 * 30 + 1_100 * 20 + 4_000 + 2 * PROFILE.per_stage_us
        runs.append(run_of((30, 0, 0)).model_copy(update={"stages": stages, "measured_us": measured_us}))
    fit = fit_live(runs, PROFILE)
    assert fit.per_hop_us.determined < 0.4
    assert fit.hop_us.determined > 0.8
    assert fit.hop_us.after == pytest.approx(26_000, rel=0.05)
    told = fit.values["rtt_multiplier"] * 20_000 + fit.values["per_hop_overhead_ms"] * 1_000
    assert told == pytest.approx(26_000, rel=0.05)


BUSY_US = (25_271, 36_462, 60_047, 37_345, 64_564, 67_522, 64_843)
"""The plans of ``CUTS`` as they were measured on a machine with 27 processes waiting for two cores."""


def test_on_a_busy_machine_waiting_hops_do_not_make_the_slow_nodes_the_fast_ones() -> None:
    runs = []
    for cut, measured_us in zip(CUTS, BUSY_US, strict=True):
        stages = tuple(
            LiveStage(
                node=name, layers=count, work_us=count * 704 + (9_560 if name == "fast" else 0), rtt_us=RTT_US[name]
            )
            for name, count in zip(TRUTH, cut, strict=True)
            if count
        )
        runs.append(run_of(cut).model_copy(update={"stages": stages, "measured_us": measured_us}))
    fit = fit_live(runs, PROFILE)
    assert fit.rtt_multiplier.after <= 3.0
    assert min(each.after for each in fit.slowness.values()) >= 0.5
    assert fit.slowness["slow"].after > fit.slowness["fast"].after


def test_nothing_becomes_negative_however_fast_the_mesh_was() -> None:
    fast = [run_of(cut).model_copy(update={"measured_us": 1_000}) for cut in CUTS]
    fit = fit_live(fast, PROFILE)
    assert min(each.after for each in fit.slowness.values()) >= 0.5 - 1e-9
    assert fit.rtt_multiplier.after >= 0
    assert fit.per_hop_us.after >= 0


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("{", "not a JSON document"),
        ("[]", "needs a list"),
        ('{"live_runs": []}', "needs a list"),
        ('{"live_runs": [{"id": "x"}]}', "live_runs[0]"),
        ('{"live_runs": [{"id": "x", "profile": "p", "stages": [], "predicted_us": 1, "measured_us": 1, "tokens": 1}]}', "stages"),
    ],
)  # fmt: skip
def test_a_file_of_something_else_is_refused_by_row_and_key(text, word) -> None:
    with pytest.raises(ScenarioError) as caught:
        parse_live_runs("runs.json", text)
    assert word in str(caught.value)


def application() -> typer.Typer:
    app = typer.Typer()
    app.callback()(lambda: None)
    calibrate.register(app)
    return app


def kept(tmp_path, runs):
    file = tmp_path / "runs.json"
    file.write_text(json.dumps({"live_runs": [run.model_dump(mode="json") for run in runs]}))
    return file


def test_the_command_fits_kept_runs_and_writes_a_profile_that_the_planner_takes(tmp_path) -> None:
    file, out = kept(tmp_path, [run_of(cut) for cut in CUTS]), tmp_path / "home.toml"
    done = CliRunner().invoke(application(), ["calibrate", str(file), "--out", str(out), "--json"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert len(document["runs"]) == len(CUTS)
    calibration = load_calibration(str(out))
    assert calibration.name == "home"
    assert calibration.topology == "star"
    assert calibration.rtt_multiplier_milli == pytest.approx(1_000 * MULTIPLIER, abs=200)
    assert "slowness of slow" in CliRunner().invoke(application(), ["calibrate", str(file)]).stdout


def test_kept_runs_grow_by_plans_and_the_longer_run_of_a_plan_stays(tmp_path) -> None:
    together = tmp_path / "together.json"
    for name, runs in {
        "first": [run_of(CUTS[0], tokens=100)],
        "second": [run_of(CUTS[0], tokens=900), run_of(CUTS[1])],
        "third": [run_of(CUTS[0], tokens=200)],
    }.items():
        folder = tmp_path / name
        folder.mkdir()
        done = CliRunner().invoke(application(), ["calibrate", str(kept(folder, runs)), "--keep", str(together)])
        assert done.exit_code == 0, done.output
    held = parse_live_runs("together", together.read_text())
    assert [(run.id, run.tokens) for run in held] == [(str(CUTS[0]), 900), (str(CUTS[1]), 1_000)]


def test_plans_with_too_few_tokens_are_refused_with_what_to_do(tmp_path) -> None:
    done = CliRunner().invoke(
        application(), ["calibrate", str(kept(tmp_path, [run_of(CUTS[0], tokens=MIN_TOKENS - 1)]))]
    )
    assert done.exit_code != 0
    assert "send it some requests" in str(done.exception)


def test_a_profile_file_that_cannot_be_read_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"/no/such\.toml cannot be read"):
        load_calibration("/no/such.toml")


def star_plan() -> Plan:
    names = ("a", "b", "c")
    edges = [edge for x in names for y in names if x < y for edge in both(x, y)]
    question = problem([node(name, 40 * 10**9) for name in names], edges, package=model(30))
    answer = plan(replace(question, calibration=PROFILE))
    assert isinstance(answer, Plan), answer
    return answer


def test_a_plan_s_own_prediction_is_what_its_run_adds_up_to() -> None:
    found = star_plan()
    run = live_run(found, PROFILE, {}, measured_us=found.modeled.decode_tpot_us, tokens=100)
    fit = fit_live([run], PROFILE)
    assert abs(fit.errors[0][2]) < 0.01
    assert all(each.after == pytest.approx(1.0, abs=0.02) for each in fit.slowness.values())


def test_runs_under_a_calibrated_plan_start_from_the_benchmark_like_those_before() -> None:
    names = ("a", "b", "c")
    edges = [edge for x in names for y in names if x < y for edge in both(x, y)]
    nodes = [node(name, 40 * 10**9, calibrated_bytes_per_s=25 * 10**9 if name == "b" else None) for name in names]
    question = replace(problem(nodes, edges, package=model(30)), calibration=PROFILE)
    spans = (LockedStage("a", 0, 10), LockedStage("b", 10, 20), LockedStage("c", 20, 30))
    question = replace(question, request=replace(question.request, locked=LockedTopology(spans)))
    plain = plan(replace(question, participants=tuple(replace(each, calibrated_bytes_per_s=None) for each in nodes)))
    costs = HopCosts(rtt_multiplier_milli=1_100, per_hop_us=300, version=2)
    calibrated = plan(replace(question, calibration=with_costs(PROFILE, costs)))
    assert isinstance(plain, Plan)
    assert isinstance(calibrated, Plan)
    assert calibrated.calibration == "llama-cpp-rpc+live.2"
    assert plan_from_document(plan_document(calibrated)).stages[1].slowness_milli == 4_000
    before, after = (live_run(each, PROFILE, {}, measured_us=1_000_000, tokens=100) for each in (plain, calibrated))
    assert after.stages == before.stages
    assert after.extra_us == pytest.approx(before.extra_us, abs=4)
    assert after.predicted_us > 1.9 * before.predicted_us


def test_a_tied_output_layer_is_charged_to_the_head_of_a_star_once_and_to_nobody_s_last_stage() -> None:
    tied = replace(model(8), shared_first_bytes=1_000, shared_last_bytes=1_010, tied_embeddings=True)
    assert as_placed(tied, PROFILE).shared_last_bytes == 10
    assert as_placed(tied, PROFILE).shared_first_bytes == 1_000
    assert as_placed(tied, replace(PROFILE, topology="chain")) == tied
    untied = replace(tied, tied_embeddings=False)
    assert as_placed(untied, PROFILE) == untied
