"""A split model over the real bulk lane: real frames under TLS between three nodes give the tokens of the whole model."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from config.settings import RuntimeSettings
from protocol.ballots import StageAssignment
from protocol.ids import NodeId
from protocol.quic.bulk import BulkReader, BulkWriter
from stage_agent.runtimes.budget import StartBudget
from stage_agent.runtimes.context import RuntimeContext
from stage_agent.runtimes.reference.requests import Generation
from stage_agent.runtimes.reference.runtime import ReferenceRuntime
from stage_agent.stage_link import BulkStageLink
from tests.integration.transport_mesh import Node, mesh, run, running
from tests.unit.runtimes.conftest import write_model
from tests.unit.runtimes.stages import EPOCH, assignments

PROMPT = tuple(range(300, 340))
NEW_TOKENS = 24
DELAY_MS = 10


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "small.gguf")


def plan(nodes: list[Node], ranges: list[tuple[int, int]]) -> list[StageAssignment]:
    """The stages of ``ranges`` on ``nodes``, with their real ids."""
    real = {f"n{index}": str(node.id) for index, node in enumerate(nodes)} | {"": ""}
    names = ("node_id", "previous", "next", "driver")
    return [each.model_copy(update={name: real[getattr(each, name)] for name in names}) for each in assignments(ranges)]


async def serve(node: Node, assignment: StageAssignment, model: Path, tasks: asyncio.TaskGroup) -> ReferenceRuntime:
    """A loaded and active stage on ``node``, its frames joined to the node's bulk lane."""
    link = BulkStageLink(node.transport, node.id)
    context = RuntimeContext(
        tasks=tasks,
        node_id=node.id,
        epoch=EPOCH,
        link=link,
        model_path=lambda _: model,
        peer_address=lambda _: "",
        budget=StartBudget(1, 1_000_000),
    )
    runtime = ReferenceRuntime(RuntimeSettings(kind="reference"), context)

    async def on_bulk(peer: NodeId, _kind: str, _header: bytes, reader: BulkReader, _writer: BulkWriter) -> None:
        await link.receive(peer, reader, runtime.on_frame)

    node.transport.on_bulk = on_bulk
    await runtime.load(assignment, lambda _done, _total: None)
    await runtime.activate(EPOCH, assignment)
    return runtime


async def split(
    model: Path, shapes: Path | None, check: Callable[[list[ReferenceRuntime], Generation], Awaitable[None]]
) -> None:
    nodes = mesh("first", "middle", "last", shapes=shapes)
    async with running(*nodes), asyncio.TaskGroup() as tasks:
        for left, right in ((0, 1), (1, 2), (0, 2)):
            await nodes[left].meet(nodes[right])
        stages = plan(nodes, [(0, 2), (2, 4), (4, 6)])
        runtimes = [await serve(node, stage, model, tasks) for node, stage in zip(nodes, stages, strict=True)]
        result = await asyncio.wait_for(runtimes[0].generate(PROMPT, NEW_TOKENS), 60)
        await check(runtimes, result)
        for runtime in runtimes:
            await runtime.unload()


async def whole(model: Path) -> Generation:
    (node,) = mesh("only")
    async with running(node), asyncio.TaskGroup() as tasks:
        runtime = await serve(node, plan([node], [(0, 6)])[0], model, tasks)
        result = await runtime.generate(PROMPT, NEW_TOKENS)
        await runtime.unload()
    return result


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_three_nodes_over_tls_generate_the_tokens_of_one(model: Path, loop: str) -> None:
    async def check(runtimes: list[ReferenceRuntime], result: Generation) -> None:
        assert result.tokens == (await whole(model)).tokens
        assert len(set(result.tokens)) > 5
        sent = [runtime.counters["wire_bytes_sent"] for runtime in runtimes]
        assert sent[0] == sent[1] > NEW_TOKENS * 64 * 4
        assert sent[2] == NEW_TOKENS * 76

    run(split(model, None, check), loop=loop)


def test_a_shaped_delay_is_paid_on_every_hop_of_every_token(model: Path, tmp_path: Path) -> None:
    shapes = tmp_path / "shapes.toml"
    shapes.write_text(
        "".join(
            f'[links."{source} -> {target}"]\ndelay_ms = {DELAY_MS}\n'
            for source in ("first", "middle", "last")
            for target in ("first", "middle", "last")
            if source != target
        )
    )

    async def check(_runtimes: list[ReferenceRuntime], result: Generation) -> None:
        assert result.tokens == (await whole(model)).tokens
        assert min(result.token_us) >= 3 * DELAY_MS * 1_000

    run(split(model, shapes, check))
