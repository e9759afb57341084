"""A scenario file becomes a ``Scenario``: a planning problem, the traffic on it, and what happens meanwhile.

Theory of operation. One pass from TOML to frozen values. Units (MiB/s, GFLOP/s, ms) are converted here and nowhere
else. What the *planner* must judge (no layers, a context above native, zero lanes) passes through as it was written or
becomes the planner's own refusal; what no planner could make sense of (unknown keys, links between unknown nodes,
overlapping locked ranges, NaN) is a ``ScenarioError`` with file, key and line. Files are not opened here: a model named
by path and the engine profiles are handed in by the caller.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal

from coordinator.model.package import ModelPackage
from coordinator.planner.plan import PlanRefused
from coordinator.planner.problem import Calibration, Edge, Participant, PlanningProblem, PlanRequest
from coordinator.simulator.hardware import Hardware
from coordinator.simulator.scenario_calibration import read_calibration
from coordinator.simulator.scenario_events import ScenarioEvent, read_events
from coordinator.simulator.scenario_expectation import Expectation, read_expectation
from coordinator.simulator.scenario_links import read_links
from coordinator.simulator.scenario_model import ModelOpener, read_model
from coordinator.simulator.scenario_priors import Unmeasured, with_speeds
from coordinator.simulator.scenario_workload import Traffic, read_locked, read_request, read_traffic
from coordinator.simulator.toml_table import ScenarioError, Table, parse_toml
from coordinator.simulator.units import BYTES_PER_MIB, FLOPS_PER_GFLOP, US_PER_S, ceil_us, floor_rate

__all__ = ["Scenario", "ScenarioError", "parse_scenario"]

MAX_NODES = 1_024
LEAST_SOLO_TOK_S = Decimal("0.000001")


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything a file says. ``problem`` is the refusal itself when the file withholds a required fact."""

    name: str
    why: str
    problem: PlanningProblem | PlanRefused
    traffic: Traffic
    events: tuple[ScenarioEvent, ...]
    expectation: Expectation


def parse_scenario(
    name: str,
    text: str,
    *,
    profiles: Mapping[str, Calibration],
    open_model: ModelOpener,
    default_request: PlanRequest | None = None,
    hardware: Hardware | None = None,
) -> Scenario:
    """Read ``text``; ``name`` is how the file is called in errors.

    ``profiles`` are the engine profiles by name; ``open_model`` reads a model named by ``[model] path`` and may raise
    ``ModelError``. ``default_request`` supplies what ``[workload]`` leaves out, ``hardware`` the speed of nodes that
    name a ``device`` and no bandwidth of their own.

    Raises:
        ScenarioError: with file, key and line.
    """
    root = parse_toml(name, text)
    if strays := [key for key in root if "->" in key]:
        root.fail(strays[0], f'a link belongs under [links."{strays[0]}"]')
    unmeasured: dict[str, Unmeasured] = {}
    nodes = _read_nodes(root.table("nodes"), hardware or Hardware(), unmeasured)
    known = frozenset(nodes)
    edges = read_links(root.table("links"), known)
    model_table = root.table("model")
    model, kv_cache = read_model(model_table, open_model)
    calibration = read_calibration(root.table("calibration"), model_table, profiles)
    workload = root.table("workload")
    request = read_request(workload, default_request or PlanRequest(), known)
    if kv_cache is not None:
        request = replace(request, kv_cache=kv_cache)
    traffic = read_traffic(workload, request)
    layer_count = model.layer_count if isinstance(model, ModelPackage) else None
    locked = read_locked(root.table("locked"), known, layer_count)
    events = read_events(root.tables("events", limit=10_000), known)
    expectation = read_expectation(root.table("expect"), known)
    title, why = root.text("name") or name, root.text("why") or ""
    for section in (model_table, workload):
        if section is not None:
            section.finish()
    root.finish()
    if isinstance(model, ModelPackage):
        nodes = with_speeds(nodes, unmeasured, model, calibration)
    participants = _with_legacy_latency(nodes.values(), edges)
    problem: PlanningProblem | PlanRefused
    if isinstance(model, PlanRefused):
        problem = model
    elif not participants:
        problem = PlanRefused("missing_nodes", "the scenario has no [nodes.<id>] table: nothing can hold the model")
    else:
        problem = PlanningProblem(model, participants, edges, calibration, replace(request, locked=locked))
    return Scenario(title, why, problem, traffic, events, expectation)


