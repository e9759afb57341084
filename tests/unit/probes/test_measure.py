"""What a node says of its hardware: measured for real within the budget, shaped when told so, cached when quiet."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from config.settings import ProbeSettings, RuntimeSettings, Settings, ShapeSettings
from stage_agent.probes import cache
from stage_agent.probes.benchmark import run_benchmark
from stage_agent.probes.measure import measure_node

QUICK = ProbeSettings(budget_us=300_000, busy_load_milli=1_000_000)
"""However busy the machine that runs the tests is, a run counts."""


def test_a_node_measures_itself_within_its_budget(tmp_path: Path) -> None:
    stages: list[tuple[str, float]] = []
    started = time.monotonic()
    facts = measure_node(Settings(probe=QUICK), tmp_path, lambda what, fraction: stages.append((what, fraction)))
    assert time.monotonic() - started < 5
    processor = facts.devices[0]
    assert (processor.kind, processor.source, processor.measured_age_us) == ("cpu", "measured", 0)
    assert 10**8 < (processor.memory_bandwidth_bytes_per_s or 0) < 10**13
    assert 10**8 < (processor.compute_flops_per_s or 0) < 10**14
    assert facts.detected_memory_bytes == processor.memory_bytes > 2**26
    assert facts.memory_source == "measured"
    assert [fraction for _, fraction in stages] == sorted(fraction for _, fraction in stages)
    assert stages[-1] == ("done", 1.0)


def test_a_restart_uses_the_cached_result_and_says_how_old_it_is(tmp_path: Path) -> None:
    first = measure_node(Settings(probe=QUICK), tmp_path)
    started = time.monotonic()
    second = measure_node(Settings(probe=QUICK), tmp_path)
    assert time.monotonic() - started < 0.25
    assert second.devices[0].memory_bandwidth_bytes_per_s == first.devices[0].memory_bandwidth_bytes_per_s
    assert (second.devices[0].measured_age_us or 0) > 0


def figures(**changes: object) -> dict[str, object]:
    """What the benchmark's process says."""
    return {
        "memory_bandwidth_bytes_per_s": 10**10, "compute_flops_per_s": 10**11, "buffer_bytes": 2**28,
        "cache_bytes": 2**25, "runs": 9, "others_load_milli": 0, "busy": False, **changes,
    }  # fmt: skip


def test_a_busy_result_is_used_and_marked_but_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stage_agent.probes.measure.benchmark_apart", lambda _: figures(busy=True))
    facts = measure_node(Settings(probe=QUICK), tmp_path)
    assert "benchmark_busy" in facts.notes
    assert facts.devices[0].memory_bandwidth_bytes_per_s
    assert not (tmp_path / "node_benchmark.json").exists()


def test_figures_of_a_machine_that_others_use_are_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stage_agent.probes.trial.others_load_milli", lambda *_: 900)
    never_quiet = ProbeSettings(budget_us=150_000, busy_load_milli=0)
    measured = run_benchmark(never_quiet, lambda _what, _fraction: None)
    assert measured["busy"]
    assert measured["others_load_milli"] == 900


def test_the_daemon_measures_in_another_process_and_keeps_neither_buffers_nor_numpy(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from config.settings import ProbeSettings, RuntimeSettings, Settings; "
        "from stage_agent.probes.measure import measure_node; "
        "probe = ProbeSettings(budget_us=300_000, busy_load_milli=1_000_000); "
        "facts = measure_node(Settings(probe=probe), Path(sys.argv[1])); "
        "import re; peak = re.search(r'VmHWM:\\s+([0-9]+)', Path('/proc/self/status').read_text())[1]; "
        "print(facts.devices[0].source, facts.conditions['buffer_bytes'], "
        "peak, 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    source, buffer_bytes, peak_kib, has_numpy = done.stdout.split()
    assert (source, has_numpy) == ("measured", "False")
    assert int(buffer_bytes) >= 2**24
    assert int(peak_kib) < 80_000


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import sys; sys.exit('no BLAS here')", "ended with 1: no BLAS here"),
        ("print('nothing of use')", "cannot be read"),
        ("import time; time.sleep(60)", "did not end within"),
    ],
)
def test_a_node_starts_without_figures_when_they_cannot_be_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, reason: str
) -> None:
    (tmp_path / "broken_benchmark.py").write_text(program)
    monkeypatch.setattr("stage_agent.probes.apart._PROGRAM", "broken_benchmark")
    monkeypatch.setattr("stage_agent.probes.apart._GRACE_S", 0.7)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    facts = measure_node(Settings(probe=QUICK), tmp_path / "cache")
    assert facts.notes == ("benchmark_failed",)
    assert reason in facts.failure
    assert (facts.devices[0].source, facts.devices[0].memory_bandwidth_bytes_per_s) == ("unknown", None)
    assert not (tmp_path / "cache").exists()  # nor did anybody ask for cards that this engine cannot use


