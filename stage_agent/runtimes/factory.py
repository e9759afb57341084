"""Makes the runtime that the settings name; engines are imported only when they are used."""

from typing import assert_never

from config.settings import RuntimeSettings
from stage_agent.runtimes.command import names_other_stages
from stage_agent.runtimes.context import RuntimeContext
from stage_agent.runtimes.interface import StageRuntime

NOT_FOR_PRODUCTION = "runtime.kind is reference: the verification engine, slow and greedy; not for production"


def make_runtime(settings: RuntimeSettings, context: RuntimeContext) -> StageRuntime:
    """A fresh, unloaded runtime of ``settings.kind``."""
    match settings.kind:
        case "mapped":
            from stage_agent.runtimes.mapped import MappedRuntime

            return MappedRuntime(context.model_path, settings.resident_cap_bytes)
        case "process":
            from stage_agent.runtimes.process import ProcessRuntime

            return ProcessRuntime(settings, context)
        case "reference":
            from stage_agent.runtimes.reference.runtime import ReferenceRuntime

            return ReferenceRuntime(settings, context)
        case "llama_cpp":
            from stage_agent.runtimes.llama_cpp.runtime import LlamaCppRuntime

            return LlamaCppRuntime(settings, context)
        case _:
            assert_never(settings.kind)


def keeps_loads(settings: RuntimeSettings) -> bool:
    """Whether ``StageRuntime.keeps`` says yes to every plan with the same layers, context, lanes and cache type.

    Known before anything is loaded, because the memory of a move depends on it. A foreign engine whose command names its
    neighbours is started anew even when those stay: for its memory that is the safe answer.
    """
    match settings.kind:
        case "mapped" | "reference":
            return True
        case "process":
            return not names_other_stages(settings.command)
        case "llama_cpp":
            return False
        case _:
            assert_never(settings.kind)


def engine_label(settings: RuntimeSettings) -> str:
    """What this node's row says of its engine: the kind, and for foreign engines that must match, their build.

    Starts the engine's programs for an instant (blocking, at most some seconds). Raises ``ConfigurationError``.
    """
    if settings.kind != "llama_cpp":
        return settings.kind
    from stage_agent.runtimes.llama_cpp.build import read_build

    return read_build(settings.llama_server, settings.llama_rpc_server).label
