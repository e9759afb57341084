"""The engine's own benchmark: its figures win where layers lie; whatever goes wrong is one clear line."""

import json
import sys
from pathlib import Path

import pytest

from config.errors import StagemeshError
from config.settings import ProbeSettings, Settings, ShapeSettings
from stage_agent.probes.engine_bench import run_engine_bench
from stage_agent.probes.measure import measure_node

ROWS = [
    {"n_prompt": 512, "n_gen": 0, "avg_ts": 1_000.5, "model_size": 4_000_000, "model_n_params": 8_000_000},
    {
        "n_prompt": 0, "n_gen": 32, "avg_ts": 100.25, "model_size": 4_000_000, "model_n_params": 8_000_000,
        "build_number": 9001, "backends": "CUDA",
    },
]  # fmt: skip


def stand_in(tmp_path: Path, body: str) -> ProbeSettings:
    """A program that behaves like the engine's benchmark."""
    program = tmp_path / "bench"
    program.write_text(f"#!{sys.executable}\nimport json, sys, time\n{body}\n")
    program.chmod(0o755)
    return ProbeSettings(engine_bench=str(program), engine_bench_model="tiny.gguf", budget_us=200_000)


def says(tmp_path: Path, rows: object) -> ProbeSettings:
    return stand_in(tmp_path, f"print({json.dumps(rows)!r})")


def test_decoding_gives_the_bandwidth_and_a_prompt_the_compute(tmp_path: Path) -> None:
    figures = run_engine_bench(says(tmp_path, ROWS))
    assert figures.memory_bandwidth_bytes_per_s == 401_000_000
    assert figures.compute_flops_per_s == 16_008_000_000
    assert figures.engine == "llama-bench 9001 CUDA"


def test_the_program_is_asked_for_both_and_for_json(tmp_path: Path) -> None:
    probe = stand_in(tmp_path, "open(sys.argv[0] + '.asked', 'w').write(' '.join(sys.argv[1:])); sys.exit(3)")
    with pytest.raises(StagemeshError):
        run_engine_bench(probe)
    assert (tmp_path / "bench.asked").read_text() == "-m tiny.gguf -o json -p 512 -n 32"


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("sys.stderr.write('one\\nno such model\\n'); sys.exit(2)", "ended with 2: no such model"),
        ("sys.exit(2)", "it said nothing"),
        ("print('llama_print_timings')", "no usable figures"),
        ("print('[]')", "no usable figures"),
        ("print('7')", "no usable figures"),
        (f"print({json.dumps(ROWS[:1])!r})", "no usable figures"),
        (f"print({json.dumps([ROWS[0], ROWS[1] | {'avg_ts': -1}])!r})", "no usable figures"),
        (f"print({json.dumps([ROWS[0], ROWS[1] | {'avg_ts': 1e300}])!r})", "no usable figures"),
        ("print('x' * 5_000_000)", "no usable figures"),
    ],
)
def test_a_benchmark_without_figures_is_one_clear_line(tmp_path: Path, body: str, sentence: str) -> None:
    with pytest.raises(StagemeshError, match=sentence) as caught:
        run_engine_bench(stand_in(tmp_path, body))
    assert "\n" not in str(caught.value)


def test_a_missing_program_names_the_setting(tmp_path: Path) -> None:
    probe = ProbeSettings(engine_bench=str(tmp_path / "nothing"), engine_bench_model="m")
    with pytest.raises(StagemeshError, match="engine_bench"):
        run_engine_bench(probe)


def test_the_engines_figures_win_where_the_layers_are(tmp_path: Path) -> None:
    settings = Settings(probe=says(tmp_path, ROWS).model_copy(update={"busy_load_milli": 1_000_000}))
    (device,) = (each for each in measure_node(settings, tmp_path, fresh=True).devices if each.holds_layers)
    assert (device.memory_bandwidth_bytes_per_s, device.source) == (401_000_000, "measured")
    (again,) = (each for each in measure_node(settings, tmp_path).devices if each.holds_layers)
    assert (again.memory_bandwidth_bytes_per_s, (again.measured_age_us or 0) > 0) == (401_000_000, True)


def test_shaped_figures_still_win_over_the_engine(tmp_path: Path) -> None:
    shape = ShapeSettings(memory_bandwidth_bytes_per_s=5)
    probe = says(tmp_path, ROWS).model_copy(update={"busy_load_milli": 1_000_000})
    device = measure_node(Settings(probe=probe, shape=shape), tmp_path, fresh=True).devices[0]
    assert (device.memory_bandwidth_bytes_per_s, device.source) == (5, "shaped")
