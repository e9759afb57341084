"""Which signals count (DESIGN §7). Everything the cost model reads has passed through here.

* A link's RTT given without a sample count was stated by a person and is trusted. Otherwise it must be *settled*:
  ≥ 2 samples that span ≥ 5 s, the newest ≤ 30 s old. An unsettled link is withheld.
* A node is untrusted while ``signals_trusted`` is false, or while an unsettled link points at it and none of its links
  is settled: an early minimum may be a relay path, so whatever it says of itself is withheld with its links. The
  coordinator itself (``coordinator_rtt_us = 0``) needs no link to be believed.
* An observed decode timing counts as a floor with ≥ 8 samples that are ≤ 2 min old.
* A bandwidth found by calibration stands above the benchmark's, and compute is scaled by the same factor.
* ``stripped`` is the kill switch: performance, links and frame size leave the input, and only those.
"""

from dataclasses import dataclass, replace

from coordinator.planner.problem import Edge, Participant, PlanningProblem

SETTLE_SAMPLES = 2
SETTLE_SPAN_US = 5_000_000
SETTLE_MAX_AGE_US = 30_000_000
OBSERVED_MIN_SAMPLES = 8
OBSERVED_MAX_AGE_US = 120_000_000


@dataclass(frozen=True, slots=True)
class NodeSignals:
    """What is believed of one node's speed; ``None`` = not known."""

    bandwidth_bytes_per_s: int | None = None
    compute_flops_per_s: int | None = None
    observed_us_per_layer: int | None = None
    coordinator_rtt_us: int | None = None
    withheld: bool = False


@dataclass(frozen=True, slots=True)
class TrustedSignals:
    """Nodes by id and settled links by (source, target). ``return_refused`` holds links without direct replies."""

    nodes: dict[str, NodeSignals]
    edges: dict[tuple[str, str], Edge]
    return_refused: frozenset[tuple[str, str]]

    @property
    def withheld_nodes(self) -> tuple[str, ...]:
        """Ids whose signals were not believed, sorted."""
        return tuple(sorted(node_id for node_id, signals in self.nodes.items() if signals.withheld))


def edge_settled(edge: Edge) -> bool:
    """The settle rule for one directed link."""
    if edge.rtt_samples is None:
        return True
    if edge.rtt_samples < SETTLE_SAMPLES or edge.rtt_first_age_us is None or edge.rtt_last_age_us is None:
        return False
    span_us = edge.rtt_first_age_us - edge.rtt_last_age_us
    return span_us >= SETTLE_SPAN_US and edge.rtt_last_age_us <= SETTLE_MAX_AGE_US


def trusted_signals(problem: PlanningProblem) -> TrustedSignals:
    """Apply every rule above. Independent of the order of nodes and edges."""
    settled = [edge for edge in problem.edges if edge_settled(edge)]
    touched = {end for edge in settled for end in (edge.source, edge.target)}
    doubted = {edge.target for edge in problem.edges if not edge_settled(edge)} - touched
    nodes = {
        node.node_id: _signals(
            node, withheld=not node.signals_trusted or (node.node_id in doubted and not _local(node))
        )
        for node in problem.participants
    }
    edges = {
        (edge.source, edge.target): edge
        for edge in settled
        if not nodes[edge.source].withheld and not nodes[edge.target].withheld
    }
    refused = frozenset(
        (edge.source, edge.target) for edge in problem.edges if not edge.direct_prediction_return_supported
    )
    return TrustedSignals(nodes, edges, refused)


def stripped(problem: PlanningProblem) -> PlanningProblem:
    """The problem as capacity-only planning sees it: no performance signals, no links, no frame size."""
    participants = tuple(
        replace(
            node,
            memory_bandwidth_bytes_per_s=None,
            compute_flops_per_s=None,
            calibrated_bytes_per_s=None,
            observed_decode_us_per_layer=None,
            observed_decode_samples=0,
            observed_decode_age_us=0,
        )
        for node in problem.participants
    )
    model = replace(problem.model, activation_frame_bytes=0)
    return replace(problem, participants=participants, edges=(), model=model)


def _local(node: Participant) -> bool:
    return node.coordinator_rtt_us == 0


def _signals(node: Participant, *, withheld: bool) -> NodeSignals:
    if withheld:
        return NodeSignals(withheld=True)
    observed = node.observed_decode_us_per_layer
    if node.observed_decode_samples < OBSERVED_MIN_SAMPLES or node.observed_decode_age_us > OBSERVED_MAX_AGE_US:
        observed = None
    bandwidth, compute = node.memory_bandwidth_bytes_per_s, node.compute_flops_per_s
    if node.calibrated_bytes_per_s is not None:
        if bandwidth and compute is not None:
            compute = max(1, compute * node.calibrated_bytes_per_s // bandwidth)
        bandwidth = node.calibrated_bytes_per_s
    return NodeSignals(bandwidth, compute, observed, node.coordinator_rtt_us)
