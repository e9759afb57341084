"""Blocking work beside the loop, with an end: a cancelled caller waits until the thread has really stopped."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

from stage_agent.runtimes.interface import Report

Result = TypeVar("Result")


async def run_in_thread(
    function: Callable[[], Result], stop: threading.Event, executor: Executor | None = None
) -> Result:
    """The result of ``function``, which must look at ``stop`` often. On cancellation sets ``stop`` and waits for it."""
    running = asyncio.get_running_loop().run_in_executor(executor, function)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # retrieved: the caller has gone, and its cancellation is what counts
        raise


def on_this_loop(report: Report) -> Report:
    """``report`` as a thread may call it; runs on the current loop, in order, or not at all once the loop has closed."""
    loop = asyncio.get_running_loop()

    def hand_over(done: int, total: int) -> None:
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(report, done, total)

    return hand_over
