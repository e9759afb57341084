"""The ``[workload]`` and ``[locked]`` tables: what is asked of the planner, and which requests arrive."""

from dataclasses import dataclass, replace
from typing import Literal, cast

from coordinator.planner.problem import (
    LockedStage,
    LockedTopology,
    Objective,
    PlanRequest,
    Policy,
    ReturnMode,
)
from coordinator.planner.validate import MAX_LANES
from coordinator.simulator.toml_table import Table
from coordinator.simulator.units import BYTES_PER_MIB, US_PER_MS, US_PER_S, ceil_us, floor_rate

Arrivals = Literal["closed", "poisson", "burst", "trace"]

MAX_REQUESTS = 1_000_000
MAX_TOKENS = 2**24
DEFAULT_LOAD_BYTES_PER_S = 1_000_000_000
"""Reading weights that are already on the node's disk: a plain NVMe drive. Fetching is not simulated."""


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """One request of a trace."""

    at_us: int
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """Which requests arrive when.

    ``closed``: ``streams`` users, each sends its next request ``think_us`` after the last answer, ``requests`` in all.
    ``poisson``: ``requests`` arrivals with exponential gaps of mean ``gap_us``. ``burst``: ``burst_size`` at once, every
    ``gap_us``. ``trace``: as listed. The default is one stream with one request.
    """

    arrivals: Arrivals = "closed"
    requests: int = 1
    streams: int = 1
    think_us: int = 0
    gap_us: int = 0
    burst_size: int = 1
    prompt_tokens: int = 512
    output_tokens: int = 128
    lengths_stated: bool = True
    """False: the lengths are the defaults, which a short context may cut."""
    trace: tuple[TraceEntry, ...] = ()
    load_bytes_per_s: int = DEFAULT_LOAD_BYTES_PER_S


def read_request(table: Table | None, base: PlanRequest, known: frozenset[str]) -> PlanRequest:
    """``base`` with what ``[workload]`` states. Zero lanes and odd contexts are left for the planner to refuse."""
    if table is None:
        return base
    target = table.number("target_decode_tpot_ms", high=10**9)
    if target is not None and target == 0:
        table.fail("target_decode_tpot_ms", "is 0: no token comes for free")
    stage0 = table.text("stage0_node")
    excluded, required = table.texts("exclude_nodes"), table.texts("require_nodes")
    for key, ids in (
        ("stage0_node", [] if stage0 is None else [stage0]),
        ("exclude_nodes", excluded),
        ("require_nodes", required),
    ):
        for node_id in ids or ():
            if node_id not in known:
                table.fail(key, f'"{node_id}" is not a node of this scenario')
    aware = table.flag("performance_aware")
    lanes = table.whole("parallel_lanes", high=MAX_LANES)
    return replace(
        base,
        minimum_nodes=_or(table.whole("minimum_nodes", low=1, high=1_024), base.minimum_nodes),
        target_decode_tpot_us=base.target_decode_tpot_us if target is None else ceil_us(target, US_PER_MS),
        objective=cast(
            "Objective", table.choice("objective", ("interactive", "throughput", "capacity")) or base.objective
        ),
        policy=cast("Policy", table.choice("policy", ("must_meet_target", "best_effort")) or base.policy),
        concurrency=_or(table.whole("concurrency", low=1, high=65_536), base.concurrency),
        prompt_tokens=_or(table.whole("prompt_tokens", low=1, high=MAX_TOKENS), base.prompt_tokens),
        output_tokens=_or(table.whole("output_tokens", low=1, high=MAX_TOKENS), base.output_tokens),
        prefill_chunk_tokens=_or(
            table.whole("prefill_chunk_tokens", low=1, high=MAX_TOKENS), base.prefill_chunk_tokens
        ),
        context_length=_or_none(table.whole("context_length", high=2**31), base.context_length),
        parallel_lanes=_or_none(lanes, base.parallel_lanes),
        performance_aware=base.performance_aware if aware is None else aware,
        direct_prediction_return=cast(
            "ReturnMode",
            table.choice("direct_prediction_return", ("require", "allow_fallback")) or base.direct_prediction_return,
        ),
        prefer=cast("Literal['speed', 'context']", table.choice("prefer", ("speed", "context")) or base.prefer),
        prefer_cached=table.flag("prefer_cached") or base.prefer_cached,
        pin_stage0=stage0 or base.pin_stage0,
        exclude_nodes=base.exclude_nodes if excluded is None else frozenset(excluded),
        require_nodes=base.require_nodes if required is None else frozenset(required),
        search_budget_ms=_or(table.whole("search_budget_ms", low=1, high=600_000), base.search_budget_ms),
    )


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def _or_none(value: int | None, default: int | None) -> int | None:
    return default if value is None else value


