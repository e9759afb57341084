"""Everything a node says about its own hardware: measured once, cached, or shaped by the settings."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from config.settings import ProbeSettings, Settings, ShapeSettings
from protocol.rows import DeviceFact
from stage_agent.probes.amd import amd_cards
from stage_agent.probes.apart import accelerators_apart, benchmark_apart
from stage_agent.probes.cache import load_accelerators, load_benchmark, store_accelerators, store_benchmark
from stage_agent.probes.child import BenchmarkFailed
from stage_agent.probes.devices import MAX_DEVICES, nvidia_devices
from stage_agent.probes.engine_bench import run_engine_bench
from stage_agent.probes.host import available_memory_bytes, detected_memory_bytes, processor_name
from stage_agent.probes.placement import layer_memory_bytes, may_use_cards, place_layers

Progress = Callable[[str, float], None]
"""``progress(what, fraction)``: what is measured now, and how much of everything is done."""

_ACCELERATORS_AT = 0.9
"""The share of the work after which accelerators are asked."""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """For the node's row. ``devices`` starts with the processor; accelerators follow.

    ``detected_memory_bytes`` is the memory of the devices that hold layers.
    """

    detected_memory_bytes: int
    available_memory_bytes: int
    memory_source: Literal["measured", "shaped"]
    devices: tuple[DeviceFact, ...]
    notes: tuple[str, ...] = ()
    """``benchmark_busy`` (others used the machine), ``benchmark_cache_suspected`` (buffer under four caches),
    ``benchmark_failed`` (no figures; ``failure`` is one line that says why)."""
    failure: str = ""
    conditions: dict[str, Any] | None = None
    """What the figures were measured under; ``None`` when nothing was."""


def measure_node(
    settings: Settings, cache_dir: Path, progress: Progress | None = None, *, fresh: bool = False
) -> NodeFacts:
    """Measure what the settings do not shape; blocks for about ``probe.budget_us``: run it in a thread.

    A cached result of the same conditions is used unless ``fresh``. A daemon lives without figures that could not be
    measured; ``fresh`` raises what went wrong. Figures that were measured while the machine was busy
    are reported and marked, but not cached.
    """
    shape = settings.shape
    tell = progress or (lambda _what, _fraction: None)
    speed = _Measured()
    cards = _Measured()
    if settings.probe.benchmark and (shape.memory_bandwidth_bytes_per_s is None or shape.compute_flops_per_s is None):
        speed = _measure_processor(settings.probe, cache_dir, tell, fresh=fresh)
        if shape.memory_bytes is None and (fresh or may_use_cards(settings) or settings.probe.engine_bench_model):
            tell("accelerators", _ACCELERATORS_AT)
            cards = _measure_accelerators(settings.probe, cache_dir, tell, fresh=fresh)
    memory = shape.memory_bytes if shape.memory_bytes is not None else detected_memory_bytes()
    processor = _processor(shape, speed.figures, speed.age_us, memory)
    accelerators = () if shape.memory_bytes is not None else _accelerators(cards)
    devices = place_layers((processor, *accelerators)[:MAX_DEVICES], settings)
    if "engine" in cards.figures and shape == ShapeSettings():
        devices = tuple(_as_the_engine_says(device, cards.figures["engine"], cards.age_us) for device in devices)
    tell("done", 1.0)
    failure = speed.failure or cards.failure
    return NodeFacts(
        detected_memory_bytes=layer_memory_bytes(devices),
        available_memory_bytes=min(memory, available_memory_bytes()),
        memory_source="measured" if shape.memory_bytes is None else "shaped",
        devices=devices,
        notes=(*(("benchmark_failed",) if failure else ()), *_notes(speed.figures, cards.figures)),
        failure=failure,
        conditions={**speed.figures, **cards.figures} or None,
    )


@dataclass(frozen=True, slots=True)
class _Measured:
    """Figures, how old they are, and why there are none."""

    figures: dict[str, Any] = field(default_factory=dict)
    age_us: int | None = None
    failure: str = ""


def _measure_processor(probe: ProbeSettings, cache_dir: Path, tell: Progress, *, fresh: bool) -> _Measured:
    """In a process of its own for the daemon; right here for ``stagemesh bench``, which shows how far it is and ends."""
    if fresh:
        from stage_agent.probes.benchmark import run_benchmark  # numpy, which the daemon never loads for this

        figures = run_benchmark(probe, tell)
    else:
        cached = load_benchmark(cache_dir, probe.max_age_us)
        if cached is not None:
            return _Measured(cached.figures, cached.age_us)
        tell("processor", 0.0)
        try:
            figures = benchmark_apart(probe)
        except BenchmarkFailed as error:
            return _Measured(failure=str(error))
    if not figures["busy"]:
        store_benchmark(cache_dir, figures)
    return _Measured(figures, 0)


def _measure_accelerators(probe: ProbeSettings, cache_dir: Path, tell: Progress, *, fresh: bool) -> _Measured:
    """Once for a daemon, with these cards: compiling for them takes seconds. The engine is only asked by ``bench``."""
    cached = None if fresh else load_accelerators(cache_dir, probe)
    if cached is not None:
        return _Measured(cached.figures, cached.age_us)
    try:
        figures = accelerators_apart(probe)
    except BenchmarkFailed as error:
        return _Measured(failure=str(error))
    if fresh and probe.engine_bench_model:
        tell("the engine's own benchmark", _ACCELERATORS_AT)
        figures["engine"] = asdict(run_engine_bench(probe))
    busy = any(trial["busy"] for trial in figures.get("opencl_trials", ()))
    if not busy and (fresh or not probe.engine_bench_model):
        store_accelerators(cache_dir, probe, figures)
    return _Measured(figures, 0)


def _processor(shape: ShapeSettings, figures: dict[str, Any], age_us: int | None, memory_bytes: int) -> DeviceFact:
    """The processor's fact; shaped figures win, and one shaped figure marks the whole device as shaped."""
    bandwidth = shape.memory_bandwidth_bytes_per_s or figures.get("memory_bandwidth_bytes_per_s")
    flops = shape.compute_flops_per_s or figures.get("compute_flops_per_s")
    shaped = shape.memory_bandwidth_bytes_per_s is not None or shape.compute_flops_per_s is not None
    source: Literal["measured", "shaped", "unknown"] = "shaped" if shaped else "measured" if figures else "unknown"
    return DeviceFact(
        name=processor_name()[:64],
        kind="cpu",
        memory_bytes=memory_bytes,
        memory_bandwidth_bytes_per_s=bandwidth,
        compute_flops_per_s=flops,
        source=source,
        measured_age_us=age_us if source == "measured" else None,
    )


