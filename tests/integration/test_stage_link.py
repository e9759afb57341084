"""Stage frames on the real bulk lane: taken in order, and a length that no frame can have ends the stream."""

import asyncio

from protocol.ids import NodeId
from protocol.quic.bulk import BulkReader, BulkWriter
from stage_agent.stage_link import FRAMES_KIND, BulkStageLink
from tests.integration.transport_mesh import Node, eventually, mesh, run, running

LARGEST_SEALED_BYTES = 128 + 512 * 2**20 + 8 * 2**20 + 8 * 2**20 + 4_096
"""Envelope, payload, metadata, both sidebands of 2²⁰ tokens, header and sampling: 528 MiB and a little."""


def taking(node: Node) -> list[bytes]:
    """The frames that ``node`` takes from its bulk streams."""
    taken: list[bytes] = []
    link = BulkStageLink(node.transport, node.id)

    async def on_bulk(peer: NodeId, _kind: str, _header: bytes, reader: BulkReader, _writer: BulkWriter) -> None:
        await link.receive(peer, reader, lambda _peer, sealed: taken.append(sealed))

    node.transport.on_bulk = on_bulk
    return taken


def test_a_length_over_the_largest_frame_ends_the_stream_before_anything_is_waited_for() -> None:
    async def main() -> None:
        alpha, beta = mesh("alpha", "beta")
        taken = taking(beta)
        async with running(alpha, beta):
            await alpha.meet(beta)
            reader, writer = await alpha.transport.open_bulk(beta.id, FRAMES_KIND, b"")
            forged = (LARGEST_SEALED_BYTES + 1).to_bytes(4, "big")
            writer.write(b"\0\0\0\5first" + forged + b"\0\0\0\4late")
            await writer.drain()
            assert await asyncio.wait_for(reader.read(1), 5) == b"", "the receiver hangs up"
            assert taken == [b"first"], "what follows a lie is not read"
            writer.abort()
            await BulkStageLink(alpha.transport, alpha.id).send(beta.id, b"again")
            await eventually(lambda: taken == [b"first", b"again"])

    run(main())


def test_the_largest_frame_is_waited_for() -> None:
    async def main() -> None:
        alpha, beta = mesh("alpha", "beta")
        taken = taking(beta)
        async with running(alpha, beta):
            await alpha.meet(beta)
            reader, writer = await alpha.transport.open_bulk(beta.id, FRAMES_KIND, b"")
            writer.write(LARGEST_SEALED_BYTES.to_bytes(4, "big") + b"only the beginning")
            await writer.drain()
            hung_up = asyncio.ensure_future(reader.read(1))
            done, _ = await asyncio.wait([hung_up], timeout=0.3)
            assert not done
            writer.abort()
            hung_up.cancel()
        assert taken == []

    run(main())
