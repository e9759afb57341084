"""``plan``, ``explain``, ``simulate`` and ``calibrate`` as a person and a script see them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from protocol.errors import DaemonUnreachable, StagemeshError
from stage_agent.cli import calibrate, planning, simulate
from stage_agent.model_source import open_model
from tests.fixtures_model import gguf_bytes, metadata, tensors
from tests.unit.simulator.scenarios import CORPUS, PAIR

RUNS = Path(__file__).parents[3] / "config" / "calibrations" / "field_runs.json"

app = typer.Typer()
for module in (planning, simulate, calibrate):
    module.register(app)


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})


def corpus(name: str) -> Path:
    return CORPUS / f"{name}.toml"


@pytest.mark.parametrize(
    ("name", "code"),
    [("homogeneous-pair", 0), ("cross-continent-chain", 0), ("does-not-fit", 3), ("disk-bound-locked", 3)],
)
def test_plan_says_by_its_exit_code_how_it_went(name: str, code: int) -> None:
    assert invoke("plan", "--scenario", corpus(name)).exit_code == code
    assert invoke("plan", "--scenario", corpus(name), "--json").exit_code == code


def test_a_required_target_that_is_missed_is_exit_code_4(tmp_path: Path) -> None:
    text = (
        corpus("heterogeneous-pair-wifi").read_text().replace("[workload]", '[workload]\npolicy = "must_meet_target"')
    )
    scenario = tmp_path / "m.toml"
    scenario.write_text(text)
    result = invoke("plan", "--scenario", scenario, "--json")
    assert result.exit_code == 4
    assert json.loads(result.stdout)["error"]["code"] == "target_missed"


def test_json_is_exactly_one_document_with_the_documented_keys() -> None:
    document = json.loads(invoke("plan", "--scenario", corpus("heterogeneous-pair-wifi"), "--json").stdout)
    assert list(document) == [
        "plan_id", "schema_version", "model", "participant_set_hash", "context_length", "parallel_lanes", "objective",
        "calibration", "placement", "stages", "hops", "boundaries", "modeled", "target", "search", "diagnostics",
    ]  # fmt: skip
    assert document["calibration"] == "skippy"
    assert sum(stage["layer_end"] - stage["layer_start"] for stage in document["stages"]) == 40


def test_the_table_names_every_stage_hop_and_the_verdict() -> None:
    shown = invoke("plan", "--scenario", corpus("heterogeneous-pair-wifi")).stdout
    for part in (
        "m4max",
        "mini",
        "0–37",
        "38–39",
        "m4max → mini",
        "mini → m4max",
        "missed by",
        "proven optimal",
        "readout",
    ):
        assert part in shown


@pytest.mark.parametrize("width", [60, 76, 100, 118, 160])
def test_a_plan_fits_the_screen_without_breaking_a_word(width: int) -> None:
    arguments = ["plan", "--scenario", str(corpus("heterogeneous-pair-wifi"))]
    shown = CliRunner().invoke(app, arguments, env={"COLUMNS": str(width)}).stdout
    assert all(len(line) <= width for line in shown.splitlines())
    for word in ("m4max", "mini", "embedding", "memory_bandwidth_limited", "kv_state_costly_to_move", "measured"):
        assert word in shown
    bar = next(line for line in shown.splitlines() if "█▒" in line)
    assert bar.count("█") + bar.count("▒") == min(60, width - 16)


def test_a_rival_that_cannot_be_placed_says_why_on_a_line_of_its_own() -> None:
    shown = invoke("explain", "--scenario", corpus("heterogeneous-pair-wifi")).stdout
    assert "\nwithout m4max: no topology " in shown


@pytest.mark.parametrize("command", [("plan", "--scenario"), ("explain", "--scenario"), ("simulate",)])
def test_names_that_look_like_markup_are_shown_as_they_are(tmp_path: Path, command: tuple[str, ...]) -> None:
    scenario = tmp_path / "m.toml"
    named = PAIR.replace("[nodes.beta]", '[nodes."[/x]"]').replace("[nodes.alpha]", '[nodes."[red]:key:"]')
    scenario.write_text(named.replace("alpha", "[red]:key:").replace("beta", "[/x]"))
    result = invoke(*command, scenario)
    assert result.exception is None
    assert "[/x]" in result.stdout
    assert "[red]:key:" in result.stdout


def test_a_refusal_explains_itself_to_people() -> None:
    shown = invoke("plan", "--scenario", corpus("does-not-fit")).stdout
    assert "no_valid_topology" in shown
    assert "layers placeable" in shown


def test_explain_names_the_rivals_and_the_dearest_term() -> None:
    result = invoke("explain", "--scenario", corpus("leave-one-out-wins"))
    assert result.exit_code == 0
    for part in ("hop near1 -> near2", "same nodes, by memory", "without near1", "with big", "one node alone"):
        assert part in result.stdout
    document = json.loads(invoke("explain", "--scenario", corpus("leave-one-out-wins"), "--json").stdout)
    assert {rival["kind"] for rival in document["rivals"]} == {
        "memory_order", "without_node", "with_node", "single_node",
    }  # fmt: skip


def test_explain_takes_a_plan_that_was_made_before(tmp_path: Path) -> None:
    made = tmp_path / "plan.json"
    made.write_text(invoke("plan", "--scenario", corpus("homogeneous-pair"), "--json").stdout)
    result = invoke("explain", made, "--scenario", corpus("homogeneous-pair"))
    assert result.exit_code == 0
    made.write_text(made.read_text().replace('"stage_us": ', '"stage_us": 1000000000000000000000'))
    result = invoke("explain", made, "--scenario", corpus("homogeneous-pair"))
    assert isinstance(result.exception, StagemeshError)
    assert str(made) in str(result.exception)
    made.write_text("{}")
    result = invoke("explain", made, "--scenario", corpus("homogeneous-pair"))
    assert isinstance(result.exception, StagemeshError)
    assert "not a plan" in str(result.exception)


def test_a_mistake_in_the_file_is_one_line_with_exit_code_2(tmp_path: Path) -> None:
    scenario = tmp_path / "wrong.toml"
    scenario.write_text(PAIR.replace("rtt_ms = 4", "rtt = 4"))
    for command in (("plan", "--scenario"), ("explain", "--scenario"), ("simulate",)):
        error = invoke(*command, scenario).exception
        assert isinstance(error, StagemeshError)
        assert error.exit_code == 2
        assert str(error) == f'{scenario}:14: links."beta -> alpha".rtt: unknown key; did you mean "rtt_ms"?'


def test_a_model_path_is_looked_for_beside_the_scenario_and_a_missing_one_is_named(tmp_path: Path) -> None:
    scenario = tmp_path / "m.toml"
    scenario.write_text(PAIR[: PAIR.index("[model]")] + '[model]\npath = "absent.gguf"\n')
    error = invoke("plan", "--scenario", scenario).exception
    assert isinstance(error, StagemeshError)
    assert error.exit_code == 2
    assert str(error).startswith(f"{scenario}:17: model.path: ")
    assert str(tmp_path / "absent.gguf") in str(error)


def stagemesh(*arguments: str | Path, output: str | None = None, **environment: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the real command in a process of its own."""
    with Path(output or os.devnull).open("wb") as target:
        done = subprocess.run(
            [sys.executable, "-m", "stage_agent", *map(str, arguments)],
            stdout=target if output else subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **environment},
            check=False,
        )
    return done.returncode, (done.stdout or b"").decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace")


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_terminal_that_knows_only_ascii_gets_the_plan_all_the_same(tmp_path: Path, flags: list[str]) -> None:
    scenario = tmp_path / "m.toml"
    scenario.write_text(PAIR.replace("[nodes.beta]", '[nodes."bücher"]').replace("beta", "bücher"), encoding="utf-8")
    code, shown, said = stagemesh("plan", "--scenario", scenario, *flags, PYTHONIOENCODING="ascii")
    assert (code, said) == (0, "")
    if flags:
        assert json.loads(shown)["stages"][1]["node_id"] == "bücher"
    else:
        assert r"b\xfccher" in shown


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_full_disk_behind_stdout_is_one_line(flags: list[str]) -> None:
    code, _, said = stagemesh("plan", "--scenario", corpus("homogeneous-pair"), *flags, output="/dev/full")
    assert code == 1
    assert said.splitlines() == ["stagemesh: input or output failed: No space left on device"]


