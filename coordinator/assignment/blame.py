"""Measured far below predicted: which stage or hop is to blame?

A plan whose measured time per token is more than ``FAR`` times the modelled one is raised once. Stages that report their
own decode timing are compared with their modelled time; what is left over belongs to the network and is put on the hop
that was modelled as the dearest.
"""

from coordinator.assignment.running import RunningPlan
from coordinator.replan import Observation
from coordinator.view import ClusterView
from protocol.ids import NodeId

FAR = 2
MIN_TOKENS = 64
"""Fewer measured tokens prove nothing."""


def far_below_predicted(running: RunningPlan, observed: Observation, view: ClusterView) -> str | None:
    """One sentence naming the culprit, or ``None`` while all is well or nothing is modelled."""
    if running.plan is None:
        return None
    plan, timings_us = running.plan, _timings_us(running, view)
    modeled_us = plan.modeled.decode_tpot_us
    if modeled_us is None or observed.tokens < MIN_TOKENS or observed.tpot_us <= FAR * modeled_us:
        return None
    excess: dict[str, int] = {}
    explained_us = 0
    for stage in plan.stages:
        expected_us = stage.stage_us or 0
        per_layer_us = timings_us.get(NodeId(stage.node_id))
        measured_us = expected_us
        if per_layer_us is not None:
            measured_us = per_layer_us * (stage.layer_end - stage.layer_start)
        explained_us += max(measured_us, expected_us)
        excess[f"stage {stage.stage_index} on {stage.node_id}"] = measured_us - expected_us
    hops = [hop for hop in plan.hops if hop.hop_us is not None]
    if hops:
        dearest = max(hops, key=lambda hop: (hop.hop_us or 0, hop.source, hop.target))
        network_us = observed.tpot_us - explained_us - sum(hop.hop_us or 0 for hop in hops)
        excess[f"hop {dearest.source} -> {dearest.target}"] = network_us
    culprit = max(excess, key=lambda name: (excess[name], name))
    if excess[culprit] <= 0:
        culprit = "no stage or hop in particular"
    return f"measured {observed.tpot_us} us per token, predicted {modeled_us}: {culprit}"


def _timings_us(running: RunningPlan, view: ClusterView) -> dict[NodeId, int]:
    """Measured µs per layer of the stages that report them."""
    timings_us: dict[NodeId, int] = {}
    for node_id in running.nodes:
        member = view.members.get(node_id)
        fact = None if member is None else member.fact(running.slot)
        if fact is not None and fact.decode_us_per_layer is not None:
            timings_us[node_id] = fact.decode_us_per_layer
    return timings_us
