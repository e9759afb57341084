"""What a node says of its hardware: measured for real within the budget, shaped when told so, cached when quiet."""

import json
import time
from pathlib import Path

import pytest

from config.settings import ProbeSettings, Settings, ShapeSettings
from stage_agent.probes import cache
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


def test_a_busy_result_is_used_and_marked_but_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    never_quiet = ProbeSettings(budget_us=150_000, busy_load_milli=0)
    monkeypatch.setattr("stage_agent.probes.trial.others_load_milli", lambda *_: 900)
    facts = measure_node(Settings(probe=never_quiet), tmp_path)
    assert "benchmark_busy" in facts.notes
    assert facts.devices[0].memory_bandwidth_bytes_per_s
    assert list(tmp_path.iterdir()) == []


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


def test_a_cache_directory_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    cache.store_benchmark(tmp_path / "file" / "below", {"figure": 1})
    assert cache.load_benchmark(tmp_path / "file" / "below", 10**12) is None