def test_a_traceback_is_shown_only_with_debug(tmp_path: Path) -> None:
    scenario = tmp_path / "wrong.toml"
    scenario.write_text("nodes = 3\n")
    code, _, said = stagemesh("plan", "--scenario", scenario)
    assert (code, len(said.splitlines())) == (2, 1)
    code, _, said = stagemesh("--debug", "plan", "--scenario", scenario)
    assert code == 2
    assert "Traceback" in said
    assert "ScenarioError" in said


def test_a_missing_file_says_so() -> None:
    error = invoke("plan", "--scenario", "nowhere.toml").exception
    assert isinstance(error, StagemeshError)
    assert "nowhere.toml: No such file" in str(error)


def test_a_directory_is_told_from_a_file() -> None:
    error = invoke("plan", "--scenario", CORPUS).exception
    assert isinstance(error, StagemeshError)
    assert str(error).endswith("is a directory; name a file in it")


def test_a_file_saved_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    scenario = tmp_path / "windows.toml"
    scenario.write_text("\ufeff" + PAIR.replace("\n", "\r\n"), encoding="utf-8")
    assert invoke("plan", "--scenario", scenario).exit_code == 0


def test_a_scenario_and_a_live_node_exclude_each_other() -> None:
    assert invoke("plan", "m.gguf", "--scenario", corpus("homogeneous-pair")).exit_code == 2
    assert invoke("plan", "m.gguf").exit_code == 2


