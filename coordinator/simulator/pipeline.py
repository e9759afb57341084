"""How long a plan's stages and hops take under given conditions: the planner's own prices, laid out for execution.

Theory of operation. A token's pass visits every stage once. At stage i it *computes* for ``stage_us[i]`` and then *sends*
for ``egress_us[i]``; the stage is held for both, because the engines modelled here wait until a frame is taken before
they start the next one. That is exactly the planner's pipelined period, max(stage + egress). What the egresses leave of
the hops (a reply that walks back several hops) is ``tail_us``, a delay that holds no stage. So one stream alone takes
Σ stage + Σ hops per token: the planner's TPOT, to the microsecond.

Where the planner knows too little to price (no bandwidth, no RTT) execution needs a number all the same: the stated
assumptions below are used and flagged, never silently.
"""

from dataclasses import dataclass, field, replace

from coordinator.planner.cost import StageTimes, stage_times
from coordinator.planner.memory import usable_bytes
from coordinator.planner.network import Network, network_of
from coordinator.planner.plan import Plan, PlannedHop, PlannedStage
from coordinator.planner.problem import PlanningProblem
from coordinator.planner.transfer import transfer_us
from coordinator.planner.trust import NodeSignals, trusted_signals

ASSUMED_BANDWIDTH_BYTES_PER_S = 33_000_000_000
"""A desktop's dual-channel DDR4 at 65 % of 51.2 GB/s: slow enough that an unknown node never looks good."""
ASSUMED_RTT_US = 40_000
"""An unknown link: across a continent."""


@dataclass(frozen=True, slots=True)
class PassTimes:
    """One pass through all stages: compute and send time of each, and the delay after the last."""

    compute_us: tuple[int, ...]
    egress_us: tuple[int, ...]
    tail_us: int

    @property
    def hold_us(self) -> tuple[int, ...]:
        """How long each stage is taken."""
        return tuple(compute + egress for compute, egress in zip(self.compute_us, self.egress_us, strict=True))

    @property
    def total_us(self) -> int:
        """A pass that never waits."""
        return sum(self.compute_us) + sum(self.egress_us) + self.tail_us


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Times of one plan under one set of conditions."""

    node_ids: tuple[str, ...]
    decode: PassTimes
    flags: tuple[str, ...]
    chunk_tokens: int
    _stages: tuple[PlannedStage, ...]
    _times: tuple[StageTimes, ...]
    _disk_us: tuple[int, ...]
    _network: Network
    _chunks: dict[int, PassTimes] = field(default_factory=dict)

    @property
    def period_us(self) -> int:
        """The longest a stage is held per token: no schedule delivers more than one token per period."""
        return max(self.decode.hold_us)

    def prefill(self, tokens: int) -> PassTimes:
        """One prefill chunk of ``tokens`` ≤ ``chunk_tokens``; the last stage keeps its result, nothing is sent back."""
        known = self._chunks.get(tokens)
        if known is None:
            known = self._chunks[tokens] = self._priced_chunk(tokens)
        return known

    def _priced_chunk(self, tokens: int) -> PassTimes:
        network = replace(self._network, frame_bytes=self._network.frame_bytes * tokens)
        hops = network.hops(self.node_ids)
        sent = network.egress(len(self.node_ids), hops)
        if not network.star:
            sent = (*sent[:-1], None)
        return PassTimes(
            compute_us=tuple(
                times.prefill_us(stage.layer_start, stage.layer_end, tokens) + disk
                for stage, times, disk in zip(self._stages, self._times, self._disk_us, strict=True)
            ),
            egress_us=tuple(0 if hop is None else _hop_us(network, hop) for hop in sent),
            tail_us=0,
        )


def pipeline_of(problem: PlanningProblem, plan: Plan, *, disk_bytes_per_s: int) -> Pipeline:
    """Price ``plan`` under ``problem``'s conditions, whichever conditions it was planned for.

    A stage whose required bytes exceed its node's usable memory reads its weights from disk for every token: pages come
    back in the order they are used, so a cache smaller than the stage holds none of them by the time they are needed.
    """
    flags: set[str] = set()
    signals = trusted_signals(problem)
    network = network_of(problem.model, signals, problem.calibration, problem.request.direct_prediction_return)
    by_id = {node.node_id: node for node in problem.participants}
    times = tuple(_times(problem, signals.nodes[stage.node_id], flags) for stage in plan.stages)
    disk_us = tuple(
        transfer_us(stage.parameter_bytes, disk_bytes_per_s)
        if stage.required_bytes > usable_bytes(by_id[stage.node_id])
        else 0
        for stage in plan.stages
    )
    if any(disk_us):
        flags.add("disk_bound")
    nodes = tuple(stage.node_id for stage in plan.stages)
    hops = network.hops(nodes)
    if any(hop.hop_us is None for hop in hops):
        flags.add("assumed_rtt")
    egress = tuple(0 if hop is None else _hop_us(network, hop) for hop in network.egress(len(nodes), hops))
    decode = PassTimes(
        compute_us=tuple(
            one.stage_us(stage.layer_start, stage.layer_end) + disk
            for stage, one, disk in zip(plan.stages, times, disk_us, strict=True)
        ),
        egress_us=egress,
        tail_us=sum(_hop_us(network, hop) for hop in hops) - sum(egress),
    )
    chunk = problem.request.prefill_chunk_tokens
    return Pipeline(nodes, decode, tuple(sorted(flags)), chunk, plan.stages, times, disk_us, network)


def _times(problem: PlanningProblem, known: NodeSignals, flags: set[str]) -> StageTimes:
    times = stage_times(problem.model, known, problem.calibration)
    if times is None:
        flags.add("assumed_speed")
        assumed = replace(known, bandwidth_bytes_per_s=ASSUMED_BANDWIDTH_BYTES_PER_S)
        times = stage_times(problem.model, assumed, problem.calibration)
    assert times is not None
    return times


def _hop_us(network: Network, hop: PlannedHop) -> int:
    return network.priced_us(ASSUMED_RTT_US, hop.transfer_us) if hop.hop_us is None else hop.hop_us
