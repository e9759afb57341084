"""Makes the runtime that the settings name; engines are imported only when they are used."""

from typing import assert_never

from config.settings import RuntimeSettings
from stage_agent.runtimes.context import RuntimeContext
from stage_agent.runtimes.interface import StageRuntime


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
        case _:
            assert_never(settings.kind)
