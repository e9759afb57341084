"""Predict a published run with the planner's own cost model, from what the run states and nothing of its result.

Theory of operation. A run becomes a planning problem: equal layers, the stated split, one bandwidth per node. Where the
whole model was measured on the run's first device (a *solo* run), that is its speed, less the overhead that the profile
adds back for one stage; other devices scale by their memory bandwidth. A run on a single node has no other measurement
than its own result, so its solo figure is never used on itself. Without any solo run the device prior stands in.
Hops inside one machine are not network hops: they cost their round trip (an injected delay, for instance), but not the
profile's per-hop overhead. A node whose share exceeds its memory reads from disk and is flagged.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from coordinator.model.package import Layer, ModelPackage
from coordinator.planner.cost import stage_times
from coordinator.planner.network import Network, network_of
from coordinator.planner.problem import Calibration, Edge, Participant, PlanningProblem
from coordinator.planner.trust import trusted_signals
from coordinator.simulator.field_runs import FieldRun, RunNode
from coordinator.simulator.hardware import BYTES_PER_GB, UNKNOWN_DEVICE, Device, Hardware
from coordinator.simulator.units import BYTES_PER_S_PER_GBIT, ceil_div

HEAD = "client"
DISK_BYTES_PER_S = 1_000_000_000
LEAST_SOLO_SHARE = 0.5
"""However large the profile's overheads, half of a solo run is taken to be the device's work."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """µs per token, and what had to be said about the run."""

    token_us: float
    flags: tuple[str, ...]
    basis: str
    """``solo``: speeds from a measured solo run. ``spec``: from device priors."""


@dataclass(frozen=True, slots=True)
class Solo:
    """The whole model measured on one device."""

    model_bytes: int
    n_layers: int
    device: str
    tok_s: float


def solo_runs(runs: Iterable[FieldRun], *, without: FieldRun | None = None) -> tuple[Solo, ...]:
    """Every solo measurement that ``runs`` state, except those that are ``without``'s own result."""
    found: list[Solo] = []
    for run in runs:
        tok_s = run.nodes[0].solo_tok_s or run.decode_tok_s_solo
        if tok_s is None or (len(run.nodes) == 1 and run.remote_head):
            continue
        own = without is not None and len(without.nodes) == 1 and without.decode_tok_s_split == tok_s
        if not own:
            found.append(Solo(run.model_bytes, run.n_layers, run.nodes[0].device, tok_s))
    return tuple(found)


def predict(run: FieldRun, calibration: Calibration, hardware: Hardware, solos: tuple[Solo, ...] = ()) -> Prediction:
    """Time per token of ``run`` under ``calibration``. ``solos`` are solo runs of other rows."""
    layers = layer_counts(run)
    model = _model(run)
    link = hardware.link(run.link.type)
    if link.same_machine:
        calibration = replace(calibration, per_hop_us=0)
    devices = tuple(hardware.device(node.device, _peak(node)) for node in run.nodes)
    work_us, basis, flags = _work_us(run, model, devices, calibration, solos)
    names = tuple(f"n{index}" for index in range(len(run.nodes)))
    rtt_us = link.rtt_us if run.link.rtt_ms is None else round(run.link.rtt_ms * 1_000)
    problem = PlanningProblem(model, _participants(model, names, work_us), _edges(run, names, rtt_us), calibration)
    signals = trusted_signals(problem)
    times = {signals.nodes[name]: stage_times(model, signals.nodes[name], calibration) for name in names}
    total, start = 0, 0
    for name, count in zip(names, layers, strict=True):
        known = times[signals.nodes[name]]
        assert known is not None
        total += known.stage_us(start, start + count)
        start += count
    network = network_of(model, signals, calibration, "allow_fallback")
    total += _network_us(run, network, names)
    disk_us, disk_flags = _disk(run, devices, layers)
    return Prediction(float(total + disk_us), tuple(sorted({*flags, *disk_flags})), basis)


def layer_counts(run: FieldRun) -> tuple[int, ...]:
    """Layers per node: as stated, else the shares (else the memory) to the nearest whole split, at least one each."""
    if all(node.layers_half_open is not None for node in run.nodes):
        return tuple(node.layers_half_open[1] - node.layers_half_open[0] for node in run.nodes if node.layers_half_open)
    weights = [node.share for node in run.nodes]
    if any(share is None for share in weights):
        weights = [node.memory_gb for node in run.nodes]
    if any(weight is None for weight in weights):
        weights = [1.0] * len(run.nodes)
    total = sum(weight or 0.0 for weight in weights)
    exact = [run.n_layers * (weight or 0.0) / total for weight in weights]
    counts = [max(1, int(value)) for value in exact]
    order = sorted(range(len(exact)), key=lambda index: (counts[index] - exact[index], index))
    for step in range(run.n_layers - sum(counts)):
        counts[order[step % len(order)]] += 1
    return tuple(counts)


