"""Measured: a file between two processes (read, TLS, hashed, written, installed) beside a bare asyncio TLS copy of it.

Results are appended to ``results/artifacts.jsonl`` with the machine's conditions; run with ``make bench``.
"""

import asyncio
import hashlib
import os
import statistics
import time

import pytest

from protocol.quic.tls import LaneContexts
from stage_agent.artifacts.partial_file import PartialFile
from stage_agent.artifacts.store import hash_file
from stage_agent.model_source import open_model
from tests.bench import test_transport as transport
from tests.bench.rows import append, percentile
from tests.bench.test_transport import Far, two
from tests.fixtures_model import TensorSpec, gguf_bytes, metadata, tensors
from tests.integration.artifact_mesh import Holder, assignment_of, row_of
from tests.integration.transport_mesh import run, running

pytestmark = [pytest.mark.bench, pytest.mark.timeout(900)]
MIB = 1_048_576
SIZE_MIB = 192
ROUNDS = 4

HOLDER = """
import asyncio, json, resource, sys
from pathlib import Path
from protocol.quic.identity import Identity
from protocol.quic.mesh_files import load_membership
from tests.integration.artifact_mesh import Holder
from tests.integration.transport_mesh import Node, run, running

async def main():
    state = Path(sys.argv[1])
    node = Node(Identity.load(state), "beta", load_membership(state).book())
    async with running(node), asyncio.TaskGroup() as group:
        holder = Holder(node, state / "cache", Path(sys.argv[2]), group, mode="open")
        await holder.artifacts.prepare()
        print(node.transport.port, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        usage = resource.getrusage(resource.RUSAGE_SELF)
        print(json.dumps(usage.ru_utime + usage.ru_stime), flush=True)

run(main(), loop="uvloop")
"""

BARE = """
import asyncio, sys
from pathlib import Path
import uvloop
from protocol.quic.identity import Identity
from protocol.quic.mesh_files import load_membership
from protocol.quic.tls import LaneContexts

async def serve(reader, writer):
    with open(sys.argv[2], "rb", buffering=0) as file:
        while chunk := file.read(1048576):
            writer.write(chunk)
            await writer.drain()
    writer.close()

async def main():
    state = Path(sys.argv[1])
    contexts = LaneContexts(Identity.load(state), load_membership(state).book())
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=contexts.server(), limit=1048576)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)

uvloop.run(main())
"""


def model(tmp_path, mib):
    specs = [*tensors(2), TensorSpec("blk.1.ffn_up.weight", (64, mib * MIB // 256))]
    content = bytearray(gguf_bytes(metadata(layers=2), specs))
    content[MIB:] = os.urandom(len(content) - MIB)
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    return path


async def bare_copy(context, port, target):
    """Read the file over TLS and write it: no hash, no fsync, no limits."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname="", limit=MIB)
    begun = time.monotonic()
    size = 0
    with target.open("wb", buffering=0) as file:
        while chunk := await reader.read(MIB):
            file.write(chunk)
            size += len(chunk)
    took = time.monotonic() - begun
    writer.close()
    return size / MIB / took


async def watch_lateness(late_ms):
    """How late a timer of 2 ms comes on the receiver's loop: what a heartbeat would wait."""
    while True:
        begun = time.monotonic()
        await asyncio.sleep(0.002)
        late_ms.append((time.monotonic() - begun) * 1_000 - 2)


def test_a_verified_transfer_beside_a_bare_tls_copy(tmp_path):
    path = model(tmp_path, SIZE_MIB)
    digest = open_model(path).digest
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()

    async def main():
        make, far_identity, book, near, state = two(tmp_path)
        far, bare = Far(HOLDER, state, str(path)), Far(BARE, state, str(path))
        alpha = make()
        ours, theirs, cpu, late_ms = [], [], [], []
        async with running(alpha), asyncio.TaskGroup() as group:
            await transport.connect(alpha, far_identity, far.port)
            context = LaneContexts(near, book).client()
            for turn in range(ROUNDS):
                theirs.append(await bare_copy(context, bare.port, tmp_path / "copy"))
                holder = Holder(alpha, tmp_path / f"cache-{turn}", None, group, mode="open", give_up_us=120_000_000)
                await holder.artifacts.prepare()
                holder.rows[far_identity.node_id] = row_of(alpha, holds=(digest,)).model_copy(
                    update={"node_id": far_identity.node_id}
                )
                if turn == 0:  # the holder hashes its file when first asked
                    begun = time.monotonic()
                    await holder.ensure(assignment_of(digest, 0, 2))
                    first_s = time.monotonic() - begun
                    continue
                watching = group.create_task(watch_lateness(late_ms))
                begun, busy = time.monotonic(), time.process_time()
                await holder.ensure(assignment_of(digest, 0, 2))
                watching.cancel()
                ours.append(path.stat().st_size / MIB / (time.monotonic() - begun))
                cpu.append((time.process_time() - busy) / SIZE_MIB * 1_000)
                assert (holder.root / sha256[:2] / sha256).stat().st_size == path.stat().st_size
        far_cpu = far.stop()
        bare.stop()
        ratio = statistics.median(ours) / statistics.median(theirs)
        append(
            "artifacts", "artifact_over_bare_tls_copy", file_mib=SIZE_MIB, ours_mib_per_s=statistics.median(ours),
            bare_mib_per_s=statistics.median(theirs), ratio=ratio, first_with_hashing_s=first_s,
            loop_late_p99_ms=percentile(late_ms, 0.99), loop_late_max_ms=max(late_ms), receiver_cpu_ms_per_mib=statistics.median(cpu), holder_cpu_ms_per_mib=far_cpu * 1_000 / SIZE_MIB / ROUNDS,
        )  # fmt: skip
        assert ratio >= 0.7

    run(main(), loop="uvloop")


def test_hashing_and_storing_without_a_network(tmp_path):
    path = model(tmp_path, SIZE_MIB)
    begun = time.monotonic()
    sha256 = hash_file(path, lambda: False)
    hashing = SIZE_MIB / (time.monotonic() - begun)
    content = path.read_bytes()
    begun = time.monotonic()
    partial = PartialFile(tmp_path, sha256, len(content))
    for start in range(0, len(content), 524_288):
        partial.append(content[start : start + 524_288], "peer")
    partial.sync()
    storing = SIZE_MIB / (time.monotonic() - begun)
    partial.close()
    begun = time.monotonic()
    resumed = PartialFile(tmp_path, sha256, len(content))
    resuming = SIZE_MIB / (time.monotonic() - begun)
    assert resumed.complete
    append(
        "artifacts",
        "artifact_disk",
        hash_mib_per_s=hashing,
        hash_and_write_mib_per_s=storing,
        resume_check_mib_per_s=resuming,
    )