def read_traffic(table: Table | None, request: PlanRequest) -> Traffic:
    """The traffic part of ``[workload]``; lengths come from the same keys that the planner reads."""
    lengths = Traffic(prompt_tokens=request.prompt_tokens, output_tokens=request.output_tokens, lengths_stated=False)
    if table is None:
        return lengths
    trace = tuple(_trace_entry(entry, lengths) for entry in table.tables("trace", limit=MAX_REQUESTS))
    arrivals = cast("Arrivals", table.choice("arrivals", ("closed", "poisson", "burst", "trace")) or "closed")
    if bool(trace) != (arrivals == "trace") and ("arrivals" in table or trace):
        table.fail("arrivals", 'arrivals = "trace" and a [[workload.trace]] list belong together')
    rate = table.number("rate_per_s", high=10**6)
    every = table.number("burst_every_s", high=10**7)
    if arrivals == "poisson" and not rate:
        table.fail("rate_per_s", "is required with poisson arrivals, above 0")
    if arrivals == "burst" and not every:
        table.fail("burst_every_s", "is required with burst arrivals, above 0")
    gap_us = ceil_us(1 / rate, US_PER_S) if rate else ceil_us(every, US_PER_S) if every else 0
    load = table.number("load_mib_per_s", high=2**33)
    if load is not None and load == 0:
        table.fail("load_mib_per_s", "is 0: no stage would ever be ready")
    think = table.number("think_s", high=10**7)
    streams = request.concurrency if arrivals == "closed" else 1
    return replace(
        lengths,
        lengths_stated=bool(trace) or "prompt_tokens" in table or "output_tokens" in table,
        arrivals=arrivals,
        requests=len(trace) or _or(table.whole("requests", low=1, high=MAX_REQUESTS), streams),
        streams=streams,
        think_us=0 if think is None else ceil_us(think, US_PER_S),
        gap_us=gap_us,
        burst_size=_or(table.whole("burst_size", low=1, high=MAX_REQUESTS), 1),
        trace=tuple(sorted(trace, key=lambda entry: entry.at_us)),
        load_bytes_per_s=DEFAULT_LOAD_BYTES_PER_S if load is None else floor_rate(load, BYTES_PER_MIB),
    )


def within_context(traffic: Traffic, context_length: int) -> Traffic:
    """``traffic`` whose default lengths fit ``context_length``; lengths that the file states are never touched."""
    if traffic.lengths_stated or traffic.prompt_tokens + traffic.output_tokens <= context_length or context_length < 2:
        return traffic
    output = min(traffic.output_tokens, context_length // 2)
    return replace(traffic, prompt_tokens=min(traffic.prompt_tokens, context_length - output), output_tokens=output)


def _trace_entry(table: Table, lengths: Traffic) -> TraceEntry:
    at = table.number("at_s", high=10**7)
    if at is None:
        table.fail("at_s", "is required: seconds after the start")
    entry = TraceEntry(
        ceil_us(at, US_PER_S),
        _or(table.whole("prompt_tokens", low=1, high=MAX_TOKENS), lengths.prompt_tokens),
        _or(table.whole("output_tokens", low=1, high=MAX_TOKENS), lengths.output_tokens),
    )
    table.finish()
    return entry


def read_locked(table: Table | None, known: frozenset[str], layer_count: int | None) -> LockedTopology | None:
    """The operator's split: half-open, non-empty, without overlap or gap, each node once, all layers."""
    if table is None:
        return None
    stages: list[LockedStage] = []
    rows = table.tables("stages", limit=1_024)
    for row in rows:
        stage = _locked_stage(row, known)
        expected = stages[-1].layer_end if stages else 0
        if stage.layer_start < expected:
            row.fail("layer_start", f"is {stage.layer_start}: overlaps the stage before it, which ends at {expected}")
        if stage.layer_start > expected:
            row.fail("layer_start", f"is {stage.layer_start}: layers {expected} to {stage.layer_start} are on no node")
        if any(stage.node_id == other.node_id for other in stages):
            row.fail("node", f'"{stage.node_id}" already has a stage')
        stages.append(stage)
    if not stages:
        table.fail("stages", 'needs at least one { node = "a", layer_start = 0, layer_end = 20 }')
    if layer_count is not None and stages[-1].layer_end != layer_count:
        rows[-1].fail("layer_end", f"is {stages[-1].layer_end}, the model has {layer_count} layers")
    locked = LockedTopology(tuple(stages), model=table.text("model"), manifest_digest=table.text("manifest_digest"))
    table.finish()
    return locked


def _locked_stage(row: Table, known: frozenset[str]) -> LockedStage:
    node = row.text("node")
    start, end = row.whole("layer_start", high=2**24), row.whole("layer_end", high=2**24)
    if node is None or start is None or end is None:
        row.fail(None, "needs node, layer_start and layer_end")
    if node not in known:
        row.fail("node", f'"{node}" is not a node of this scenario')
    if end <= start:
        row.fail("layer_end", f"is {end}: the range is half-open, it must end above {start}")
    row.finish()
    return LockedStage(node, start, end)
