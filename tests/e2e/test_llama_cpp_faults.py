"""The real programs in two in-process nodes: faults that a whole mesh is too slow to show, and placements that it does not use."""

import asyncio
import contextlib

import httpx
import psutil
import pytest

from stage_agent.library import ModelLibrary
from stage_agent.runtimes.interface import RuntimeFailure
from stage_agent.runtimes.llama_cpp.build import read_build
from stage_agent.tunnel.tunnels import Door
from tests.e2e.real_engine import MISSING_INSTRUCTION, real_model, real_programs
from tests.integration.transport_mesh import run
from tests.unit.llama_cpp.stages import EPOCH, two_stages

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("engine_time")]
LAYERS = 30
ENGINE_S = 120_000_000


@pytest.fixture(scope="module")
def real() -> dict[str, object]:
    """What two nodes need to run SmolLM2 on the CPU."""
    path = real_model()
    return {
        **real_programs(), "model_path": lambda _assignment: path, "layers": LAYERS, "cut": 10, "deadline_us": ENGINE_S,
        "llama_threads": 1, "llama_devices": "CPU", "llama_output_layer": "auto",
    }  # fmt: skip


async def both(head, worker) -> None:
    """Load both stages; on a CPU that the build is not made for, say so."""
    await worker.load()
    try:
        await head.load()
    except RuntimeFailure as failure:
        if "SIGILL" in failure.detail:
            pytest.skip(MISSING_INSTRUCTION)
        raise


async def complete(head, prompt="The capital of France is", tokens=4) -> dict:
    door = head.runtime._head._door
    headers = {"authorization": f"Bearer {door.secret}"}
    body = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "cache_prompt": False}
    async with httpx.AsyncClient(trust_env=False, timeout=100) as client:
        answer = await client.post(f"http://127.0.0.1:{door.port}/completion", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def refusal(head) -> RuntimeFailure:
    with pytest.raises(RuntimeFailure) as caught:
        await head.load()
    return caught.value


def redirect(worker, port: int) -> None:
    """The worker's door leads to another port, as if something else had taken the rpc-server's place."""
    name, door = worker.runtime._door
    worker.tunnels.open_door(name, Door(port, engine=door.engine, allowed=door.allowed))


def test_layers_in_the_head_s_own_process_and_a_quantised_cache_run_as_planned_whatever_was_said_of_flash_attention(
    tmp_path, real
) -> None:
    async def main():
        told = {**real, "llama_head_stage": "cpu", "cache_type": "q8_0", "llama_arguments": ("-fa", "off")}
        async with two_stages(tmp_path, **told) as (head, worker):
            await both(head, worker)
            assert head.runtime._worker is None
            assert head.runtime._head._assigned[9] == "CPU"
            assert head.runtime._head._assigned[10] == "RPC0"
            (server,) = psutil.Process(head.runtime._head.program.engine.pid).children()
            assert "-ctk q8_0 -ctv q8_0" in " ".join(server.cmdline())
            assert (await complete(head))["content"].startswith(" Paris")

    run(main())


def test_an_rpc_server_that_is_gone_is_not_left_out_silently(tmp_path, real) -> None:
    async def main():
        async with two_stages(tmp_path, **real) as (head, worker):
            await worker.load()
            redirect(worker, 1)
            failure = await refusal(head)
            assert failure.reason == "engine_not_ready"
            assert f"cannot use the rpc-server of {worker.node.id[:8]}" in failure.detail

    run(main())


MAJOR_VERSION_AT = 8
"""In what an rpc-server says first: a length of eight bytes, then the protocol's major version."""


async def pump(reader, writer, greeting: bytearray | None = None) -> None:
    """One direction of a relay, at whatever size the bytes come; of a ``greeting`` the major version is made another."""
    with contextlib.suppress(ConnectionError):
        while piece := bytearray(await reader.read(65_536)):
            if greeting is not None and len(greeting) <= MAJOR_VERSION_AT:
                position = MAJOR_VERSION_AT - len(greeting)
                greeting += piece
                if position < len(piece):
                    piece[position] += 1
            writer.write(piece)
    writer.close()


async def of_another_version(worker) -> asyncio.Server:
    """A relay before the rpc-server that makes its protocol's major version another."""
    to = worker.runtime._door[1].port

    async def carry(reader, writer) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", to)
        await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer, bytearray()))

    return await asyncio.start_server(carry, "127.0.0.1", 0)


def test_an_rpc_server_of_another_protocol_is_refused_and_the_engine_s_own_word_told(tmp_path, real) -> None:
    async def main():
        async with two_stages(tmp_path, **real) as (head, worker):
            await worker.load()
            server = await of_another_version(worker)
            redirect(worker, server.sockets[0].getsockname()[1])
            failure = await refusal(head)
            assert failure.reason == "engine_not_ready"
            assert worker.node.id[:8] in failure.detail
            assert "version mismatch" in failure.detail
            server.close()

    run(main())


def test_a_file_other_than_the_plan_s_is_refused_before_the_engine_reads_it(tmp_path, real) -> None:
    async def main():
        told = {**real, "model_path": ModelLibrary().path_of, "source": str(real_model()), "digest": "5" * 64}
        async with two_stages(tmp_path, **told) as (head, worker):
            await worker.load()
            failure = await refusal(head)
            assert failure.reason == "model_unavailable"
            assert "is another model than the plan's" in failure.detail
            assert head.runtime._head.program is None

    run(main())


def test_weights_kept_on_disk_are_not_sent_again_and_a_stage_lost_in_mid_answer_ends_the_head_without_blame(
    tmp_path, real
) -> None:
    async def loaded_once(sent: list[int], *, lose: bool) -> None:
        async with two_stages(tmp_path, last_bytes=10**9, **cached) as (head, worker):
            await both(head, worker)
            await head.runtime.activate(EPOCH, head.assignment)
            sent.append(sum(each.counters.sent_bytes for each in head.runtime._head._listeners.values()))
            assert worker.tunnels.counters.opened > 150  # one for every tensor,
            assert not worker.node.transport.counters.rejected  # and not taken for a flood
            if lose:
                await loses_its_worker(head, worker)

    async def main():
        sent: list[int] = []
        await loaded_once(sent, lose=False)
        await loaded_once(sent, lose=True)
        assert sent[0] > 70_000_000
        assert sent[1] < sent[0] - 25_000_000  # the output layer is the one tensor above the engine's 10 MiB
        assert sum(file.stat().st_size for file in (tmp_path / "kept" / "rpc").iterdir()) == 30_081_024

    cached = {**real, "cut": 1, "llama_cache": True, "environment": {"LLAMA_CACHE": str(tmp_path / "kept")}}
    run(main())


async def loses_its_worker(head, worker) -> None:
    """In the middle of an answer."""
    answering = asyncio.ensure_future(complete(head, tokens=500))
    await asyncio.sleep(1.0)
    began_s = asyncio.get_running_loop().time()
    (process,) = psutil.Process(worker.runtime._worker.engine.pid).children()
    process.kill()
    failure = await asyncio.wait_for(head.runtime.wait_failed(), 30)
    assert failure.reason == "stage_lost"
    assert "aborted" in failure.detail
    assert asyncio.get_running_loop().time() - began_s < 20
    with pytest.raises(httpx.HTTPError):
        await answering


def test_the_build_is_read_from_the_real_programs() -> None:
    programs = real_programs()
    assert read_build(programs["llama_server"], programs["llama_rpc_server"]).label == "llama.cpp 571d0d5 rpc 4.0.3"
