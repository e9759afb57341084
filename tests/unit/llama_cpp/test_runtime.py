"""What the driver sees of a split over two nodes, in order and with every fault that an engine is known for."""

import asyncio
import os
import signal

import httpx
import psutil
import pytest

from config.settings import RuntimeSettings
from protocol.ballots import StageShare
from stage_agent.runtimes.interface import RuntimeFailure
from stage_agent.runtimes.llama_cpp.build import read_build
from stage_agent.tunnel.tunnels import http_door
from tests.integration.transport_mesh import run
from tests.unit.llama_cpp.stages import EPOCH, program, two_stages


async def failure_of_head(head, worker) -> RuntimeFailure:
    """What the head's load ends with while the worker is up."""
    await worker.load()
    with pytest.raises(RuntimeFailure) as caught:
        await head.load()
    return caught.value


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def test_head_and_worker_become_ready_in_any_order_and_the_head_s_http_is_reached_from_both_nodes(tmp_path) -> None:
    async def main():
        async with two_stages(tmp_path) as (head, worker):
            loading = asyncio.ensure_future(head.load())  # waits for the worker's door
            await asyncio.sleep(0.3)
            assert not loading.done()
            assert await worker.load() == [(0, 500), (500, 500)]
            seen = await loading
            assert not head.runtime._head._directory.exists()  # the key's file is gone as soon as it was read
            assert seen[0] == (0, 300)
            assert seen[-1] == (300, 300)
            assert seen == sorted(seen)
            assert head.tunnels.door(http_door("default")) is None  # not before it is activated
            await head.runtime.activate(EPOCH, head.assignment)
            answer = await worker.tunnels.ask(head.node.id, http_door("default"))
            door = head.tunnels.door(http_door("default"))
            assert (answer.open, answer.secret) == (True, door.secret)
            async with httpx.AsyncClient(trust_env=False) as client:
                url = f"http://127.0.0.1:{door.port}/completion"
                assert (await client.post(url)).status_code == 401
                assert (await client.post(url, headers={"authorization": f"Bearer {door.secret}"})).status_code == 200
            timing = head.runtime.timings()
            assert (timing.tpot_us, timing.tpot_tokens, timing.us_per_layer) == (12_500, 4, None)
            assert worker.runtime.timings() is None
            assert not head.runtime.keeps(head.assignment)  # an rpc-server is new with every plan
            await head.runtime.unload()
            assert head.tunnels.door(http_door("default")) is None
            await worker.runtime.unload()
            assert children() == []

    run(main())


def test_two_builds_are_refused_before_anything_is_loaded_and_both_are_named(tmp_path) -> None:
    async def main():
        async with two_stages(tmp_path, engines=("llama.cpp aaa rpc 4.0.3", "llama.cpp bbb rpc 7.0.0")) as (
            head,
            worker,
        ):
            failure = await failure_of_head(head, worker)
            assert failure.reason == "engine_mismatch"
            assert "llama.cpp aaa rpc 4.0.3" in failure.detail
            assert "llama.cpp bbb rpc 7.0.0" in failure.detail
            assert head.runtime._head.program is None

    run(main())


def test_an_endpoint_that_the_engine_leaves_out_is_refused_by_the_node_s_name(tmp_path) -> None:
    async def main():
        async with two_stages(tmp_path, fault="drop") as (head, worker):
            failure = await failure_of_head(head, worker)
            assert failure.reason == "engine_not_ready"
            assert worker.node.id[:8] in failure.detail
            assert "Failed to connect" in failure.detail

    run(main())


def test_a_placement_other_than_the_plan_s_is_refused(tmp_path) -> None:
    async def main():
        async with two_stages(tmp_path, fault="misplace") as (head, worker):
            failure = await failure_of_head(head, worker)
            assert failure.reason == "range_invalid"
            assert "layer 0 is on RPC1, the plan says RPC0" in failure.detail

    run(main())


