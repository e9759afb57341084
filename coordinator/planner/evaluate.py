"""What a given placement costs: the cost model applied to one ordered, cut sequence of nodes (DESIGN §5).

Every figure that a plan reports comes from here, whichever search proposed the placement. All-or-nothing: one stage
without a trusted bandwidth, or one hop without an RTT, and the decode time is not modelled.
"""

from dataclasses import dataclass

from coordinator.planner.instance import Candidate, Instance
from coordinator.planner.network import network_us
from coordinator.planner.plan import Modeled, PlannedHop

MISSED_ALONE, UNKNOWN, MISSED, MET = 0, 1, 2, 3
"""Step 2 of the comparison, worst to best: missed by the network alone, unknown, modelled but missed, met."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Figures of one candidate; ``None`` = not modelled."""

    stage_us: tuple[int | None, ...]
    hops: tuple[PlannedHop, ...]
    modeled: Modeled
    target_class: int

    @property
    def met(self) -> bool | None:
        """Whether the target is met: ``None`` = unknown, and never guessed."""
        return None if self.target_class == UNKNOWN else self.target_class == MET


def evaluate(instance: Instance, candidate: Candidate) -> Evaluation:
    """Price ``candidate``. Pure; assumes it is feasible and legal."""
    hops = instance.network.hops(candidate.sequence)
    stages = tuple(_stage_us(instance, *span) for span in candidate.spans)
    network = network_us(hops)
    known = [stage for stage in stages if stage is not None]
    tpot = sum(known) + network if network is not None and len(known) == len(stages) else None
    if tpot is None:
        network = _legacy_network_us(instance, candidate.sequence) if not instance.problem.edges else network
        modeled = Modeled(network_us_per_token=network)
    else:
        modeled = _modeled(instance, candidate, tuple(known), hops, tpot, network or 0)
    target = target_class(tpot, network, instance.problem.request.target_decode_tpot_us)
    return Evaluation(stages, hops, modeled, target)


def target_class(tpot_us: int | None, network: int | None, target_us: int) -> int:
    """Step 2. A network estimate alone can prove a miss, never that the target is met."""
    if tpot_us is not None:
        return MET if tpot_us <= target_us else MISSED
    return MISSED_ALONE if network is not None and network > target_us else UNKNOWN


def legacy_estimate_us(instance: Instance, sequence: tuple[str, ...]) -> int | None:
    """``stages × max RTT`` over the nodes whose RTT to the coordinator is known; ``None`` when none is."""
    rtts = [instance.signals.nodes[node_id].coordinator_rtt_us for node_id in sequence]
    known = [rtt for rtt in rtts if rtt is not None]
    return len(sequence) * max(known) if known else None


def _legacy_network_us(instance: Instance, sequence: tuple[str, ...]) -> int | None:
    return 0 if len(sequence) == 1 else legacy_estimate_us(instance, sequence)


def _stage_us(instance: Instance, node_id: str, start: int, end: int) -> int | None:
    times = instance.times[node_id]
    return None if times is None else times.stage_us(start, end)


def _modeled(
    instance: Instance, candidate: Candidate, stages: tuple[int, ...], hops: tuple[PlannedHop, ...], tpot: int, net: int
) -> Modeled:
    egress = instance.network.egress(len(stages), hops)
    period = max(stage + (hop.hop_us or 0 if hop else 0) for stage, hop in zip(stages, egress, strict=True))
    streams = min(instance.problem.request.concurrency, candidate.shape.lanes)
    return Modeled(
        decode_tpot_us=tpot,
        network_us_per_token=net,
        pipelined_period_us=period,
        ttft_us=_prefill_us(instance, candidate) + tpot,
        tokens_per_s=streams * 1e6 / max(1, tpot, streams * period),
    )


def _prefill_us(instance: Instance, candidate: Candidate) -> int:
    """The prompt in chunks, pipelined: each chunk follows the one before as soon as a stage is free; the last is short.

    Exact for equal chunks and one shorter one behind them: the short chunk leaves stage ``j`` after the last full chunk
    did, and then walks the rest.
    """
    request = instance.problem.request
    full, rest = divmod(request.prompt_tokens, request.prefill_chunk_tokens)
    full_us = _chunk_slots(instance, candidate, request.prefill_chunk_tokens) if full else []
    rest_us = _chunk_slots(instance, candidate, rest) if rest else []
    if not full:
        return sum(rest_us)
    done_us, slowest_us, finish_us = 0, 0, 0
    for index, slot_us in enumerate(full_us):
        done_us, slowest_us = done_us + slot_us, max(slowest_us, slot_us)
        finish_us = max(finish_us, done_us + (full - 1) * slowest_us + sum(rest_us[index:]))
    return finish_us


def _chunk_slots(instance: Instance, candidate: Candidate, tokens: int) -> list[int]:
    """How long a chunk of ``tokens`` holds each stage, its way out included."""
    slots = []
    for index, (node_id, start, end) in enumerate(candidate.spans):
        times = instance.times[node_id]
        assert times is not None
        slots.append(
            times.prefill_us(start, end, tokens) + instance.network.chunk_us(candidate.sequence, index, tokens)
        )
    return slots