def test_without_a_daemon_the_live_plan_is_unreachable() -> None:
    error = invoke("plan", "--node", "127.0.0.1:9").exception
    assert isinstance(error, DaemonUnreachable)
    assert error.exit_code == 5


def test_simulate_prints_one_document_and_the_same_for_the_same_seed() -> None:
    first = invoke("simulate", corpus("failure-cold-start"), "--json", "--seed", "3")
    assert first.exit_code == 0
    assert json.loads(first.stdout)["requests"] == {"completed": 40, "failed": 0}
    assert invoke("simulate", corpus("failure-cold-start"), "--json", "--seed", "3").stdout == first.stdout


def test_two_processes_with_other_hash_seeds_print_the_same_bytes() -> None:
    program = (
        "import sys, typer; from stage_agent.cli import simulate; app = typer.Typer(); simulate.register(app); "
        "app([sys.argv[1], '--json', '--seed', '5'], standalone_mode=False)"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program, str(corpus("failure-cold-start"))],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


def test_simulate_shows_latencies_stages_and_events() -> None:
    shown = invoke("simulate", corpus("failure-cold-start")).stdout
    for part in ("first token", "per token", "bubbles", "node_down", "replanned", "cold_start", "without service"):
        assert part in shown


def test_a_refused_scenario_is_refused_by_simulate_with_its_flags() -> None:
    result = invoke("simulate", corpus("does-not-fit"), "--json")
    assert result.exit_code == 3
    assert json.loads(result.stdout)["error"]["details"]["flags"] == ["does_not_fit"]


def test_planning_by_memory_alone_can_be_forced() -> None:
    document = json.loads(invoke("simulate", corpus("straggler-triplet"), "--json", "--force-capacity").stdout)
    assert document["plan"]["placement"] == "capacity_only"
    free = json.loads(invoke("simulate", corpus("straggler-triplet"), "--json").stdout)
    assert free["decode_tok_s_per_stream"] > 0


@pytest.mark.parametrize(("suffix", "magic"), [("svg", b"<?xml"), ("png", b"\x89PNG"), ("html", b"<!doctype html>")])
def test_a_plot_is_written_in_each_format_and_the_same_every_time(tmp_path: Path, suffix: str, magic: bytes) -> None:
    path = tmp_path / f"run.{suffix}"
    contents = set()
    for _ in range(2):
        result = invoke("simulate", corpus("anchor-2-nodes"), "--json", "--plot", path)
        assert result.exit_code == 0
        json.loads(result.stdout)
        contents.add(path.read_bytes())
    (content,) = contents
    assert content.startswith(magic)
    if suffix == "html":
        assert b"<svg" in content
        assert b"http-equiv" not in content
        assert b"<script" not in content


def test_an_unknown_plot_format_is_refused_before_the_run() -> None:
    error = invoke("simulate", corpus("anchor-2-nodes"), "--plot", "run.gif").exception
    assert isinstance(error, StagemeshError)
    assert ".svg, .png, .html" in str(error)


