"""llama.cpp over RPC: a worker on every host, and ``llama-server`` on stage 0's host that drives them all.

The head's own layers are served by a worker on loopback: the CPU can only take the *first* layers otherwise, and this way
every stage is an RPC device, in ``--rpc`` order, so that the same rule places all of them.
"""

from config.cache_types import DEFAULT_CACHE_TYPE
from coordinator.exporters.export import Export, ExportRequest, HostPart
from coordinator.exporters.layer_split import MAX_DEVICES, cache_flags, output_override, split_flags
from coordinator.exporters.shell_words import command_line

LOOPBACK = "127.0.0.1"
SERVER_PORT = 8080
KEY_FILE = "api-key"
_MAKE_KEY = f"test -s {KEY_FILE} || (umask 077; od -An -tx1 -N32 /dev/urandom | tr -d ' \\n' > {KEY_FILE})"
_UNPROTECTED = (
    "warning: ggml-rpc-server on {address} has no encryption and no authentication: "
    "let only the plan's hosts reach port {port}"
)


def export_llama_cpp(request: ExportRequest) -> Export:
    """Workers first, the head last: it connects to all of them when it starts.

    A worker that listens on the network says on stderr how unprotected it is; the head makes itself a key for its clients.
    """
    endpoints = [
        f"{LOOPBACK if stage.stage_index == 0 else request.host(stage).address}:{request.port}"
        for stage in request.stages
    ]
    parts = []
    for stage in reversed(request.stages[1:]):
        host = request.host(stage)
        warning = _UNPROTECTED.format(address=host.address, port=request.port)
        said = f"{command_line(('echo', warning))} >&2"
        parts.append(HostPart(host, stage.stage_index, (said, _worker(host.address, request.port))))
    check = command_line(("llama-server", "--rpc", ",".join(endpoints), "--list-devices"))
    worker = f"{_worker(LOOPBACK, request.port)} &"
    head = (_MAKE_KEY, worker, check, command_line(head_arguments(request, endpoints)))
    parts.append(HostPart(request.host(request.stages[0]), 0, head))
    return Export("llama-cpp", tuple(parts), _cannot(request))


def _worker(host: str, port: int) -> str:
    return command_line(("ggml-rpc-server", "-H", host, "-p", str(port)))


def head_arguments(request: ExportRequest, endpoints: list[str]) -> tuple[str, ...]:
    """The head's command; every worker is expected to offer exactly one device."""
    plan = request.plan
    devices = ",".join(f"RPC{index}" for index in range(len(endpoints)))
    output: tuple[str, ...] = ()
    if request.tied_embeddings and len(endpoints) > 1:  # no extra memory, and saves a vocabulary of logits per token
        output = ("-ot", output_override(tied_embeddings=True))
    return (
        *("llama-server", "-m", request.model, "--host", LOOPBACK, "--port", str(SERVER_PORT)),
        *("--api-key-file", KEY_FILE),
        *("-c", str(plan.context_length * plan.parallel_lanes), "-np", str(plan.parallel_lanes)),
        *("--rpc", ",".join(endpoints), "--device", devices),
        *split_flags(request.layer_counts).arguments(),
        *output,
        *(() if plan.cache_type == DEFAULT_CACHE_TYPE else cache_flags(plan.cache_type)),
        *("-fit", "off", "--no-repack"),
    )


def _cannot(request: ExportRequest) -> tuple[str, ...]:
    said = [
        "direct hops: every activation goes worker -> head -> next worker, one or two round trips for each remote stage",
        "encryption and authentication: ggml-rpc-server has none; use a private network, or runtime.kind = 'llama_cpp'",
        "a worker with several devices: RPC numbers go on per device, so the -ts list must name each; limit it with -d",
        "a memory cap per worker: there is no flag for it",
        "failing when a worker is missing: builds before b11434 leave it out silently; compare --list-devices first",
    ]
    if request.tied_embeddings is None and len(request.stages) > 1:
        said.append("output layer: stays on the last stage; add -ot '^output\\.weight$=CPU' to keep it on the head")
    if len(request.stages) > MAX_DEVICES:
        said.append(f"{len(request.stages)} stages: llama.cpp takes at most {MAX_DEVICES} RPC servers")
    return tuple(said)
