"""Command lines of the worker and the head. Pure."""

from collections.abc import Sequence
from pathlib import Path

from config.settings import RuntimeSettings
from coordinator.exporters.layer_split import cache_flags, output_override, split_flags
from protocol.ballots import StageAssignment
from stage_agent.runtimes.llama_cpp.devices import DeviceLayers

LOOPBACK = "127.0.0.1"


def worker_command(settings: RuntimeSettings, port: int, *, cache: bool, host: str = LOOPBACK) -> list[str]:
    """``ggml-rpc-server`` on ``host``; ``cache``: it keeps what it receives. It ends with 0 on a flag that it does not know."""
    threads = ["-t", str(settings.llama_threads)] if settings.llama_threads else []
    devices = ["-d", settings.llama_devices] if settings.llama_devices else []
    kept = ["-c"] if cache else []
    return [settings.llama_rpc_server, "-H", host, "-p", str(port), *threads, *devices, *kept]


def probe_command(settings: RuntimeSettings, endpoints: Sequence[str]) -> list[str]:
    """Lists the devices behind the endpoints and ends."""
    return [settings.llama_server, "--rpc", ",".join(endpoints), "--list-devices"]


def head_command(
    settings: RuntimeSettings,
    assignment: StageAssignment,
    *,
    model: Path,
    port: int,
    key_file: Path,
    endpoints: Sequence[str],
    devices: Sequence[DeviceLayers],
    cpu_layers: int,
    output_on_head: str,
) -> list[str]:
    """``llama-server``; ``output_on_head`` is ``untied``, ``tied`` or empty.

    Verbosity 5 makes it say where each layer went. A missing device name ends it, instead of a silent other placement.
    The context is per lane, and llama-server divides its ``-c`` among the lanes. The cache has the plan's type, or its memory
    would not be what was counted; a quantised one needs flash attention, whatever the operator's own arguments say.
    """
    threads = ["-t", str(settings.llama_threads)] if settings.llama_threads else []
    remote = ["--rpc", ",".join(endpoints), "--device", ",".join(each.name for each in devices)] if endpoints else []
    output = ["-ot", output_override(tied_embeddings=output_on_head == "tied")] if output_on_head else []
    return [
        *(settings.llama_server, "-m", str(model), "--alias", assignment.slot, "--no-webui", "--offline"),
        *("--host", LOOPBACK, "--port", str(port), "--api-key-file", str(key_file)),
        *("-c", str(assignment.context_length * assignment.lanes), "-np", str(assignment.lanes), *threads),
        *remote,
        *split_flags([each.layers for each in devices], cpu_layers=cpu_layers).arguments(),
        *output,
        *("-fit", "off", "--no-repack", "--no-warmup", "-lv", "5"),
        *settings.llama_arguments,
        *cache_flags(assignment.cache_type),
    ]


def exit_words(program: str, code: int, last_line: str) -> str:
    """Why a program ended, for people."""
    reasons = {
        0: "ended by itself; rpc-server does that on a flag it does not know",
        127: "could not be started",
        132: "was killed by SIGILL: this build needs instructions that this CPU lacks (often AVX-512); use another build",
        134: "aborted: most often a stage was lost in the middle of a request",
        137: "was killed by SIGKILL (out of memory?)",
        141: "was killed by SIGPIPE: a client left without waiting for its answer",
    }
    how = reasons.get(code) or (f"was killed by signal {code - 128}" if code > 128 else f"ended with code {code}")
    return f"{program} {how}" + (f"; it said last: {last_line}" if last_line else "")