def test_shaped_figures_win_are_marked_and_need_no_measurement(tmp_path: Path) -> None:
    shape = ShapeSettings(memory_bytes=8 * 10**9, memory_bandwidth_bytes_per_s=10**11, compute_flops_per_s=10**12)
    started = time.monotonic()
    facts = measure_node(Settings(shape=shape), tmp_path)
    assert time.monotonic() - started < 0.25
    device = facts.devices[0]
    assert (device.source, device.memory_bandwidth_bytes_per_s, device.compute_flops_per_s) == (
        "shaped",
        10**11,
        10**12,
    )
    assert (facts.memory_source, facts.detected_memory_bytes, device.memory_bytes) == ("shaped", 8 * 10**9, 8 * 10**9)
    assert device.measured_age_us is None


def test_shaped_memory_leaves_the_speed_measured(tmp_path: Path) -> None:
    facts = measure_node(Settings(probe=QUICK, shape=ShapeSettings(memory_bytes=8 * 10**9)), tmp_path)
    assert (facts.memory_source, facts.devices[0].source) == ("shaped", "measured")


def test_without_benchmarks_the_speed_is_unknown_not_zero(tmp_path: Path) -> None:
    facts = measure_node(Settings(probe=ProbeSettings(benchmark=False)), tmp_path)
    device = facts.devices[0]
    assert (device.source, device.memory_bandwidth_bytes_per_s, device.compute_flops_per_s) == ("unknown", None, None)
    assert facts.conditions is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"at_us": "x"}', b"\xff" * 100, b"9" * 100_000])
def test_a_broken_cache_only_costs_a_measurement(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "node_benchmark.json").write_bytes(content)
    assert cache.load_benchmark(tmp_path, 10**12) is None


def test_a_cached_result_of_other_conditions_or_too_old_is_not_used(tmp_path: Path) -> None:
    cache.store_benchmark(tmp_path, {"figure": 1})
    assert cache.load_benchmark(tmp_path, 10**12) is not None
    assert cache.load_benchmark(tmp_path, 0) is None
    path = tmp_path / "node_benchmark.json"
    document = json.loads(path.read_text())
    document["conditions"]["cores"] += 1
    path.write_text(json.dumps(document))
    assert cache.load_benchmark(tmp_path, 10**12) is None


def sees(root: Path, *cards: tuple[str, str, str]) -> dict[str, object]:
    """The conditions on a machine whose bus has these cards: class, vendor, device."""
    for number, words in enumerate(cards):
        device = root / "sys/bus/pci/devices" / f"0000:0{number}:00.0"
        device.mkdir(parents=True)
        for name, word in zip(("class", "vendor", "device"), words, strict=True):
            (device / name).write_text(word + "\n")
    return cache.accelerator_conditions(QUICK, root)


def test_figures_of_cards_hold_until_the_machine_has_other_cards(tmp_path: Path) -> None:
    radeon, network = ("0x030000", "0x1002", "0x744c"), ("0x020000", "0x8086", "0x1")
    first = sees(tmp_path / "a", radeon, network)
    assert first["display_devices"] == ["0x1002:0x744c"]
    assert sees(tmp_path / "b", network, radeon) == first
    assert sees(tmp_path / "c", radeon, radeon) != first
    assert sees(tmp_path / "d", network) != first


def test_figures_of_cards_outlive_a_day_and_a_restart_of_the_machine(tmp_path: Path) -> None:
    cache.store_accelerators(tmp_path, QUICK, {"opencl": []})
    assert cache.load_accelerators(tmp_path, QUICK) is not None
    path = tmp_path / "accelerators.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"machine_start": "another", "at_us": 10**18}))
    kept = cache.load_accelerators(tmp_path, QUICK)
    assert (kept and kept.figures, kept and kept.age_us) == ({"opencl": []}, None)
    other = QUICK.model_copy(update={"engine_bench_model": "m.gguf"})
    assert cache.load_accelerators(tmp_path, other) is None


def test_a_card_measured_once_holds_the_layers_at_every_start(tmp_path: Path) -> None:
    card = {
        "name": "Radeon", "kind": "rocm", "memory_bytes": 24 * 10**9, "memory_bandwidth_bytes_per_s": 8 * 10**11,
        "compute_flops_per_s": 5 * 10**13, "source": "measured",
    }  # fmt: skip
    cache.store_accelerators(tmp_path, QUICK, {"opencl": [card]})
    facts = measure_node(Settings(probe=QUICK, runtime=RuntimeSettings(kind="llama_cpp")), tmp_path)
    assert facts.detected_memory_bytes == 24 * 10**9
    assert [(each.kind, each.holds_layers) for each in facts.devices] == [("cpu", False), ("rocm", True)]
    assert measure_node(Settings(probe=QUICK), tmp_path).detected_memory_bytes != 24 * 10**9


def test_a_driver_that_crashes_leaves_the_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyopencl", reason="without it no driver is asked")
    (tmp_path / "crash.py").write_text("import os; os.abort()")
    monkeypatch.setattr("stage_agent.probes.apart._ACCELERATORS_PROGRAM", "crash")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    settings = Settings(probe=QUICK, runtime=RuntimeSettings(kind="llama_cpp"))
    facts = measure_node(settings, tmp_path / "cache")
    assert (facts.devices[0].source, "-6" in facts.failure) == ("measured", True)


def test_a_cache_directory_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    cache.store_benchmark(tmp_path / "file" / "below", {"figure": 1})
    assert cache.load_benchmark(tmp_path / "file" / "below", 10**12) is None
