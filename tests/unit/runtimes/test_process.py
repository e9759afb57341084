"""A supervised engine: told its range, ready when it says so, stopped with everything it started, never left behind."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop

from config.settings import RuntimeSettings
from protocol.errors import ConfigurationError
from stage_agent.runtimes.budget import StartBudget
from stage_agent.runtimes.context import RuntimeContext
from stage_agent.runtimes.interface import RuntimeFailure
from stage_agent.runtimes.process import ProcessRuntime
from tests.unit.runtimes.engines import PYTHON, listener
from tests.unit.runtimes.stages import EPOCH, MemoryLink, assignments

Loop = Callable[[], asyncio.AbstractEventLoop]
ASSIGNMENT = assignments([(0, 2), (2, 5), (5, 6)])[1]


def settings(command: tuple[str, ...], **changes: Any) -> RuntimeSettings:
    # A range of its own keeps parallel test runs apart: each process starts looking at another port.
    first = 20_000 + os.getpid() % 900 * 10
    values = {"port_first": first, "port_last": first + 400, "stop_grace_us": 2_000_000, **changes}
    return RuntimeSettings(kind="process", command=command, **values)


def context(tasks: asyncio.TaskGroup, budget: StartBudget) -> RuntimeContext:
    return RuntimeContext(
        tasks=tasks,
        node_id="n1",
        epoch=EPOCH,
        link=MemoryLink().from_node("n1"),
        model_path=lambda _: Path("/models/a model.gguf"),
        peer_address=lambda node: f"{node}.example:7946" if node else "",
        budget=budget,
    )


@contextlib.asynccontextmanager
async def runtime(configured: RuntimeSettings, budget: StartBudget | None = None) -> AsyncIterator[ProcessRuntime]:
    async with asyncio.TaskGroup() as tasks:
        made = ProcessRuntime(configured, context(tasks, budget or StartBudget(3, 600_000_000)))
        try:
            yield made
        finally:
            await made.unload()


def run(test: Callable[[], Coroutine[Any, Any, None]], loop: Loop = uvloop.new_event_loop) -> None:
    """On uvloop, as the daemon: its subprocesses are its own code."""
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(asyncio.wait_for(test(), 30))


def ignore(_done: int, _total: int) -> None:
    pass


def said(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def gone(pid: int) -> bool:
    """Whether the process has ended; a zombie that nobody has collected yet has ended too."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


def until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_the_command_is_told_its_range_its_peers_its_port_and_its_epoch(tmp_path: Path) -> None:
    file = tmp_path / "said"
    command = listener("--file", str(file), "--layers", "{layer_start}:{layer_end}", "--model", "{model}")
    command += ("--peers", "{previous}|{next}|{driver}", "--epoch", "{epoch_term}", "--json", '{"keep": 1}')

    async def test() -> None:
        reports: list[tuple[int, int]] = []
        async with runtime(settings(command, environment={"ENGINE_FLAG": "on"})) as engine:
            await engine.load(ASSIGNMENT, lambda done, total: reports.append((done, total)))
            assert reports == [(0, 1), (1, 1)]
            (call,) = said(file)
            assert call["arguments"][2:] == [
                *("--file", str(file), "--layers", "2:5", "--model", "/models/a model.gguf"),
                *(
                    "--peers",
                    "n0.example:7946|n2.example:7946|n0.example:7946",
                    "--epoch",
                    "1",
                    "--json",
                    '{"keep": 1}',
                ),
            ]
            assert int(call["arguments"][1]) == engine.port
            assert call["environment"]["ENGINE_FLAG"] == "on"

    run(test)


def test_what_systemd_and_the_operator_gave_to_the_agent_does_not_reach_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "said"
    for name in ("STAGEMESH_API__TOKEN_FILE", "NOTIFY_SOCKET", "CREDENTIALS_DIRECTORY"):
        monkeypatch.setenv(name, "secret")

    async def test() -> None:
        async with runtime(settings(listener("--file", str(file)))) as engine:
            await engine.load(ASSIGNMENT, ignore)
            assert "secret" not in said(file)[0]["environment"].values()
            assert "PATH" in said(file)[0]["environment"]

    run(test)


def test_a_log_line_can_be_the_proof_of_readiness() -> None:
    async def test() -> None:
        command = (
            *PYTHON,
            "import time; print('loading'); time.sleep(0.2); print('all 3 layers ready', flush=True); time.sleep(99)",
        )
        async with runtime(settings(command, ready="log", ready_log_pattern=r"all \d+ layers ready")) as engine:
            started = time.monotonic()
            await engine.load(ASSIGNMENT, ignore)
            assert time.monotonic() - started > 0.2

    run(test)