def _accelerators(cards: _Measured) -> tuple[DeviceFact, ...]:
    """The vendors' own word on their cards, with OpenCL's figures where it measured the same one, then OpenCL's others."""
    measured = [
        DeviceFact.model_validate(fact | {"measured_age_us": cards.age_us}) for fact in cards.figures.get("opencl", ())
    ]
    boards = [(fact, {fact.name}) for fact in nvidia_devices()]
    boards += [(card.fact, {card.fact.name, card.graphics_version}) for card in amd_cards()]
    merged = []
    for fact, names in boards:
        match = next((other for other in measured if other.name.partition(":")[0] in names), None)
        if match is not None:
            measured.remove(match)
            merged.append(match.model_copy(update={"kind": fact.kind, "memory_bytes": fact.memory_bytes}))
        elif fact.kind != "rocm" or all(other.kind != "rocm" for other in measured):
            merged.append(fact)  # else it may be one that OpenCL knows by a name of its own: not counted twice
    return (*merged, *measured)


def _as_the_engine_says(device: DeviceFact, engine: dict[str, Any], age_us: int | None) -> DeviceFact:
    """The engine ran over all devices that hold layers, so each of them has the figures of the whole."""
    if not device.holds_layers:
        return device
    return device.model_copy(
        update={
            "memory_bandwidth_bytes_per_s": engine["memory_bandwidth_bytes_per_s"],
            "compute_flops_per_s": engine["compute_flops_per_s"],
            "source": "measured",
            "measured_age_us": age_us,
        }
    )


def _notes(speed: dict[str, Any], cards: dict[str, Any]) -> tuple[str, ...]:
    measured = [figures for figures in (speed, *cards.get("opencl_trials", ())) if figures]
    labels = []
    if any(figures.get("busy") for figures in measured):
        labels.append("benchmark_busy")
    if any(figures["buffer_bytes"] < 4 * figures["cache_bytes"] for figures in measured):
        labels.append("benchmark_cache_suspected")
    return tuple(labels)
