"""The runtime that holds a stage's bytes and computes nothing.

It maps the file ranges of the assigned layers and reads every page once, so that "ready" means: these weights exist, are
whole, and fit in this machine's memory. It is the default because planning, assignment and fencing can be run with it
anywhere; it answers no request.
"""

import asyncio
import mmap
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from protocol.ballots import StageAssignment
from protocol.errors import ModelError
from protocol.fencing import PlanEpoch
from stage_agent.model_source import TensorExtent, tensor_extents
from stage_agent.runtimes.interface import DecodeTiming, Report, RuntimeFailure, same_layers
from stage_agent.runtimes.threads import on_this_loop, run_in_thread

STEP_BYTES = 4 * 1024 * 1024
"""Pages are read in steps of this size; between two steps the load can be cancelled and reports progress."""
REPORTS_PER_LOAD = 50


ModelPath = Callable[[StageAssignment], Path]


class MappedRuntime:
    """A ``StageRuntime`` over memory maps. ``resident_cap_bytes`` bounds what is read in; the rest stays on disk."""

    def __init__(self, model_path: ModelPath, resident_cap_bytes: int | None = None) -> None:
        self._model_path = model_path
        self._cap = resident_cap_bytes
        self._maps: dict[Path, mmap.mmap] = {}
        self._assignment: StageAssignment | None = None
        self._stop = threading.Event()
        self._loading = asyncio.Lock()

    async def load(self, assignment: StageAssignment, report: Report) -> None:
        """Map and read the assigned ranges. Raises ``RuntimeFailure`` (model_unavailable, range_invalid, cancelled)."""
        async with self._loading:
            try:
                await run_in_thread(partial(self._load, assignment, on_this_loop(report)), self._stop)
            except BaseException:
                self._close()
                raise
            self._assignment = assignment

    def keeps(self, assignment: StageAssignment) -> bool:
        """Only the layers matter."""
        return self._assignment is not None and same_layers(self._assignment, assignment)

    async def activate(self, epoch: PlanEpoch, assignment: StageAssignment) -> None:
        """Nothing to do: there is no request to fence."""

    async def unload(self) -> None:
        """Unmap; a running load ends within one step."""
        self._stop.set()
        async with self._loading:
            self._close()

    async def wait_failed(self) -> RuntimeFailure:
        """A mapping does not die."""
        never: asyncio.Future[RuntimeFailure] = asyncio.get_running_loop().create_future()
        return await never

    def timings(self) -> DecodeTiming | None:
        """It decodes nothing."""
        return None

    def _close(self) -> None:
        while self._maps:
            self._maps.popitem()[1].close()

    def _load(self, assignment: StageAssignment, report: Report) -> None:
        try:
            first, last = "embedding" in assignment.roles, "readout" in assignment.roles
            path = self._model_path(assignment)
            extents = tensor_extents(path, assignment.layer_start, assignment.layer_end, first, last)
        except ModelError as error:
            raise RuntimeFailure("model_unavailable", str(error)) from None
        total = sum(extent.nbytes for extent in extents)
        if not total:
            raise RuntimeFailure("range_invalid", "the assigned layers hold no tensors")
        allowed = total if self._cap is None else min(total, self._cap)
        step_report = max(1, total // REPORTS_PER_LOAD)
        done, next_report = 0, 0
        for extent in sorted(extents, key=lambda extent: (str(extent.file), extent.offset)):
            view = self._view(extent)
            for start in range(0, extent.nbytes, STEP_BYTES):
                if self._stop.is_set():
                    raise RuntimeFailure("cancelled", "unloaded while loading")
                size = min(STEP_BYTES, extent.nbytes - start)
                if done < allowed:
                    _touch(view, extent.offset + start, size)
                done += size
                if done >= next_report or done == total:
                    report(done, total)
                    next_report = done + step_report

    def _view(self, extent: TensorExtent) -> mmap.mmap:
        """The file's map, made once. Reading a map behind the file's end is SIGBUS: the size is checked first."""
        view = self._maps.get(extent.file)
        if view is None:
            try:
                with extent.file.open("rb") as file:
                    view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                raise RuntimeFailure("model_unavailable", f"{extent.file}: {error}") from None
            self._maps[extent.file] = view
        if extent.offset + extent.nbytes > len(view):
            raise RuntimeFailure("model_mismatch", f"{extent.file}: {extent.name} ends behind the end of the file")
        return view


def _touch(view: mmap.mmap, offset: int, size: int) -> None:
    """Read one byte of every page."""
    sum(view[offset : offset + size : mmap.PAGESIZE])