def test_a_build_that_the_cpu_ends_at_the_first_token_is_told_with_its_reason_and_is_started_once(tmp_path) -> None:
    def starts() -> int:
        return len((tmp_path / "starts").read_text().splitlines())

    async def main():
        async with two_stages(tmp_path, fault="sigill", limit=9) as (head, worker):
            failure = await failure_of_head(head, worker)
            assert failure.reason == "engine_mismatch"
            assert "SIGILL" in failure.detail
            assert "AVX-512" in failure.detail
            once = starts()
            for _ in range(3):
                with pytest.raises(RuntimeFailure) as again:
                    await head.load()
                assert again.value.reason == "engine_mismatch"
                assert again.value.detail.startswith("not started again: engine was killed by SIGILL")
            assert starts() == once
            os.utime(tmp_path / "engine")  # as another build would be
            with pytest.raises(RuntimeFailure, match="engine was killed by SIGILL"):
                await head.load()
            assert starts() > once

    run(main())


def test_more_stages_than_llama_cpp_takes_are_refused_before_anything_is_asked_of_them(tmp_path) -> None:
    async def main():
        async with two_stages(tmp_path) as (head, _):
            shares = tuple(
                StageShare(node_id=f"n{index}", layer_start=index, layer_end=index + 1, parameter_bytes=1)
                for index in range(17)
            )
            head.assignment = head.assignment.model_copy(update={"stages": shares})
            with pytest.raises(RuntimeFailure, match=r"17 rpc-servers: llama\.cpp takes at most 16") as caught:
                await head.load()
            assert caught.value.reason == "range_invalid"

    run(main())


def test_a_model_file_other_than_the_plan_s_is_told(tmp_path) -> None:
    async def main():
        async with two_stages(tmp_path, wrong_model=True) as (head, worker):
            failure = await failure_of_head(head, worker)
            assert (failure.reason, failure.detail) == ("model_unavailable", "m.gguf is another model than the plan's")

    run(main())


def test_a_worker_that_never_comes_ends_the_head_s_load_at_its_deadline_and_nothing_is_left(tmp_path) -> None:
    async def main():
        async with two_stages(tmp_path, deadline_us=700_000) as (head, _):
            with pytest.raises(RuntimeFailure, match="no progress within the load deadline") as caught:
                await head.load()
            assert caught.value.reason == "engine_not_ready"
            assert children() == []

    run(main())


def test_unload_ends_a_running_load(tmp_path) -> None:
    async def main():
        async with two_stages(tmp_path) as (head, _):
            loading = asyncio.ensure_future(head.load())
            await asyncio.sleep(0.2)
            await head.runtime.unload()
            with pytest.raises(RuntimeFailure, match="cancelled"):
                await loading
            assert children() == []

    run(main())