def _read_nodes(table: Table | None, hardware: Hardware, unmeasured: dict[str, Unmeasured]) -> dict[str, Participant]:
    """The nodes by id. ``unmeasured`` receives those that state no bandwidth, but a device or a solo run."""
    nodes: dict[str, Participant] = {}
    for node_id in table or ():
        assert table is not None
        if "->" in node_id:
            table.fail(node_id, f'a link belongs under [links."{node_id}"]')
        if not node_id or node_id != "".join(node_id.split()) or not node_id.isprintable():
            table.fail(node_id, "a node id is one word of characters that can be shown")
        row = table.table(node_id)
        assert row is not None
        if len(nodes) == MAX_NODES:
            table.fail(node_id, f"more than {MAX_NODES} nodes")
        said = _read_unmeasured(row, hardware)
        if said is not None:
            unmeasured[node_id] = said
        nodes[node_id] = _read_node(row, node_id)
    return nodes


def _read_unmeasured(row: Table, hardware: Hardware) -> Unmeasured | None:
    name, solo = row.text("device"), row.number("solo_tok_s", low=LEAST_SOLO_TOK_S, high=10**6)
    device = None if name is None else hardware.device(name)
    if device is not None and device.family == "unknown":
        row.fail("device", f'"{name}" is not in config/hardware/devices.toml; state its bandwidth instead')
    if "sustained_mem_bandwidth_mib_per_s" in row:
        if solo is not None:
            row.fail("solo_tok_s", "cannot be combined with sustained_mem_bandwidth_mib_per_s: both say how fast it is")
        return None
    return None if device is None and solo is None else Unmeasured(device, solo)


def _read_node(row: Table, node_id: str) -> Participant:
    memory = row.whole("vram_bytes")
    if memory is None:
        row.fail("vram_bytes", "is required: bytes of memory that may hold the model")
    bandwidth = row.number("sustained_mem_bandwidth_mib_per_s")
    compute = row.number("sustained_compute_gflop_per_s", high=9_007_199)
    for key, value in (("sustained_mem_bandwidth_mib_per_s", bandwidth), ("sustained_compute_gflop_per_s", compute)):
        if value is not None and value == 0:
            row.fail(key, "is 0; leave it out when it is not known")
    age = row.number("observed_decode_age_s", high=10**9)
    node = Participant(
        node_id=node_id,
        detected_memory_bytes=memory,
        operator_cap_bytes=row.whole("max_vram_bytes"),
        runtime_headroom_bytes=row.whole("runtime_headroom_bytes"),
        memory_bandwidth_bytes_per_s=None if bandwidth is None else floor_rate(bandwidth, BYTES_PER_MIB),
        compute_flops_per_s=None if compute is None else floor_rate(compute, FLOPS_PER_GFLOP),
        observed_decode_us_per_layer=row.whole("observed_decode_us_per_layer", low=1, high=10**12),
        observed_decode_samples=row.whole("observed_decode_samples", high=10**12) or 0,
        observed_decode_age_us=0 if age is None else ceil_us(age, US_PER_S),
        cached_bytes=row.whole("cached_bytes"),
        missing_bytes=row.whole("missing_bytes"),
        artifact_transfer=row.flag("artifact_transfer") or False,
        bandwidth_source="unknown" if bandwidth is None else "measured",
        max_layers=row.whole("max_layers", low=1),
    )
    if node.memory_bandwidth_bytes_per_s is not None and node.memory_bandwidth_bytes_per_s > 2**53:
        row.fail("sustained_mem_bandwidth_mib_per_s", "is beyond 2^53 bytes per second")
    row.finish()
    return node


def _with_legacy_latency(nodes: Iterable[Participant], edges: tuple[Edge, ...]) -> tuple[Participant, ...]:
    """With links, a node's own latency is the smallest RTT of its links; without, it has none."""
    nearest: dict[str, int] = {}
    for edge in edges:
        if edge.rtt_us is not None:
            for end in (edge.source, edge.target):
                nearest[end] = min(edge.rtt_us, nearest.get(end, edge.rtt_us))
    return tuple(replace(node, coordinator_rtt_us=nearest.get(node.node_id)) for node in nodes)