def test_calibrate_prints_the_error_of_every_run_and_who_pulls() -> None:
    result = invoke("calibrate", RUNS, "--profile", "ds4")
    assert result.exit_code == 0
    for part in ("ds4-wifi", "per_hop_overhead_ms", "1.00", "median error"):
        assert part in result.stdout


def test_calibrate_refuses_what_the_runs_do_not_determine() -> None:
    result = invoke("calibrate", RUNS, "--profile", "skippy", "--json")
    assert result.exit_code == 1
    (profile,) = json.loads(result.stdout)["profiles"]
    assert profile["undetermined"] == ["per_hop_overhead_ms", "rtt_multiplier"]
    held = invoke("calibrate", RUNS, "--profile", "skippy", "--hold", "rtt_multiplier")
    assert held.exit_code == 0


def test_calibrate_checks_the_shipped_profiles_without_fitting() -> None:
    result = invoke("calibrate", RUNS, "--check", "--json")
    assert result.exit_code == 0
    profiles = {one["profile"]: one for one in json.loads(result.stdout)["profiles"]}
    assert profiles["llama-cpp-rpc"]["median_absolute_error"] < 0.12
    flagged = [run["id"] for one in profiles.values() for run in one["runs"] if "disk_bound" in run["flags"]]
    assert flagged == ["prima-17"]


def test_a_table_of_runs_that_compare_with_nothing_is_refused(tmp_path: Path) -> None:
    runs = tmp_path / "runs.json"
    row = {"id": "a", "engine": "exo", "model_bytes": 10**9, "n_layers": 10, "nodes": [{"device": "Apple M4"}]}
    runs.write_text(json.dumps([row]))
    error = invoke("calibrate", runs, "--table").exception
    assert isinstance(error, StagemeshError)
    assert "decode_tok_s_split" in str(error)


def test_calibrate_writes_a_profile_that_can_be_read_again(tmp_path: Path) -> None:
    out = tmp_path / "mine.toml"
    assert invoke("calibrate", RUNS, "--profile", "petals", "--out", out).exit_code == 0
    text = out.read_text(encoding="utf-8")
    assert "[per_layer_overhead_us]" in text
    assert "least squares over 2 runs" in text


def test_calibrate_names_what_is_wrong_with_a_run_file(tmp_path: Path) -> None:
    runs = tmp_path / "runs.json"
    runs.write_text('[\n {"id": "x", "engine": "e", "model_bytes": 0, "n_layers": 1, "nodes": [{}]}\n]')
    error = invoke("calibrate", runs).exception
    assert isinstance(error, StagemeshError)
    assert str(error).startswith(f"{runs}:2: rows[x].model_bytes")
    assert isinstance(invoke("calibrate", RUNS, "--profile", "nope").exception, StagemeshError)


@pytest.mark.parametrize("option", ["--apply", "--reset"])
def test_what_is_for_live_runs_is_not_ignored_with_others(option: str) -> None:
    done = invoke("calibrate", RUNS, option)
    assert isinstance(done.exception, StagemeshError)
    assert "for live runs" in str(done.exception)


def test_a_cache_type_in_a_scenario_sizes_memory_as_the_setting_does(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(metadata(), tensors()))
    nodes = PAIR[: PAIR.index("[model]")]
    placed, cache_bytes = {}, {}
    for cache_type in ("f16", "q8_0"):
        scenario = tmp_path / f"{cache_type}.toml"
        scenario.write_text(nodes + f'[model]\npath = "m.gguf"\ncache_type = "{cache_type}"\n')
        placed[cache_type] = json.loads(invoke("simulate", scenario, "--json").stdout)["plan"]
        package = open_model(tmp_path / "m.gguf", cache_type=cache_type)
        cache_bytes[cache_type] = sum(layer.kv_bytes_per_token for layer in package.layers)
    assert (placed["f16"].get("cache_type"), placed["q8_0"]["cache_type"]) == (None, "q8_0")
    (wide,), (narrow,) = placed["f16"]["stages"], placed["q8_0"]["stages"]
    tokens = placed["f16"]["context_length"] * placed["f16"]["parallel_lanes"]
    saved = wide["required_bytes"] - narrow["required_bytes"]
    assert saved == pytest.approx((cache_bytes["f16"] - cache_bytes["q8_0"]) * tokens * 100 / 85, abs=8)