def test_the_loss_of_another_stage_costs_the_head_s_node_none_of_its_starts(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("stage_agent.runtimes.llama_cpp.runtime._PEER_CAUSE_S", 0.1)

    async def main():
        async with two_stages(tmp_path, fault="lose", limit=0) as (head, worker):
            await worker.load()
            for _ in range(2):
                with pytest.raises(RuntimeFailure) as caught:
                    await head.load()
                assert caught.value.reason == "stage_lost"
                assert "a stage was lost" in caught.value.detail

    run(main())


def test_a_worker_that_dies_of_a_missing_instruction_says_so_itself_and_the_head_is_not_blamed(tmp_path) -> None:
    async def main():
        async with two_stages(tmp_path, fault="worker-sigill", limit=0) as (head, worker):
            await worker.load()
            died = asyncio.ensure_future(worker.runtime.wait_failed())
            with pytest.raises(RuntimeFailure) as caught:
                await head.load()
            assert caught.value.reason == "engine_mismatch"  # its own worker died of the same
            failure = await asyncio.wait_for(died, 5)
            assert failure.reason == "engine_mismatch"
            assert "SIGILL" in failure.detail
            assert "use another build" in failure.detail
            assert children() == []

    run(main())


def test_a_head_that_lost_a_stage_waits_for_the_lost_node_s_word_which_ends_its_attempt(tmp_path) -> None:
    async def main():
        async with two_stages(tmp_path, fault="lose") as (head, worker):
            await worker.load()
            loading = asyncio.ensure_future(head.load())
            while head.runtime._head is None or not head.runtime._head._stage_lost:  # noqa: ASYNC110 - another process decides
                await asyncio.sleep(0.02)
            assert not loading.done()
            await head.runtime.unload()  # what the coordinator does when the worker's node has spoken
            with pytest.raises(RuntimeFailure, match="cancelled"):
                await loading

    run(main())


@pytest.mark.parametrize(
    ("number", "word"), [(signal.SIGPIPE, "SIGPIPE"), (signal.SIGILL, "SIGILL"), (signal.SIGABRT, "aborted")]
)
def test_each_way_a_worker_is_known_to_die_is_seen_and_told_in_words(number, word, tmp_path) -> None:
    async def main():
        async with two_stages(tmp_path) as (head, worker):
            await worker.load()
            await head.load()
            (process,) = psutil.Process(worker.runtime._worker.engine.pid).children()
            waiting = asyncio.ensure_future(worker.runtime.wait_failed())
            process.send_signal(number)
            assert word in (await asyncio.wait_for(waiting, 5)).detail

    run(main())


@pytest.mark.parametrize("which", ["worker of the head", "head", "remote worker"])
def test_a_program_that_dies_by_itself_is_reported_once_by_its_own_node(which, tmp_path) -> None:
    async def main():
        async with two_stages(tmp_path) as (head, worker):
            await worker.load()
            await head.load()
            engine = {
                "worker of the head": head.runtime._worker, "head": head.runtime._head.program, "remote worker": worker.runtime._worker,
            }[which].engine  # fmt: skip
            (process,) = psutil.Process(engine.pid).children()
            reporting = worker if which == "remote worker" else head
            waiting = asyncio.ensure_future(reporting.runtime.wait_failed())
            process.kill()
            failure = await asyncio.wait_for(waiting, 5)
            assert failure.reason == "engine_exited"
            assert "SIGKILL" in failure.detail

    run(main())


def test_the_first_stage_may_stay_in_the_head_s_own_process(tmp_path) -> None:
    async def main():
        async with two_stages(tmp_path, llama_head_stage="cpu") as (head, worker):
            await worker.load()
            loading = head.load()
            with pytest.raises(RuntimeFailure) as caught:  # the stand-in does not say where CPU layers are
                await loading
            assert "layer 0 is on RPC0, the plan says CPU" in caught.value.detail
            assert head.runtime._worker is None

    run(main())


def test_the_build_is_read_from_both_programs(tmp_path) -> None:
    engine = program(tmp_path)
    assert read_build(engine, engine).label == "llama.cpp abc123 rpc 4.0.3"


@pytest.mark.parametrize(
    ("head_says", "worker_says", "past_the_tunnel"),
    [("", "", False), ("127.0.0.3", "", False), ("", "127.0.0.2", False), ("127.0.0.3", "127.0.0.2", True)],
)
def test_engines_talk_past_the_tunnel_only_where_both_operators_say_so(
    tmp_path, head_says, worker_says, past_the_tunnel
) -> None:
    async def main():
        async with two_stages(tmp_path, direct=(head_says, worker_says)) as (head, worker):
            await worker.load()
            listens = {each.laddr.ip for child in children() for each in child.net_connections("tcp")}
            assert listens == {worker_says or "127.0.0.1"}
            await head.load()
            assert (worker.tunnels.counters.opened == 0) == past_the_tunnel
            assert head.tunnels.counters.refused == worker.tunnels.counters.refused == 0

    run(main())


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "8.8.8.8", "lan", "192.168.1.300"])
def test_direct_mode_takes_a_private_address_of_this_machine_and_nothing_else(host) -> None:
    with pytest.raises(ValueError, match=r"strangers|not an IP address"):
        RuntimeSettings(kind="llama_cpp", llama_direct_host=host)
