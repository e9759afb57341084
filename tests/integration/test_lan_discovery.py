"""Real multicast DNS on loopback: members find each other, the inviter is found, and strangers are never dialled."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

pytest.importorskip("zeroconf")

from zeroconf import IPVersion
from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

from config.settings import DiscoverySettings
from protocol.quic.interface import DialFailed, PeerConnected
from stage_agent.discovery.hints import SERVICE_TYPE, Hints, service_name, tag_of
from stage_agent.discovery.lan import LanDiscovery, find
from stage_agent.journal import Journal
from tests.integration.transport_mesh import Node, eventually, mesh, now_us, run, running

pytestmark = pytest.mark.timeout(60)
LOOPBACK = DiscoverySettings(lan=True, interfaces=("127.0.0.1",))


@contextlib.asynccontextmanager
async def announcing(*nodes: Node) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as tasks:
        begun = [
            tasks.create_task(
                LanDiscovery(
                    LOOPBACK,
                    tag=tag_of(node.book.mesh_id, node.id),
                    addresses=lambda node=node: (node.address,),
                    hints=Hints(node.book, node.id),
                    dial=node.transport.dial,
                    connected=lambda node=node: node.transport.connected,
                    clock_us=now_us,
                    journal=Journal(),
                    tasks=tasks,
                ).run()
            )
            for node in nodes
        ]
        try:
            yield
        finally:
            for task in begun:
                task.cancel()


def test_two_members_that_know_no_address_find_each_other() -> None:
    async def main() -> None:
        alpha, beta = mesh("alpha", "beta")
        async with running(alpha, beta), announcing(alpha, beta):
            await eventually(lambda: beta.id in alpha.transport.connected, patience_s=20)
            assert (await beta.until(PeerConnected)).peer == alpha.id

    run(main())


def test_members_of_another_mesh_and_liars_get_nothing() -> None:
    async def main() -> None:
        (alpha, beta), (stranger,) = mesh("alpha", "beta"), mesh("stranger")
        async with running(alpha, stranger), announcing(alpha, stranger):
            network = AsyncZeroconf(interfaces=["127.0.0.1"], ip_version=IPVersion.V4Only)
            try:  # it knows beta's tag, and says that beta is where the stranger is
                lie = AsyncServiceInfo(
                    SERVICE_TYPE,
                    service_name(tag_of(alpha.book.mesh_id, beta.id)),
                    port=stranger.transport.port,
                    server="liar.local.",
                    parsed_addresses=["127.0.0.1"],
                )
                await network.async_register_service(lie)
                failed = await alpha.until(DialFailed, patience_s=20)
            finally:
                await network.async_close()
            assert failed.address == stranger.address
            assert len(alpha.seen(DialFailed)) == 1
            assert alpha.seen(PeerConnected) == stranger.seen(PeerConnected) == []

    run(main())


def test_a_newcomer_finds_where_the_inviter_is() -> None:
    async def main() -> None:
        (alpha,) = mesh("alpha")
        async with running(alpha), announcing(alpha):
            tag = tag_of(alpha.book.mesh_id, alpha.id)
            assert await find(LOOPBACK, tag, 10) == (alpha.address,)
            assert await find(LOOPBACK, tag_of(alpha.book.mesh_id, "somebody else"), 0.5) == ()

    run(main())
