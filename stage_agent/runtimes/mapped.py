"""The runtime that holds a stage's bytes and computes nothing.

It maps the file ranges of the assigned layers and reads every page once, so that "ready" means: these weights exist, are
whole, and fit in this machine's memory. It is the default because planning, assignment and fencing can be run with it
anywhere; it answers no request.
"""

import asyncio
import errno
import mmap
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from protocol.ballots import StageAssignment
from protocol.errors import ModelError
from protocol.fencing import PlanEpoch
from stage_agent.model_source import tensor_extents
from stage_agent.runtimes.interface import DecodeTiming, Report, RuntimeFailure, same_layers
from stage_agent.runtimes.threads import on_this_loop, run_in_thread

STEP_BYTES = 4 * 1024 * 1024
"""Pages are read in steps of this size; between two steps the load can be cancelled and reports progress."""
REPORTS_PER_LOAD = 50
_MADV_POPULATE_READ = 22
"""Linux 5.14; Python has no name for it yet."""

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
        if not self.hold([(extent.file, extent.name, extent.offset, extent.nbytes) for extent in extents], report):
            raise RuntimeFailure("range_invalid", "the assigned layers hold no tensors")

    def hold(self, extents: list[tuple[Path, str, int, int]], report: Report) -> int:
        """Map and read ``(file, tensor, offset, bytes)`` in file order; the bytes in all. Blocks: run it in a thread."""
        total = sum(size for _, _, _, size in extents)
        allowed = total if self._cap is None else min(total, self._cap)
        step_report = max(1, total // REPORTS_PER_LOAD)
        done, next_report = 0, 0
        for file, name, offset, size in sorted(extents, key=lambda extent: (str(extent[0]), extent[2])):
            view = self._view(file, name, offset + size)
            for start in range(0, size, STEP_BYTES):
                if self._stop.is_set():
                    raise RuntimeFailure("cancelled", "unloaded while loading")
                step = min(STEP_BYTES, size - start)
                if done < allowed:
                    _touch(view, file, offset + start, step)
                done += step
                if done >= next_report or done == total:
                    report(done, total)
                    next_report = done + step_report
        return total

    def _view(self, file: Path, name: str, end: int) -> mmap.mmap:
        """The file's map, made once. Reading a map behind the file's end is SIGBUS: the size is checked first."""
        view = self._maps.get(file)
        if view is None:
            try:
                with file.open("rb") as opened:
                    view = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                raise RuntimeFailure("model_unavailable", f"{file}: {error}") from None
            self._maps[file] = view
        if end > len(view):
            raise RuntimeFailure("model_mismatch", f"{file}: {name} ends behind the end of the file")
        return view


def _touch(view: mmap.mmap, file: Path, offset: int, size: int) -> None:
    """Bring the pages in. Linux can do it without a signal when the file has become shorter in the meantime."""
    start = offset // mmap.PAGESIZE * mmap.PAGESIZE
    if sys.platform == "linux":
        try:
            view.madvise(_MADV_POPULATE_READ, start, offset + size - start)
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: a kernel before 5.14
                raise RuntimeFailure("model_mismatch", f"{file}: cannot be read ({error.strerror})") from None
        else:
            return
    view.madvise(mmap.MADV_WILLNEED, start, offset + size - start)
    sum(view[offset : offset + size : mmap.PAGESIZE])