def test_an_http_200_can_be_the_proof_and_503_is_not(tmp_path: Path) -> None:
    async def test() -> None:
        answered = tmp_path / "answered"
        async with runtime(settings(listener("--http", str(answered)), ready="http")) as engine:
            await engine.load(ASSIGNMENT, ignore)
            told = answered.read_text().splitlines()
        assert told == ["answered 503 Loading", "answered 503 Loading", "answered 200 OK"]

    run(test)


def test_an_engine_that_dies_is_reported_with_its_last_words() -> None:
    async def test() -> None:
        async with runtime(settings(listener())) as engine:
            await engine.load(ASSIGNMENT, ignore)
            waiting = asyncio.ensure_future(engine.wait_failed())
            await asyncio.sleep(0)
            assert not waiting.done()
            os.killpg(engine._engine.pid, signal.SIGKILL)
            failure = await waiting
            assert failure.reason == "engine_exited"
            assert "killed by signal 9" in failure.detail
            assert "it said last: listening on" in failure.detail

    run(test)


def test_unloading_is_not_a_failure_is_idempotent_and_ends_the_whole_process_group(tmp_path: Path) -> None:
    file = tmp_path / "said"

    async def test() -> None:
        async with runtime(settings(listener("--file", str(file), "--fork", "1"))) as engine:
            await engine.load(ASSIGNMENT, ignore)
            waiting = asyncio.ensure_future(engine.wait_failed())
            pids = [call["pid"] for call in said(file)]
            children = psutil.Process(pids[-1]).parent().children(recursive=True)
            assert len(children) >= 2
            await engine.unload()
            await engine.unload()
            assert all(until(lambda child=child: gone(child.pid)) for child in children)
            assert not waiting.done()
            waiting.cancel()

    run(test)


def test_an_engine_that_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    file = tmp_path / "said"

    async def test() -> None:
        configured = settings(listener("--file", str(file), "--stubborn", "1"), stop_grace_us=300_000)
        async with runtime(configured) as engine:
            await engine.load(ASSIGNMENT, ignore)
            started = time.monotonic()
            await engine.unload()
            assert 0.3 <= time.monotonic() - started < 3
            assert until(lambda: gone(said(file)[0]["pid"]))

    run(test)


def test_a_start_that_fails_is_tried_again_within_the_budget_and_then_refused(tmp_path: Path) -> None:
    file = tmp_path / "said"
    budget = StartBudget(1, 600_000_000)

    async def test() -> None:
        configured = settings(listener("--file", str(file), "--exit", "3"))
        async with runtime(configured, budget) as engine:
            with pytest.raises(RuntimeFailure) as refused:
                await engine.load(ASSIGNMENT, ignore)
            assert refused.value.reason == "engine_exited"
            assert "ended with code 3; it said last: no such device" in refused.value.detail
        assert len(said(file)) == 2
        async with runtime(configured, budget) as engine:
            with pytest.raises(RuntimeFailure) as refused:
                await engine.load(ASSIGNMENT, ignore)
            assert refused.value.reason == "restart_budget_exhausted"
        assert len(said(file)) == 2

    run(test)


def test_a_command_that_does_not_exist_is_named() -> None:
    async def test() -> None:
        async with runtime(settings(("/nowhere/engine", "{port}")), StartBudget(0, 1_000_000)) as engine:
            with pytest.raises(RuntimeFailure) as refused:
                await engine.load(ASSIGNMENT, ignore)
            assert "cannot start /nowhere/engine: No such file or directory" in refused.value.detail

    run(test)


def test_an_engine_that_is_never_ready_is_stopped_at_the_load_deadline(tmp_path: Path) -> None:
    file = tmp_path / "said"

    async def test() -> None:
        async with runtime(settings(listener("--file", str(file), "--delay", "60"))) as engine:
            hurried = ASSIGNMENT.model_copy(update={"load_deadline_us": 600_000})
            with pytest.raises(RuntimeFailure) as refused:
                await engine.load(hurried, ignore)
            assert refused.value.reason == "engine_not_ready"
            assert "engine starts" in refused.value.detail
            assert until(lambda: gone(said(file)[0]["pid"]))

    run(test)


def test_unloading_while_the_engine_starts_cancels_the_load(tmp_path: Path) -> None:
    file = tmp_path / "said"

    async def test() -> None:
        async with runtime(settings(listener("--file", str(file), "--delay", "60"))) as engine:
            loading = asyncio.ensure_future(engine.load(ASSIGNMENT, ignore))
            while not file.exists():  # noqa: ASYNC110 - another process decides
                await asyncio.sleep(0.02)
            await engine.unload()
            with pytest.raises(RuntimeFailure) as refused:
                await loading
            assert refused.value.reason == "cancelled"
            assert until(lambda: gone(said(file)[0]["pid"]))

    run(test)


