"""prima.cpp: a ring of ranks in stage order; only the head is told the layer counts."""

from coordinator.exporters.export import Export, ExportRequest, HostPart
from coordinator.exporters.shell_words import command_line


def export_prima_cpp(request: ExportRequest) -> Export:
    """``-lw`` on rank 0 sets every rank's layers and skips prima.cpp's own profiling."""
    plan, stages = request.plan, request.stages
    count = len(stages)
    parts = []
    for stage in reversed(stages):
        follower = request.host(stages[(stage.stage_index + 1) % count])
        ring = [
            *("--world", str(count), "--rank", str(stage.stage_index)),
            *("--master", request.host(stages[0]).address, "--next", follower.address),
        ]
        program = "llama-server" if stage.stage_index == 0 else "llama-cli"
        arguments = [program, "-m", request.model, "-c", str(plan.context_length), *ring]
        if stage.stage_index == 0:
            arguments += ["-np", str(plan.parallel_lanes), "-lw", ",".join(map(str, request.layer_counts))]
        parts.append(HostPart(request.host(stage), stage.stage_index, (command_line(arguments),)))
    cannot = (
        "which of a host's layers go to its GPU: add -ngl and --gpu-mem per host",
        "encryption and authentication: the ring is plain ZeroMQ",
        f"ports: it has its own, {request.port} is not used; let the hosts reach each other on them",
        "a package: prima.cpp is built from its source",
    )
    return Export("prima-cpp", tuple(parts), cannot)
