"""Two nodes with real transports and tunnels, a runtime each, and stand-ins for the engine (or the engine itself)."""

import asyncio
import contextlib
import stat
import sys
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

from config.settings import RuntimeSettings
from protocol.ballots import StageAssignment, StageShare
from protocol.errors import ModelError
from protocol.fencing import PlanEpoch
from protocol.ids import Instance, NodeId
from stage_agent.runtimes.budget import StartBudget
from stage_agent.runtimes.context import RuntimeContext
from stage_agent.runtimes.llama_cpp.runtime import LlamaCppRuntime
from stage_agent.tunnel.tunnels import Tunnels
from tests.integration.transport_mesh import mesh, running
from tests.unit.llama_cpp.illegal import illegal_program

EPOCH = PlanEpoch(3, NodeId("coordinator"), Instance("c" * 32))
DIGEST = "0" * 64


def program(folder: Path) -> str:
    """The stand-in as an executable file."""
    path = folder / "engine"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -I {Path(__file__).with_name("fake_engine.py")} "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def gguf_file(path, *, tied: bool):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(512)
    writer.add_embedding_length(32)
    writer.add_head_count(4)
    shapes = {"token_embd.weight": (96, 32), "output_norm.weight": (32,), "blk.0.attn_q.weight": (32, 32)}
    if not tied:
        shapes["output.weight"] = (96, 32)
    for name, shape in shapes.items():
        writer.add_tensor(name, np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@dataclass
class Stage:
    node: object
    tunnels: Tunnels
    runtime: LlamaCppRuntime
    assignment: StageAssignment

    async def load(self) -> list[tuple[int, int]]:
        seen: list[tuple[int, int]] = []
        await self.runtime.load(self.assignment, lambda done, total: seen.append((done, total)))
        return seen


@contextlib.asynccontextmanager
async def two_stages(
    tmp_path, *, engines=("build 7", "build 7"), fault="", deadline_us=20_000_000, wrong_model=False, model_path=None,
    digest=DIGEST, source="m", cut=3, layers=8, limit=3, direct=("", ""), last_bytes=None, cache_type="f16",
    **settings,
):  # fmt: skip
    alpha, beta = nodes = mesh("alpha", "beta")
    standing_in = {
        "llama_server": program(tmp_path),
        "llama_rpc_server": program(tmp_path),
        "llama_output_layer": "last",
    }
    environment = {"STARTS": str(tmp_path / "starts"), **({"FAKE": fault} if fault else {})}
    if "sigill" in fault:
        environment["ILLEGAL"] = illegal_program(tmp_path / "illegal")
    made = RuntimeSettings(
        **{"kind": "llama_cpp", "environment": environment, "stop_grace_us": 500_000, **standing_in, **settings}
    )
    shares = (
        StageShare(node_id=alpha.id, layer_start=0, layer_end=cut, parameter_bytes=100 * cut),
        StageShare(
            node_id=beta.id, layer_start=cut, layer_end=layers, parameter_bytes=last_bytes or 100 * (layers - cut)
        ),
    )

    def stand_in_path(_assignment):
        if wrong_model:
            raise ModelError("m.gguf is another model than the plan's")
        return gguf_file(tmp_path / "m.gguf", tied=False)

    async with running(alpha, beta), asyncio.TaskGroup() as tasks:
        await alpha.meet(beta)
        stages = []
        for index, node in enumerate(nodes):
            tunnels = Tunnels(node.transport)

            async def serve(peer, _kind, header, reader, writer, tunnels=tunnels):
                await tunnels.serve(peer, header, reader, writer)

            node.transport.on_bulk = serve
            context = RuntimeContext(
                tasks=tasks, node_id=node.id, epoch=EPOCH, link=None, model_path=model_path or stand_in_path,
                peer_address=lambda _peer: "", budget=StartBudget(limit, 60_000_000), tunnels=tunnels, engine=engines[index],
            )  # fmt: skip
            share = shares[index]
            assignment = StageAssignment(
                slot="default", stage_index=index, stage_count=2, node_id=node.id, instance="1" * 32, model_digest=digest,
                model_source=source, layer_start=share.layer_start, layer_end=share.layer_end, roles=(), required_bytes=1,
                parameter_bytes=share.parameter_bytes, context_length=512, lanes=2, cache_type=cache_type, driver=alpha.id,
                load_deadline_us=deadline_us, stages=shares,
            )  # fmt: skip
            stages.append(
                Stage(
                    node,
                    tunnels,
                    LlamaCppRuntime(made.model_copy(update={"llama_direct_host": direct[index]}), context),
                    assignment,
                )
            )
        try:
            yield stages
        finally:
            for stage in stages:
                await stage.runtime.unload()
