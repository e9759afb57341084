"""The process of ``stagemesh run``: settings, log, loop and the node. Knows nothing of the command line's libraries."""

import asyncio
from pathlib import Path

from config.load import load_settings
from config.log import set_up_logging
from protocol.errors import StagemeshError
from stage_agent.node import run_node


def run_daemon(config: Path | None, state_dir: Path | None) -> None:
    """Run this machine's agent until it is told to end. Raises ``StagemeshError`` for what a person can mend."""
    flags = {"node.state_dir": None if state_dir is None else str(state_dir.absolute())}
    settings = load_settings(config, flags)
    set_up_logging(settings.log)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        try:
            runner.run(run_node(settings, lambda: load_settings(config, flags)))
        except BaseExceptionGroup as group:
            raise _cause(group) from None


def _cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one fault of a person or peer in ``group``; the group itself when there is anything else in it."""
    faults, others = group.split(StagemeshError)
    while isinstance(faults, BaseExceptionGroup) and others is None:
        if not isinstance(faults.exceptions[0], BaseExceptionGroup):
            return faults.exceptions[0]
        faults = faults.exceptions[0]
    return group


def _loop_factory() -> "type[asyncio.AbstractEventLoop] | None":
    """Uvloop where it exists: a third of the CPU per datagram."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.Loop