def _model(run: FieldRun) -> ModelPackage:
    size = ceil_div(run.model_bytes, run.n_layers)
    return ModelPackage(
        name=run.model,
        digest="",
        layers=(Layer(size, size, kv_bytes_per_token=1),) * run.n_layers,
        shared_first_bytes=0,
        shared_last_bytes=0,
        native_context_length=4_096,
        activation_frame_bytes=run.activation_bytes_decode or 0,
    )


def _peak(node: RunNode) -> int | None:
    return None if node.mem_bandwidth_gb_s is None else int(node.mem_bandwidth_gb_s * BYTES_PER_GB)


def _participants(model: ModelPackage, names: tuple[str, ...], work_us: tuple[int, ...]) -> tuple[Participant, ...]:
    """Nodes whose bandwidth makes the whole model take ``work_us``."""
    nodes = [
        Participant(name, 2**50, memory_bandwidth_bytes_per_s=max(1, model.weight_bytes * 1_000_000 // max(1, work)))
        for name, work in zip(names, work_us, strict=True)
    ]
    return (*nodes, Participant(HEAD, 2**50))


def _edges(run: FieldRun, names: tuple[str, ...], rtt_us: int) -> tuple[Edge, ...]:
    rate = run.link.bandwidth_gbit_s
    bytes_per_s = None if rate is None else max(1, int(rate * BYTES_PER_S_PER_GBIT))
    ends = (HEAD, *names)
    return tuple(Edge(a, b, rtt_us, large_frame_bytes_per_s=bytes_per_s) for a in ends for b in ends if a != b)


def _network_us(run: FieldRun, network: Network, names: tuple[str, ...]) -> int:
    nodes = (HEAD, *names) if run.remote_head else names
    return sum(hop.hop_us or 0 for hop in network.hops(nodes))


def _work_us(
    run: FieldRun, model: ModelPackage, devices: tuple[Device, ...], calibration: Calibration, solos: tuple[Solo, ...]
) -> tuple[tuple[int, ...], str, list[str]]:
    """The whole model on each node without the profile's overheads, what it rests on, and flags.

    The cost model divides by the profile's bandwidth efficiency. A solo run has paid it already, so measured work is
    multiplied by it here; a device prior has not.
    """
    overhead = calibration.per_stage_us + calibration.kv_touch_us + calibration.per_layer_us * run.n_layers
    several = len(run.nodes) > 1

    def bare(tok_s: float) -> int:
        least = LEAST_SOLO_SHARE * 1e6 / tok_s
        return round(max(1e6 / tok_s - overhead, least) * calibration.bandwidth_efficiency_milli / 1_000)

    first = _solo_of_first(run, solos)
    flags: list[str] = []
    work: list[int] = []
    for node, device in zip(run.nodes, devices, strict=True):
        if several and node.solo_tok_s is not None:
            work.append(bare(node.solo_tok_s))
        elif device.peak_bytes_per_s == UNKNOWN_DEVICE.peak_bytes_per_s and work:
            flags.append("assumed_speed")
            work.append(work[0])
        elif first is not None:
            work.append(bare(first) * devices[0].peak_bytes_per_s // device.peak_bytes_per_s)
        else:
            work.append(device.token_us(model.weight_bytes, run.n_layers))
    measured = first is not None or (several and all(node.solo_tok_s is not None for node in run.nodes))
    return tuple(work), "solo" if measured else "spec", flags


def _solo_of_first(run: FieldRun, solos: tuple[Solo, ...]) -> float | None:
    if len(run.nodes) == 1:
        return None
    own = run.nodes[0].solo_tok_s or run.decode_tok_s_solo
    if own is not None:
        return own
    wanted = (run.model_bytes, run.n_layers, run.nodes[0].device)
    return next((solo.tok_s for solo in solos if (solo.model_bytes, solo.n_layers, solo.device) == wanted), None)


def _disk(run: FieldRun, devices: tuple[Device, ...], layers: tuple[int, ...]) -> tuple[int, list[str]]:
    """Reading from disk what does not fit: a stage larger than its memory is read again for every token."""
    usable = [
        None if node.memory_gb is None else int(node.memory_gb * BYTES_PER_GB) * device.usable_milli // 1_000
        for node, device in zip(run.nodes, devices, strict=True)
    ]
    held = [run.model_bytes * count // run.n_layers for count in layers]
    over = [size for size, room in zip(held, usable, strict=True) if room is not None and size > room]
    flags = ["disk_bound"] if over else []
    known = [room for room in usable if room is not None]
    if len(known) == len(usable) and run.model_bytes > sum(known):
        flags.append("does_not_fit")
    return sum(over) * 1_000_000 // DISK_BYTES_PER_S, flags
