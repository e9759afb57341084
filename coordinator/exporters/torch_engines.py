"""vLLM and SGLang: a partition in the environment of every host, ranks in stage order."""

from coordinator.exporters.export import Export, ExportRequest, HostPart
from coordinator.exporters.shell_words import command_line

_NO_PARTITION = "a single stage needs no partition: the variable is ignored"
_SHARED = (
    "hosts of unequal memory: each takes its layers, but one value of context and batch applies to all",
    "a stage on a CPU beside stages on GPUs: all ranks use one backend",
    "encryption and authentication: ranks talk NCCL or gloo in the clear; use a private network",
)


def export_vllm(request: ExportRequest) -> Export:
    """``VLLM_PP_LAYER_PARTITION`` must be equal on all nodes; its sum is the model's layers or vLLM refuses to start."""
    plan, count = request.plan, len(request.stages)
    master = request.host(request.stages[0]).address
    environment = {"VLLM_PP_LAYER_PARTITION": ",".join(map(str, request.layer_counts))} if count > 1 else {}
    parts = []
    for stage in reversed(request.stages):
        arguments = [
            *("vllm", "serve", request.model, "--pipeline-parallel-size", str(count)),
            *("--max-model-len", str(plan.context_length), "--max-num-seqs", str(plan.parallel_lanes)),
        ]
        if count > 1:
            arguments += ["--distributed-executor-backend", "mp", "--nnodes", str(count)]
            arguments += ["--node-rank", str(stage.stage_index)]
            arguments += ["--master-addr", master, "--master-port", str(request.port)]
        if stage.stage_index:
            arguments.append("--headless")
        parts.append(HostPart(request.host(stage), stage.stage_index, (command_line(arguments, environment),)))
    cannot = ("node order with Ray: it sorts nodes by address text; use the commands here (mp) instead", *_SHARED)
    return Export("vllm", tuple(parts), cannot if count > 1 else (*cannot, _NO_PARTITION))


def export_sglang(request: ExportRequest) -> Export:
    """``SGLANG_PP_LAYER_PARTITION`` on every node; ``--dist-init-addr`` is stage 0's."""
    plan, count = request.plan, len(request.stages)
    master = request.host(request.stages[0]).address
    environment = {"SGLANG_PP_LAYER_PARTITION": ",".join(map(str, request.layer_counts))} if count > 1 else {}
    parts = []
    for stage in reversed(request.stages):
        arguments = [
            *("python", "-m", "sglang.launch_server", "--model-path", request.model, "--pp-size", str(count)),
            *("--context-length", str(plan.context_length), "--max-running-requests", str(plan.parallel_lanes)),
        ]
        if count > 1:
            arguments += ["--nnodes", str(count), "--node-rank", str(stage.stage_index)]
            arguments += ["--dist-init-addr", f"{master}:{request.port}"]
        parts.append(HostPart(request.host(stage), stage.stage_index, (command_line(arguments, environment),)))
    return Export("sglang", tuple(parts), _SHARED if count > 1 else (*_SHARED, _NO_PARTITION))
