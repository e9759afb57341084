"""MLX with mlx-lm: ranks are *reversed*, rank 0 holds the last layers.

There is no flag for an uneven split; ``PipelineMixin.pipeline(group, split=…)`` takes one count per rank, so a short
script is exported with the host file. ``mlx.launch`` starts every rank over ssh from one machine.
"""

import json

from coordinator.exporters.export import Export, ExportRequest, HostPart
from coordinator.exporters.shell_words import command_line

HOSTS_FILE = "stagemesh-hosts.json"
SCRIPT_FILE = "stagemesh_mlx.py"
PROMPT = "The capital of France is"
_SCRIPT = '''"""Generate with the split of a stagemesh plan: python {script} PROMPT (rank 0 prints)."""

import sys

import mlx.core as mx
from mlx_lm import load, stream_generate

SPLIT = {split}  # layers per rank; rank 0 holds the last ones
MODEL = {model}

group = mx.distributed.init(strict=True, backend="ring")
if group.size() != len(SPLIT):
    sys.exit(f"the plan has {{len(SPLIT)}} stages, but {{group.size()}} ranks were started")
model, tokenizer = load(MODEL, lazy=True)
if not hasattr(model.model, "pipeline"):
    sys.exit("mlx-lm cannot split this architecture: it has no PipelineMixin")
model.model.pipeline(group, split=SPLIT)
mx.eval(model.parameters())
mx.eval(mx.distributed.all_sum(mx.array(1.0), stream=mx.cpu))
for piece in stream_generate(model, tokenizer, sys.argv[1], max_tokens=128):
    if group.rank() == 0:
        print(piece.text, end="", flush=True)
'''


def export_mlx(request: ExportRequest) -> Export:
    """The same two files on every host; the command runs on rank 0's host, which is the last stage's."""
    if len(request.stages) == 1:
        return _alone(request)
    ranks = tuple(reversed(request.stages))
    hosts = json.dumps([[f"{request.host(stage).address}:{request.port}"] for stage in ranks]) + "\n"
    script = _SCRIPT.format(
        script=SCRIPT_FILE,
        split=[stage.layer_end - stage.layer_start for stage in ranks],
        model=json.dumps(request.model),
    )
    parts = []
    for rank, stage in enumerate(ranks):
        environment = {"MLX_HOSTFILE": HOSTS_FILE, "MLX_RANK": str(rank)}
        command = command_line(("python", SCRIPT_FILE, PROMPT), environment)
        files = {HOSTS_FILE: hosts, SCRIPT_FILE: script}
        parts.append(HostPart(request.host(stage), stage.stage_index, (command,), files))
    cannot = (
        *_cannot(request),
        "architectures without PipelineMixin (llama is one): mlx-lm cannot split them",
        "an uneven split by flag: `mlx_lm.server --pipeline` always splits evenly, hence the script",
        "encryption and authentication: the ring is plain TCP",
    )
    return Export("mlx", tuple(parts), cannot)


def _alone(request: ExportRequest) -> Export:
    """One stage needs no ring and no split."""
    (stage,) = request.stages
    command = command_line(
        ("python", "-m", "mlx_lm", "generate", "--model", request.model, "--prompt", PROMPT, "--max-tokens", "128")
    )
    return Export("mlx", (HostPart(request.host(stage), 0, (command,)),), _cannot(request))


def _cannot(request: ExportRequest) -> tuple[str, ...]:
    plan = request.plan
    return (f"context ({plan.context_length}) and lanes ({plan.parallel_lanes}): mlx-lm grows its cache as it goes",)
