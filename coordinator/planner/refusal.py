"""Saying no with reasons (DESIGN §8): what was tried, what every node could hold, and the nearest thing that would fit."""

import numpy as np

from coordinator.planner.capacity import choose_capacity
from coordinator.planner.instance import Instance
from coordinator.planner.memory import Shape
from coordinator.planner.plan import Plan, PlanRefused
from coordinator.planner.span_costs import legal_spans, required_matrix


def no_valid_topology(instance: Instance, shapes: tuple[Shape, ...]) -> PlanRefused:
    """Nothing fits at any shape, or the operator's wishes cannot be met together."""
    request = instance.problem.request
    smallest = min(shapes, key=lambda shape: (shape.context_length, shape.lanes))
    memory = instance.memory(smallest)
    layers = instance.layer_count
    needed = memory.required(0, layers)
    usable = sum(instance.usable[node.node_id] for node in instance.nodes)
    details: dict[str, object] = {
        "contexts_tried": sorted({shape.context_length for shape in shapes}, reverse=True),
        "lanes_tried": sorted({shape.lanes for shape in shapes}, reverse=True),
        "minimum_context": smallest.context_length,
        "bytes_per_layer": -(-(memory.prefix[-1]) // layers),
        "required_bytes": needed,
        "total_usable_bytes": usable,
        "layers": layers,
        "layers_placeable": placeable(instance, smallest),
        "excluded": instance.excluded,
        "nearest_fit": _nearest_fit(instance, smallest, needed, usable),
    }
    problems = _unmet_wishes(instance)
    if problems:
        details["unmet"] = problems
        return PlanRefused("no_valid_topology", f"no topology respects the request: {'; '.join(problems)}", details)
    message = (
        f"no topology can hold {layers} layers at context {smallest.context_length} with {smallest.lanes} "
        f"lane{'s' if smallest.lanes > 1 else ''}: {needed} bytes needed, {usable} usable on {len(instance.nodes)} "
        f"node{'s' if len(instance.nodes) != 1 else ''}; {details['nearest_fit']}"
    )
    if request.minimum_nodes > 1:
        message += f" (at least {request.minimum_nodes} nodes were asked for)"
    return PlanRefused("no_valid_topology", message, details)


def target_missed(found: Plan) -> PlanRefused:
    """Policy ``must_meet_target``: feasible, but the target is missed or cannot be shown to be met."""
    tpot, target = found.modeled.decode_tpot_us, found.target.decode_tpot_us
    if tpot is not None:
        message = f"the best plan takes {tpot} us per token; the target is {target} us"
    elif found.target.met is False:
        message = (
            f"the network alone takes {found.modeled.network_us_per_token} us per token; the target is {target} us"
        )
    else:
        message = (
            f"the decode time of the best plan is not modelled, so the target of {target} us cannot be shown to be met"
        )
    details: dict[str, object] = {
        "decode_tpot_us": tpot,
        "network_us_per_token": found.modeled.network_us_per_token,
        "target_decode_tpot_us": target,
        "nodes": [stage.node_id for stage in found.stages],
    }
    return PlanRefused("target_missed", message, details, best_effort=found)


def placeable(instance: Instance, shape: Shape) -> dict[str, int]:
    """Per eligible node, the most layers it could hold anywhere in the model at ``shape``."""
    required, legal = required_matrix(instance, shape), legal_spans(instance)
    index = np.arange(required.shape[0])
    lengths = np.where(legal == 1, index[None, :] - index[:, None], 0)
    most: dict[str, int] = {}
    for node in instance.nodes:
        fits = (required <= instance.usable[node.node_id]) & (lengths <= instance.span_limit(node))
        most[node.node_id] = int(np.where(fits, lengths, 0).max())
    return most


def _unmet_wishes(instance: Instance) -> list[str]:
    request = instance.problem.request
    eligible = {node.node_id for node in instance.nodes}
    problems = []
    wishes = [("pinned as stage 0", request.pin_stage0)] if request.pin_stage0 else []
    for wish, node_id in [*wishes, *(("required", node_id) for node_id in sorted(request.require_nodes))]:
        if node_id not in eligible:
            reason = instance.excluded.get(str(node_id), "it is not among the nodes")
            problems.append(f"{node_id} is {wish} but cannot be used ({reason})")
    if request.minimum_nodes > len(eligible):
        problems.append(f"{request.minimum_nodes} nodes are asked for and {len(eligible)} are eligible")
    if request.minimum_nodes > instance.layer_count:
        problems.append(f"{request.minimum_nodes} nodes are asked for and the model has {instance.layer_count} layers")
    return problems


def _nearest_fit(instance: Instance, smallest: Shape, needed: int, usable: int) -> str:
    """One sentence: a smaller context that fits if one does, else how much memory is missing."""
    context = smallest.context_length // 2
    while context >= 512:
        if choose_capacity(instance, (Shape(context, smallest.lanes),)) is not None:
            return f"context {context} would fit"
        context //= 2
    if needed > usable:
        return f"{needed - usable} more usable bytes are needed"
    return "the total would fit, but no cut gives every node whole layers within its memory"
