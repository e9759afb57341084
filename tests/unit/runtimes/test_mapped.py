"""The default runtime: ready means that the bytes are there, whole, and were read."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from config.settings import RuntimeSettings
from protocol.ballots import StageAssignment
from protocol.errors import ModelError
from stage_agent.model_source import tensor_extents
from stage_agent.runtimes.budget import StartBudget
from stage_agent.runtimes.context import RuntimeContext
from stage_agent.runtimes.factory import make_runtime
from stage_agent.runtimes.interface import RuntimeFailure, StageRuntime
from stage_agent.runtimes.mapped import MappedRuntime
from stage_agent.runtimes.process import ProcessRuntime
from stage_agent.runtimes.reference.runtime import ReferenceRuntime
from tests.unit.runtimes.stages import EPOCH, MemoryLink, assignments

FIRST, MIDDLE, LAST = assignments([(0, 2), (2, 4), (4, 6)])


def load(runtime: StageRuntime, assignment: StageAssignment) -> list[tuple[int, int]]:
    reports: list[tuple[int, int]] = []

    async def run() -> None:
        await runtime.load(assignment, lambda done, total: reports.append((done, total)))
        await runtime.activate(EPOCH, assignment)
        assert runtime.keeps(assignment)
        await runtime.unload()
        await runtime.unload()

    asyncio.run(run())
    return reports


@pytest.mark.parametrize(
    ("assignment", "first", "last"), [(FIRST, True, False), (MIDDLE, False, False), (LAST, False, True)]
)
def test_a_stage_reads_exactly_its_own_tensors(
    model: Path, assignment: StageAssignment, first: bool, last: bool
) -> None:
    expected = sum(
        extent.nbytes for extent in tensor_extents(model, assignment.layer_start, assignment.layer_end, first, last)
    )
    reports = load(MappedRuntime(lambda _: model), assignment)
    assert reports[-1] == (expected, expected)
    assert reports == sorted(reports)
    assert 0 < expected < model.stat().st_size


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RuntimeFailure) as refused:
        load(MappedRuntime(lambda _: tmp_path / "gone.gguf"), FIRST)
    assert refused.value.reason == "model_unavailable"
    assert "gone.gguf" in refused.value.detail


def test_a_truncated_file_is_refused_and_not_a_bus_error(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "short.gguf"
    copy.write_bytes(model.read_bytes()[:-1000])
    with pytest.raises(RuntimeFailure) as refused:
        load(MappedRuntime(lambda _: copy), LAST)
    assert refused.value.reason == "model_unavailable"
    assert "truncated" in refused.value.detail


def test_a_range_without_tensors_is_refused(model: Path) -> None:
    nowhere = MIDDLE.model_copy(update={"layer_start": 50, "layer_end": 60})
    with pytest.raises(RuntimeFailure) as refused:
        load(MappedRuntime(lambda _: model), nowhere)
    assert refused.value.reason == "range_invalid"


def test_a_model_that_cannot_be_found_by_its_digest_is_a_failure_of_the_load() -> None:
    def nowhere(_: StageAssignment) -> Path:
        raise ModelError("no model with digest 000… on this node")

    with pytest.raises(RuntimeFailure, match="no model with digest"):
        load(MappedRuntime(nowhere), FIRST)


def test_only_as_much_as_the_cap_allows_becomes_resident(tmp_path: Path) -> None:
    size = 64 * 1024 * 1024
    path = tmp_path / "weights"
    with path.open("wb") as file:
        file.truncate(size)
    runtime = MappedRuntime(lambda _: path, resident_cap_bytes=size // 4)
    total = runtime.hold([(path, "a", 0, size // 2), (path, "b", size // 2, size // 2)], lambda _done, _total: None)
    assert total == size
    resident = resident_bytes(path)
    assert size // 4 <= resident < size // 2


def test_a_file_that_shrinks_while_it_is_read_ends_the_load_and_not_the_daemon(tmp_path: Path) -> None:
    size = 64 * 1024 * 1024
    path = tmp_path / "weights"
    path.write_bytes(b"x")
    with path.open("r+b") as file:
        file.truncate(size)

    def shrink(_done: int, _total: int) -> None:
        with path.open("r+b") as file:
            file.truncate(4096)

    with pytest.raises(RuntimeFailure) as refused:
        MappedRuntime(lambda _: path).hold([(path, "a", 0, size)], shrink)
    assert refused.value.reason == "model_mismatch"


def resident_bytes(path: Path) -> int:
    """What of this process's maps of ``path`` is in memory, as the kernel counts it."""
    counted, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            counted += int(line.split()[1]) * 1024
    return counted


def test_unloading_ends_a_running_load(tmp_path: Path) -> None:
    async def run() -> RuntimeFailure:
        runtime = MappedRuntime(lambda _: slow_path())
        release = asyncio.Event()
        loop = asyncio.get_running_loop()

        def slow_path() -> Path:
            asyncio.run_coroutine_threadsafe(release.wait(), loop).result(10)
            return tmp_path / "any"

        loading = asyncio.ensure_future(runtime.load(FIRST, lambda _done, _total: None))
        await asyncio.sleep(0)
        unloading = asyncio.ensure_future(runtime.unload())
        await asyncio.sleep(0)
        release.set()
        await unloading
        with pytest.raises(RuntimeFailure) as refused:
            await loading
        return refused.value

    assert asyncio.run(run()).reason in {"cancelled", "model_unavailable"}


def test_another_range_or_context_needs_a_new_load_and_new_neighbours_do_not(model: Path) -> None:
    async def run() -> list[bool]:
        runtime = MappedRuntime(lambda _: model)
        await runtime.load(MIDDLE, lambda _done, _total: None)
        changes: list[dict[str, Any]] = [
            {},
            {"next": "n9", "previous": "n8", "stage_index": 4, "first_request_id": 77},
            {"layer_end": 5},
            {"context_length": 9},
            {"lanes": 9},
            {"cache_type": "q8_0"},
            {"model_digest": "1" * 64},
        ]
        kept = [runtime.keeps(MIDDLE.model_copy(update=change)) for change in changes]
        await runtime.unload()
        return kept

    assert asyncio.run(run()) == [True, True, False, False, False, False, False]


def test_the_settings_name_the_runtime() -> None:
    async def run() -> list[type]:
        made = []
        for settings in (
            RuntimeSettings(),
            RuntimeSettings(kind="process", command=("engine", "{port}")),
            RuntimeSettings(kind="reference"),
        ):
            async with asyncio.TaskGroup() as tasks:
                context = RuntimeContext(
                    tasks=tasks,
                    node_id="n0",
                    epoch=EPOCH,
                    link=MemoryLink().from_node("n0"),
                    model_path=lambda _: Path("model"),
                    peer_address=lambda _: "",
                    budget=StartBudget(1, 1),
                )
                runtime = make_runtime(settings, context)
                made.append(type(runtime))
                assert runtime.timings() is None
                await runtime.unload()
        return made

    assert asyncio.run(run()) == [MappedRuntime, ProcessRuntime, ReferenceRuntime]
