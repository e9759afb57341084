"""The world as events have left it: which nodes are up, how fast they and the links are."""

from dataclasses import dataclass, field, replace

from coordinator.planner.problem import Edge, Participant, PlanningProblem
from coordinator.simulator.scenario_events import LinkChange


@dataclass(slots=True)
class Conditions:
    """Starts as the scenario says; ``problem`` is what the planner would be asked now."""

    base: PlanningProblem
    down: set[str] = field(default_factory=set)
    slow_milli: dict[str, int] = field(default_factory=dict)
    links: dict[tuple[str, str], LinkChange] = field(default_factory=dict)

    def change_link(self, change: LinkChange) -> None:
        """Later changes keep what they do not mention of earlier ones."""
        key = (change.source, change.target)
        before = self.links.get(key)
        if before is not None:
            change = replace(
                change,
                rtt_us=before.rtt_us if change.rtt_us is None else change.rtt_us,
                large_frame_bytes_per_s=change.large_frame_bytes_per_s or before.large_frame_bytes_per_s,
            )
        self.links[key] = change

    def problem(self, *, without_down: bool) -> PlanningProblem:
        """All nodes at their present speed; without those that are down when a plan is to be made."""
        nodes = tuple(
            self._present(node) for node in self.base.participants if not (without_down and node.node_id in self.down)
        )
        ids = {node.node_id for node in nodes}
        edges = tuple(edge for edge in self._edges() if edge.source in ids and edge.target in ids)
        request = self.base.request
        if request.pin_stage0 is not None and request.pin_stage0 not in ids:
            request = replace(request, pin_stage0=None)
        if not request.require_nodes <= ids:
            request = replace(request, require_nodes=request.require_nodes & ids)
        if without_down and request.minimum_nodes > len(nodes):
            request = replace(request, minimum_nodes=max(1, len(nodes)))
        return replace(self.base, participants=nodes, edges=edges, request=request)

    def _present(self, node: Participant) -> Participant:
        factor = self.slow_milli.get(node.node_id, 1_000)
        if factor == 1_000:
            return node
        bandwidth, compute = node.memory_bandwidth_bytes_per_s, node.compute_flops_per_s
        observed = node.observed_decode_us_per_layer
        return replace(
            node,
            memory_bandwidth_bytes_per_s=None if bandwidth is None else max(1, bandwidth * 1_000 // factor),
            compute_flops_per_s=None if compute is None else max(1, compute * 1_000 // factor),
            observed_decode_us_per_layer=None if observed is None else max(1, observed * factor // 1_000),
        )

    def _edges(self) -> tuple[Edge, ...]:
        edges = {(edge.source, edge.target): edge for edge in self.base.edges}
        for key, change in self.links.items():
            edge = edges.get(key, Edge(*key))
            edges[key] = replace(
                edge,
                rtt_us=edge.rtt_us if change.rtt_us is None else change.rtt_us,
                large_frame_bytes_per_s=change.large_frame_bytes_per_s or edge.large_frame_bytes_per_s,
            )
        return tuple(edges.values())
