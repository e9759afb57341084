import json
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.planner.problem import Calibration
from coordinator.simulator.error_table import (
    BEGIN,
    END,
    EngineErrors,
    absolute_percentile,
    engine_errors,
    fitting_runs,
    markdown_table,
    unfitted,
)
from coordinator.simulator.field_runs import FieldRun, parse_runs, profile_for
from coordinator.simulator.fitting import Fit, UnderDetermined, fit_profile
from coordinator.simulator.hardware import Hardware
from coordinator.simulator.profiles import Profile, parse_profile, profile_text
from coordinator.simulator.run_prediction import layer_counts, predict, solo_runs
from coordinator.simulator.toml_table import ScenarioError
from stage_agent.cli.scenario_files import full_profiles, hardware_priors

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def runs() -> tuple[FieldRun, ...]:
    return parse_runs("field_runs.json", (ROOT / "config/calibrations/field_runs.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def profiles() -> dict[str, Profile]:
    return full_profiles()


@pytest.fixture(scope="module")
def hardware() -> Hardware:
    return hardware_priors()


@pytest.fixture(scope="module")
def engines(runs: tuple[FieldRun, ...], profiles: dict[str, Profile], hardware: Hardware) -> tuple[EngineErrors, ...]:
    return engine_errors(runs, profiles, hardware)


def by_id(runs: tuple[FieldRun, ...], run_id: str) -> FieldRun:
    return next(run for run in runs if run.id == run_id)


def test_predictions_of_runs_left_out_of_the_fit_stay_within_the_bar(engines: tuple[EngineErrors, ...]) -> None:
    errors = [error for engine in engines for error in engine.errors]
    assert len(errors) == 20
    assert absolute_percentile(errors, 50) <= 0.12
    assert absolute_percentile(errors, 90) <= 0.30


def test_every_run_that_fixes_its_inputs_is_scored_once(
    runs: tuple[FieldRun, ...], engines: tuple[EngineErrors, ...]
) -> None:
    scored = sorted(error.run.id for engine in engines for error in engine.errors)
    assert scored == sorted(run.id for run in runs if run.fully_determines_sim_input)


def test_the_published_table_is_what_the_runs_give(engines: tuple[EngineErrors, ...]) -> None:
    table = markdown_table(engines)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text[text.index(BEGIN) : text.index(END) + len(END)] == table


@pytest.mark.parametrize("name", ["ds4", "in-box", "llama-cpp-rpc", "petals"])
def test_the_shipped_profile_is_the_fit_of_the_shipped_runs(
    name: str, runs: tuple[FieldRun, ...], profiles: dict[str, Profile], hardware: Hardware
) -> None:
    profile = profiles[name]
    fit = fit_profile(fitting_runs(runs, name), unfitted(profile), profile.fit, hardware, known=runs)
    assert isinstance(fit, Fit)
    for field in ("per_layer_us", "per_stage_us", "per_hop_us", "rtt_multiplier_milli"):
        fitted, shipped = getattr(fit.calibration, field), getattr(profile.calibration, field)
        assert shipped == pytest.approx(fitted, rel=0.02, abs=3), field


@pytest.mark.parametrize("name", ["skippy", "llama-cpp-rpc", "llama-cpp-rpc-7", "exo-mlx", "ds4", "petals", "in-box"])
def test_every_profile_says_where_each_value_comes_from(name: str, profiles: dict[str, Profile]) -> None:
    profile = profiles[name]
    assert profile.calibration.name == name
    assert profile.derivations
    assert all(origin.derivation and origin.source for origin in profile.derivations.values())


def test_the_default_profile_is_the_planners_default(profiles: dict[str, Profile]) -> None:
    assert profiles["skippy"].calibration == Calibration()


def test_three_wifi_runs_with_the_same_round_trip_cannot_tell_hop_from_multiplier(
    runs: tuple[FieldRun, ...], profiles: dict[str, Profile], hardware: Hardware
) -> None:
    profile = profiles["skippy"]
    refused = fit_profile(fitting_runs(runs, "skippy"), unfitted(profile), profile.fit, hardware, known=runs)
    assert isinstance(refused, UnderDetermined)
    assert set(refused.parameters) == {"per_hop_overhead_ms", "rtt_multiplier"}
    assert "hold a parameter" in refused.message
    held = fit_profile(fitting_runs(runs, "skippy"), profile.calibration, ["per_hop_overhead_ms"], hardware, known=runs)
    assert isinstance(held, Fit)


def test_the_run_that_alone_fixes_a_parameter_has_full_leverage(
    runs: tuple[FieldRun, ...], profiles: dict[str, Profile], hardware: Hardware
) -> None:
    profile = profiles["ds4"]
    fit = fit_profile(fitting_runs(runs, "ds4"), unfitted(profile), profile.fit, hardware, known=runs)
    assert isinstance(fit, Fit)
    leverage = {error.run.id: error.leverage for error in fit.errors}
    assert leverage["ds4-wifi"] == pytest.approx(1.0, abs=0.01)
    assert leverage["ds4-tb5-8k"] == pytest.approx(0.5, abs=0.05)


def test_a_fit_recovers_the_engine_that_made_the_runs(
    runs: tuple[FieldRun, ...], profiles: dict[str, Profile], hardware: Hardware
) -> None:
    truth = replace(
        profiles["llama-cpp-rpc"].calibration, rtt_multiplier_milli=1_080, per_hop_us=3_300, per_stage_us=900
    )
    own = fitting_runs(runs, "llama-cpp-rpc")
    made = tuple(
        run.model_copy(
            update={"decode_tok_s_split": 1e6 / predict(run, truth, hardware, solo_runs(runs, without=run)).token_us}
        )
        for run in own
    )
    profile = profiles["llama-cpp-rpc"]
    fit = fit_profile(made, unfitted(profile), profile.fit, hardware, known=runs)
    assert isinstance(fit, Fit)
    assert fit.calibration.rtt_multiplier_milli == pytest.approx(1_080, rel=0.01)
    assert fit.calibration.per_hop_us == pytest.approx(3_300, rel=0.02)
    assert fit.calibration.per_stage_us == pytest.approx(900, rel=0.02)


def test_a_model_larger_than_the_memories_is_flagged_and_priced_from_disk(
    runs: tuple[FieldRun, ...], profiles: dict[str, Profile], hardware: Hardware
) -> None:
    run = by_id(runs, "prima-17")
    prediction = predict(run, profiles[run.profile_name].calibration, hardware)
    assert {"disk_bound", "does_not_fit"} <= set(prediction.flags)
    assert prediction.token_us == pytest.approx(run.measured_us, rel=0.3)


def test_nothing_that_ran_from_memory_is_flagged_as_disk_bound(
    runs: tuple[FieldRun, ...], profiles: dict[str, Profile], hardware: Hardware
) -> None:
    for run in runs:
        if run.id != "prima-17":
            assert "disk_bound" not in predict(run, profiles[run.profile_name].calibration, hardware).flags, run.id


def test_a_single_node_run_never_predicts_itself(runs: tuple[FieldRun, ...], hardware: Hardware) -> None:
    run = by_id(runs, "xj-8b-RTX3090-1")
    doubled = run.model_copy(update={"decode_tok_s_split": 2 * run.decode_tok_s_split, "decode_tok_s_solo": 223.48})  # type: ignore[operator]
    calibration = Calibration("c", per_hop_us=0)
    assert predict(run, calibration, hardware, solo_runs(runs, without=run)) == predict(
        doubled, calibration, hardware, solo_runs((doubled,), without=doubled)
    )


def test_shares_become_whole_layers_that_add_up(runs: tuple[FieldRun, ...]) -> None:
    assert layer_counts(by_id(runs, "genghis-naive")) == (16, 8, 4)
    assert layer_counts(by_id(runs, "ds4-wifi")) == (20, 23)
    for run in runs:
        assert sum(layer_counts(run)) == run.n_layers


def test_devices_are_found_by_their_words_and_stated_peaks_win(hardware: Hardware) -> None:
    assert hardware.device("Apple M4 (Mac mini)").name == "Apple M4"
    assert hardware.device("RPC0 = Metal M4 Max").name == "Apple M4 Max (40c)"
    assert hardware.device("NVIDIA GeForce RTX 3090 24GB").name == "RTX 3090"
    assert hardware.device("Raspberry Pi 5").name == "Raspberry Pi 5 / CM5"
    assert hardware.device("A100 80GB", 2_039_000_000_000).name == "A100 SXM 80GB"
    assert hardware.device("Apple M4 Max (32c)", 410_000_000_000).peak_bytes_per_s == 410_000_000_000
    assert hardware.device("toaster").family == "unknown"


def test_links_are_taken_for_what_their_description_says(hardware: Hardware) -> None:
    assert hardware.link("home Wi-Fi").rtt_us == 3_000
    assert hardware.link("Thunderbolt 5 IP").rtt_us == 450
    assert hardware.link("PCIe in one box").same_machine
    assert not hardware.link("home LAN").same_machine


@pytest.mark.parametrize(
    ("engine", "parallelism", "profile"),
    [
        ("llama.cpp RPC b6097 Vulkan", "PP", "llama-cpp-rpc"),
        ("llama.cpp RPC fork (mesh-llm)", "PP", "skippy"),
        ("llama.cpp May 2024, -sm layer, one box", "PP in-box", "in-box"),
        ("exo 1.0 (MLX ring)", "PP", "exo-mlx"),
        ("Petals", "PP", "petals"),
        ("ds4 (DwarfStar)", "PP", "ds4"),
        ("something new", "PP", "skippy"),
    ],
)
def test_an_engine_belongs_to_its_family(engine: str, parallelism: str, profile: str) -> None:
    assert profile_for(engine, parallelism) == profile


def two_nodes(first: dict[str, object], second: dict[str, object], **changed: object) -> str:
    row = {"id": "a", "engine": "llama.cpp RPC", "model_bytes": 10**10, "n_layers": 40, "nodes": [first, second],
           "decode_tok_s_split": 30}  # fmt: skip
    return json.dumps([{**row, **changed}])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not a JSON document"),
        ("[]", "needs a list"),
        ('{"rows": 3}', "needs a list"),
        ('[{"id": "a"}]', "rows[a].engine"),
        ('[{"id": "a", "engine": "e", "model_bytes": -1, "n_layers": 3, "nodes": [{}]}]', "rows[a].model_bytes"),
        ('[{"id": "a", "engine": "e", "model_bytes": 9, "n_layers": 3, "nodes": []}]', "rows[a].nodes"),
        (
            '[{"id": "a", "engine": "e", "model_bytes": 9, "n_layers": 3, "nodes": [{"share": NaN}]}]',
            "rows[a].nodes.0.share",
        ),
        ("[3]", "rows[0]: "),
        (two_nodes({"layers_half_open": [0, 30]}, {"layers_half_open": [20, 40]}), "layers 20 to 30 are on two nodes"),
        (two_nodes({"layers_half_open": [0, 10]}, {"layers_half_open": [20, 40]}), "layers 10 to 20 are on no node"),
        (two_nodes({"layers_half_open": [0, 10]}, {"layers_half_open": [10, 30]}), "layers 30 to 40 are on no node"),
        (two_nodes({"layers_half_open": [0, 10]}, {"layers_half_open": [10, 50]}), "the model has 40 layers"),
        (two_nodes({"layers_half_open": [20, 0]}, {"share": 0.5}), "rows[a].nodes.0.layers_half_open"),
        (two_nodes({}, {}, n_layers=1), "2 nodes cannot share 1 layers"),
        (two_nodes({}, {}, id="\x1b[31mred"), "cannot be shown"),
        (two_nodes({}, {}, decode_tok_s_split=1e-300), "decode_tok_s_split"),
        ("[" * 100_000, "not a JSON document"),
    ],
)
def test_a_wrong_run_file_names_row_and_key(text: str, words: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        parse_runs("runs.json", text)
    assert words in str(caught.value)


def test_a_fitted_profile_survives_being_written_and_read(profiles: dict[str, Profile]) -> None:
    profile = profiles["llama-cpp-rpc"]
    text = profile_text(profile, {"rtt_multiplier": 1.25}, 'fit of "runs"', "here")
    again = parse_profile("mine", text)
    assert again.calibration == replace(profile.calibration, name="mine", rtt_multiplier_milli=1_250)
    assert again.derivations["rtt_multiplier"].derivation == 'fit of "runs"'
    assert again.derivations["topology"] == profile.derivations["topology"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('about = "a"', "engine: is required"),
        ('engine = "e"\nabout = "a"\n[rtt_multiplier]\nvalue = 1', "a number without its origin"),
        ('engine = "e"\nabout = "a"\n[rtt_multiplier]\nvalue = -1\nderivation = "d"\nsource = "s"', "allowed is 0"),
        ('engine = "e"\nabout = "a"\nfit = ["speed"]', "not a parameter"),
        ('engine = "e"\nabout = "a"\n[speed]\nvalue = 1', "unknown key"),
    ],
)
def test_a_wrong_profile_says_what_is_missing(text: str, words: str) -> None:
    with pytest.raises(ScenarioError, match=r"engine\.toml") as caught:
        parse_profile("engine", text)
    assert words in str(caught.value)


def test_runs_are_shipped_as_published() -> None:
    document = json.loads((ROOT / "config/calibrations/field_runs.json").read_text(encoding="utf-8"))
    assert sum(1 for row in document["rows"] if row["fully_determines_sim_input"]) == 20
    assert all(row["source"] for row in document["rows"])


def test_null_is_absent_unsized_models_are_passed_over_and_tensor_parallel_runs_are_not_scored() -> None:
    row = {
        "id": "a", "engine": "exo", "model_bytes": 10**9, "n_layers": 10, "parallelism": "TP", "decode_tok_s_split": 9,
        "nodes": [{"device": None, "share": None}, {"device": "Apple M4"}], "link": {"type": None, "rtt_ms": None},
    }  # fmt: skip
    (run,) = parse_runs("r", json.dumps([row, {**row, "id": "b", "n_layers": None}]))
    assert (run.id, run.pipelined, run.scored) == ("a", False, False)
    (chained,) = parse_runs("r", json.dumps([{**row, "parallelism": "PP ring"}]))
    assert chained.scored
