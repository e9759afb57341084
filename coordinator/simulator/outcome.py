"""What a simulated run came to, as values and as the document of ``simulate --json``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.planner.plan import Plan
from coordinator.simulator.engine import Span, Tally
from coordinator.simulator.operations import EventReport


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Nearest-rank percentiles in µs; ``None`` when nothing was measured."""

    p50: int | None
    p90: int | None
    p99: int | None


@dataclass(frozen=True, slots=True)
class StageUse:
    """A stage of the first plan. ``utilization``: computing; ``bubble_share``: idle or sending while requests were here."""

    stage_index: int
    node_id: str
    utilization: float
    bubble_share: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished run. ``span_us`` is the time from the start to the last token."""

    plan: Plan
    seed: int
    completed: int
    failed: int
    tokens: int
    span_us: int
    tokens_per_s: float
    decode_tok_s_per_stream: float
    tpot_us: Percentiles
    ttft_us: Percentiles
    latency_us: Percentiles
    mean_latency_us: float
    mean_in_system: float
    stages: tuple[StageUse, ...]
    events: tuple[EventReport, ...]
    flags: tuple[str, ...]
    downtime_us: int
    interrupted: int
    prefilled_again: int
    spans: tuple[Span, ...]
    tokens_by_second: dict[int, float]


def percentile(ordered: Sequence[int], share_milli: int) -> int | None:
    """The smallest value that at least ``share_milli``/1000 of ``ordered`` (ascending) do not exceed."""
    if not ordered:
        return None
    rank = -(-len(ordered) * share_milli // 1_000)
    return ordered[max(rank, 1) - 1]


def percentiles(values: Sequence[int]) -> Percentiles:
    """p50, p90 and p99."""
    ordered = sorted(values)
    return Percentiles(percentile(ordered, 500), percentile(ordered, 900), percentile(ordered, 990))


def outcome_of(
    plan: Plan,
    seed: int,
    tally: Tally,
    *,
    events: tuple[EventReport, ...],
    flags: frozenset[str],
    downtime_us: int,
    serving_us: int,
) -> Outcome:
    """Condense a tally."""
    span = max(tally.last_token_us, 1)
    mean_tpot = sum(tally.tpot_us) / len(tally.tpot_us) if tally.tpot_us else 0.0
    served = max(serving_us, 1)
    stages = tuple(
        StageUse(
            stage.stage_index,
            stage.node_id,
            utilization=min(1.0, tally.busy_us.get(stage.node_id, 0) / span),
            bubble_share=max(0.0, 1.0 - tally.busy_us.get(stage.node_id, 0) / served),
        )
        for stage in plan.stages
    )
    return Outcome(
        plan=plan,
        seed=seed,
        completed=tally.completed,
        failed=tally.failed,
        tokens=tally.tokens,
        span_us=span,
        tokens_per_s=tally.tokens * 1e6 / span if tally.tokens else 0.0,
        decode_tok_s_per_stream=1e6 / mean_tpot if mean_tpot else 0.0,
        tpot_us=percentiles(tally.tpot_us),
        ttft_us=percentiles(tally.ttft_us),
        latency_us=percentiles(tally.latency_us),
        mean_latency_us=sum(tally.latency_us) / len(tally.latency_us) if tally.latency_us else 0.0,
        mean_in_system=tally.in_system_area / span,
        stages=stages,
        events=events,
        flags=tuple(sorted(flags)),
        downtime_us=downtime_us,
        interrupted=tally.interrupted,
        prefilled_again=tally.prefilled_again,
        spans=tuple(tally.spans),
        tokens_by_second=dict(tally.tokens_by_second),
    )


def outcome_document(outcome: Outcome, plan: Mapping[str, Any]) -> dict[str, Any]:
    """``simulate --json``; ``plan`` is the plan's own document."""
    return {
        "plan": plan,
        "seed": outcome.seed,
        "requests": {"completed": outcome.completed, "failed": outcome.failed},
        "tokens_per_s": round(outcome.tokens_per_s, 3),
        "decode_tok_s_per_stream": round(outcome.decode_tok_s_per_stream, 3),
        "tpot_us": _document(outcome.tpot_us),
        "ttft_us": _document(outcome.ttft_us),
        "latency_us": _document(outcome.latency_us),
        "stages": [
            {
                "stage_index": stage.stage_index,
                "node_id": stage.node_id,
                "utilization": round(stage.utilization, 4),
                "bubble_share": round(stage.bubble_share, 4),
            }
            for stage in outcome.stages
        ],
        "events": [
            {"at_s": round(event.at_us / 1e6, 6), "kind": event.kind, "effect": event.effect}
            for event in outcome.events
        ],
        "flags": list(outcome.flags),
    }


def _document(values: Percentiles) -> dict[str, int | None]:
    return {"p50": values.p50, "p90": values.p90, "p99": values.p99}
