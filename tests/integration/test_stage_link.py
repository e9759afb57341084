"""Stage frames on the real bulk lane: taken in order, and a length that no frame can have ends the stream."""

import asyncio
from typing import TYPE_CHECKING

from protocol.ids import NodeId
from protocol.quic.bulk import BulkReader, BulkWriter
from stage_agent.stage_link import FRAMES_KIND, BulkStageLink
from tests.integration.transport_mesh import Node, eventually, mesh, run, running

if TYPE_CHECKING:
    from protocol.quic.interface import LimitedBy

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


def test_what_the_sender_computes_between_two_frames_is_no_time_of_the_link() -> None:
    size = 2**20
    seen: list[tuple[str, int, int, LimitedBy]] = []
    taken: list[int] = []

    async def main() -> None:
        stream = asyncio.StreamReader(limit=2 * 2**20)
        reader = BulkReader(stream, lambda *sample: seen.append(sample), 5.0)
        link = BulkStageLink(mesh("alpha")[0].transport, NodeId("alpha"))
        receiving = asyncio.ensure_future(
            link.receive(NodeId("b"), reader, lambda _, sealed: taken.append(len(sealed)))
        )
        for _ in range(4):
            stream.feed_data(size.to_bytes(4, "big") + bytes(65_536))
            await asyncio.sleep(0.001)
            stream.feed_data(bytes(size - 65_536))
            await asyncio.sleep(0.12)
        stream.feed_eof()
        await receiving

    run(main())
    assert taken == [size] * 4
    carried_us = sum(duration_us for _, _, duration_us, _ in seen)
    assert carried_us < 4 * 120_000 // 2, (
        f"the frames were there at once, the pauses between them are the sender's: {seen}"
    )