def test_endless_output_without_a_newline_costs_no_memory() -> None:
    noisy = "import sys\nwhile True: sys.stdout.write('x' * 100000)"

    async def test() -> None:
        before = psutil.Process().memory_info().rss
        async with runtime(settings((*PYTHON, noisy), ready="log", ready_log_pattern="never")) as engine:
            with pytest.raises(RuntimeFailure):
                await engine.load(ASSIGNMENT.model_copy(update={"load_deadline_us": 700_000}), ignore)
        assert psutil.Process().memory_info().rss - before < 50_000_000

    run(test)


def test_a_new_plan_keeps_the_engine_only_when_its_command_line_would_be_the_same() -> None:
    async def test() -> None:
        plain = settings(listener("--layers", "{layer_start}:{layer_end}"))
        with_peers = settings(listener("--next", "{next}"))
        moved = ASSIGNMENT.model_copy(update={"next": "n7"})
        other_range = ASSIGNMENT.model_copy(update={"layer_end": 4})
        async with runtime(plain) as engine:
            assert not engine.keeps(ASSIGNMENT)
            await engine.load(ASSIGNMENT, ignore)
            assert engine.keeps(ASSIGNMENT)
            assert engine.keeps(moved)
            assert not engine.keeps(other_range)
        async with runtime(with_peers) as engine:
            await engine.load(ASSIGNMENT, ignore)
            assert not engine.keeps(moved)

    run(test)


AGENT = """
import asyncio, sys
from pathlib import Path
from tests.unit.runtimes.test_process import ASSIGNMENT, ignore, runtime, settings
from tests.unit.runtimes.engines import listener

async def main():
    options = ("--file", sys.argv[1], *sys.argv[2:])
    async with runtime(settings(listener(*options), stop_grace_us=500_000)) as engine:
        await engine.load(ASSIGNMENT, ignore)
        print("loaded", engine._engine.pid, flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("victim", "options"),
    [
        ("agent", ()),
        ("agent", ("--fork", "1")),
        ("agent", ("--stubborn", "1")),
        ("leash", ("--stubborn", "1")),
    ],
)
def test_nothing_is_left_when_the_agent_or_the_leash_is_killed(
    tmp_path: Path, victim: str, options: tuple[str, ...]
) -> None:
    file = tmp_path / "said"
    agent = subprocess.Popen([sys.executable, "-c", AGENT, str(file), *options], stdout=subprocess.PIPE, text=True)
    try:
        assert agent.stdout is not None
        leash = int(agent.stdout.readline().split()[1])
        family = [leash, *(child.pid for child in psutil.Process(leash).children(recursive=True))]
        assert len(family) >= (3 if "--fork" in options else 2)
        os.kill(agent.pid if victim == "agent" else leash, signal.SIGKILL)
        assert all(until(lambda pid=pid: gone(pid)) for pid in family)
    finally:
        agent.kill()
        agent.communicate()


def test_the_engine_dies_with_its_leash_even_while_the_agent_can_do_nothing(tmp_path: Path) -> None:
    file = tmp_path / "said"
    command = [sys.executable, "-c", AGENT, str(file), "--stubborn", "1"]
    agent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert agent.stdout is not None
        leash = int(agent.stdout.readline().split()[1])
        os.kill(agent.pid, signal.SIGSTOP)
        os.kill(leash, signal.SIGKILL)
        assert until(lambda: gone(said(file)[0]["pid"]))
    finally:
        agent.kill()
        agent.communicate()


@pytest.mark.parametrize("loop", [uvloop.new_event_loop, asyncio.new_event_loop])
def test_children_of_an_engine_do_not_outlive_a_killed_leash(tmp_path: Path, loop: Loop) -> None:
    file = tmp_path / "said"

    async def test() -> None:
        async with runtime(settings(listener("--file", str(file), "--fork", "1"))) as engine:
            await engine.load(ASSIGNMENT, ignore)
            leash = engine._engine.pid
            family = [child.pid for child in psutil.Process(leash).children(recursive=True)]
            os.kill(leash, signal.SIGKILL)
            assert (await engine.wait_failed()).reason == "engine_exited"
            assert all(until(lambda pid=pid: gone(pid)) for pid in family)

    run(test, loop)


@pytest.mark.parametrize(
    ("command", "changes", "message"),
    [
        ((), {}, "runtime.command is empty"),
        (("engine", "--range", "{layers}"), {}, "{layers} is unknown"),
        (("engine",), {"ready": "log"}, "ready_log_pattern is empty"),
        (("engine",), {"ready": "log", "ready_log_pattern": "("}, "ready_log_pattern"),
    ],
)
def test_a_command_that_cannot_work_is_refused_before_anything_starts(
    command: tuple[str, ...], changes: dict[str, Any], message: str
) -> None:
    async def test() -> None:
        with pytest.raises(ConfigurationError) as refused:
            ProcessRuntime(settings(command, **changes), context(asyncio.TaskGroup(), StartBudget(0, 1)))
        assert message in str(refused.value)

    run(test)
