"""What a plan says about itself, in the given words (DESIGN §8). Order: model, signals, edges, artifacts, target."""

from coordinator.planner.evaluate import Evaluation
from coordinator.planner.instance import Candidate, Instance
from coordinator.planner.plan import Diagnostic, PlannedStage
from coordinator.planner.problem import Participant
from coordinator.planner.transfer import transfer_us

MODEL_MESSAGES = {
    "layer_weights_uniform_fallback": "exact layer weights are incomplete; every layer is charged the same share",
}
CONTRADICTION_FACTOR = 2


def milliseconds(value_us: int) -> str:
    """``2000`` → ``2``, ``350`` → ``0.35``: exact, without trailing zeros."""
    whole, rest = divmod(value_us, 1_000)
    return f"{whole}.{rest:03d}".rstrip("0") if rest else str(whole)


def diagnostics_of(
    instance: Instance, candidate: Candidate, evaluation: Evaluation, stages: tuple[PlannedStage, ...]
) -> tuple[Diagnostic, ...]:
    """Every line the plan carries, deterministic in order and wording."""
    nodes = {node.node_id: node for node in instance.problem.participants}
    chosen = [nodes[node_id] for node_id in candidate.sequence]
    return (
        *_model(instance),
        *_signals(instance, chosen),
        *_edges(evaluation, len(stages)),
        *_artifacts(chosen, stages),
        *_target(instance, evaluation),
    )


def _model(instance: Instance) -> list[Diagnostic]:
    return [
        Diagnostic("warning" if code in MODEL_MESSAGES else "info", code, MODEL_MESSAGES.get(code, code))
        for code in instance.problem.model.diagnostics
    ]


def _signals(instance: Instance, chosen: list[Participant]) -> list[Diagnostic]:
    lines = [
        Diagnostic(
            "info", "signals_withheld", f"signals of {node_id} are withheld until its round-trip time is settled"
        )
        for node_id in instance.signals.withheld_nodes
    ]
    for node in chosen:
        believed = instance.signals.nodes[node.node_id]
        if node.bandwidth_source in {"spec", "shaped"} and believed.bandwidth_bytes_per_s is not None:
            origin = "a device specification" if node.bandwidth_source == "spec" else "a shaped (pretended) value"
            lines.append(
                Diagnostic(
                    "info", f"bandwidth_{node.bandwidth_source}", f"memory bandwidth of {node.node_id} is {origin}"
                )
            )
        lines += _contradiction(instance, node)
    return lines


def _contradiction(instance: Instance, node: Participant) -> list[Diagnostic]:
    believed = instance.signals.nodes[node.node_id]
    observed, bandwidth = believed.observed_us_per_layer, believed.bandwidth_bytes_per_s
    if observed is None or bandwidth is None:
        return []
    layers = instance.problem.model.layers
    streamed = sum(layer.streamed_bytes for layer in layers)
    claimed = transfer_us(streamed, bandwidth)
    measured = observed * len(layers)
    if measured <= CONTRADICTION_FACTOR * claimed and claimed <= CONTRADICTION_FACTOR * measured:
        return []
    return [
        Diagnostic(
            "warning",
            "benchmark_contradicted",
            f"measured decode of {node.node_id} ({observed} us per layer) contradicts its memory bandwidth "
            f"({claimed // len(layers)} us per layer) by more than {CONTRADICTION_FACTOR}x",
        )
    ]


def _edges(evaluation: Evaluation, stage_count: int) -> list[Diagnostic]:
    lines = []
    for index, hop in enumerate(evaluation.hops):
        if hop.basis == "unknown":
            lines.append(
                Diagnostic(
                    "warning",
                    "hop_unknown",
                    f"no round-trip time is known for {hop.source} -> {hop.target}: decode time is not modelled",
                )
            )
        elif hop.basis == "measured" and hop.kind == "forward" and index < stage_count and hop.rtt_us is not None:
            lines.append(
                Diagnostic(
                    "info",
                    "pipeline_edge",
                    f"pipeline edge {hop.source} -> {hop.target} after stage-{index} has measured rtt "
                    f"{milliseconds(hop.rtt_us)} ms",
                )
            )
    return lines


def _artifacts(chosen: list[Participant], stages: tuple[PlannedStage, ...]) -> list[Diagnostic]:
    if all(node.cached_bytes is None and node.missing_bytes is None for node in chosen):
        return []
    cached = missing = peers = 0
    for node, stage in zip(chosen, stages, strict=True):
        cached += min(node.cached_bytes or 0, stage.parameter_bytes)
        lacking = min(node.missing_bytes or 0, stage.parameter_bytes)
        missing += lacking
        peers += lacking if node.artifact_transfer else 0
    return [
        Diagnostic(
            "info",
            "artifact_cold_start",
            f"artifact cold-start plan: cached={cached} bytes, missing={missing} bytes, "
            f"peer-transfer-eligible={peers} bytes, remote-download-fallback={missing - peers} bytes",
        )
    ]


def _target(instance: Instance, evaluation: Evaluation) -> list[Diagnostic]:
    if evaluation.met is not False:
        return []
    target = milliseconds(instance.problem.request.target_decode_tpot_us)
    tpot, network = evaluation.modeled.decode_tpot_us, evaluation.modeled.network_us_per_token
    if tpot is not None:
        message = f"modelled decode time {milliseconds(tpot)} ms per token misses the target of {target} ms"
    else:
        message = (
            f"the network alone takes {milliseconds(network or 0)} ms per token and misses the target of {target} ms"
        )
    return [Diagnostic("warning", "target_missed", message)]
