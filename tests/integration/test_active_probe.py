"""Active bandwidth probes between two real transports with shaped links: measured, refused, called off, switched off."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

from config.settings import LinkSettings
from protocol.ids import NodeId
from protocol.links.active_probe import ActiveProbe
from protocol.links.book import LinkBook
from protocol.quic.bulk import BulkReader, BulkWriter
from protocol.quic.interface import TransferObserved, TransportEvent
from stage_agent.active_prober import PROBE_KIND, ActiveProber
from tests.integration.transport_mesh import Node, eventually, mesh, now_us, run, running

MIB = 1_048_576
HOURLY = 400 * MIB


class Prober:
    """One node with its probes, its links, and traffic at will."""

    def __init__(self, node: Node, budget: int) -> None:
        self.node = node
        self.settings = LinkSettings(active_probe_bytes_per_hour=budget, active_probe_spacing_us=20_000)
        self.links = LinkBook(self.settings)
        self.core = ActiveProbe(self.settings, Random(1), now_us())
        self.carried = Counter[str]()
        self.traffic = 0
        self.shell = ActiveProber(
            self.core,
            open_bulk=node.transport.open_bulk,
            unknown=self._unknown,
            moved=lambda: self.traffic,
            busy=lambda: False,
            carried=self.carried,
            clock_us=now_us,
        )
        node.transport.on_bulk = self._on_bulk
        self._keep, node.transport.table._events = node.transport.table._events, self._take

    def sends(self, peer: NodeId) -> int | None:
        view = self.links.view(peer, now_us())
        return None if view is None or view.send is None else view.send.bytes_per_s

    def receives(self, peer: NodeId) -> int | None:
        view = self.links.view(peer, now_us())
        return None if view is None or view.receive is None else view.receive.bytes_per_s

    def _unknown(self) -> list[NodeId]:
        return [peer for peer in self.node.transport.connected if self.sends(peer) is None]

    def _take(self, event: TransportEvent) -> None:
        self._keep(event)
        if isinstance(event, TransferObserved):
            self.links.on_transfer(
                event.peer, event.direction, event.size, event.duration_us, event.limited_by, now_us()
            )

    async def _on_bulk(self, peer: NodeId, kind: str, header: bytes, reader: BulkReader, writer: BulkWriter) -> None:
        assert kind == PROBE_KIND
        await self.shell.serve(peer, header, reader, writer)


@contextlib.asynccontextmanager
async def probing(
    tmp_path: Path, mib_per_s: float, alpha_budget: int, beta_budget: int
) -> AsyncIterator[tuple[Prober, Prober]]:
    """Alpha probes; beta only answers, so that the figures are of one direction."""
    shapes = tmp_path / "shapes.toml"
    shapes.write_text(f'[links."alpha -> beta"]\ndelay_ms = 1\nmib_per_s = {mib_per_s}\n')
    one, other = mesh("alpha", "beta", shapes=shapes)
    alpha, beta = Prober(one, alpha_budget), Prober(other, beta_budget)
    async with running(one, other):
        await one.meet(other)
        probes = asyncio.ensure_future(alpha.shell.run())
        try:
            yield alpha, beta
        finally:
            probes.cancel()
            await asyncio.wait({probes})


def test_an_idle_link_of_twenty_megabytes_a_second_is_measured_at_both_ends_within_15_percent(tmp_path: Path) -> None:
    async def main() -> None:
        async with probing(tmp_path, 20e6 / MIB, HOURLY, HOURLY) as (alpha, beta):
            await eventually(lambda: alpha.sends(beta.node.id) is not None and not beta.core.running)
            for measured in (alpha.sends(beta.node.id), beta.receives(alpha.node.id)):
                assert measured is not None
                assert 17e6 <= measured <= 23e6
            spent = alpha.carried["sent"]
            assert spent == beta.carried["received"]
            assert HOURLY - alpha.core.available_bytes(now_us()) == spent
            assert spent <= 12 * MIB, "small first, then as large as the link needs"
            for here, there in ((alpha, beta), (beta, alpha)):
                view = here.links.view(there.node.id, now_us())
                assert view is not None
                sample = view.send or view.receive
                assert sample is not None
                assert here.shell.explains(there.node.id, sample.at_us)
                assert not here.shell.explains(there.node.id, sample.at_us + 60_000_000)
                assert not here.shell.explains(here.node.id, sample.at_us)

    run(main())


def test_a_receiver_without_a_budget_gets_no_bytes(tmp_path: Path) -> None:
    async def main() -> None:
        async with probing(tmp_path, 20, HOURLY, 0) as (alpha, beta):
            asked = asyncio.Event()
            refuse = alpha.core.refused
            alpha.core.refused = lambda peer, at_us: (refuse(peer, at_us), asked.set())[0]  # type: ignore[method-assign]
            await asyncio.wait_for(asked.wait(), 5)
            assert alpha.carried["sent"] == beta.carried["received"] == 0
            assert alpha.core.available_bytes(now_us()) == HOURLY

    run(main())


def test_traffic_at_either_end_calls_a_probe_off_and_what_was_not_sent_is_returned(tmp_path: Path) -> None:
    async def main(*, at_sender: bool) -> None:
        async with probing(tmp_path, 0.5, HOURLY, HOURLY) as (alpha, beta):
            # A MiB at half a MiB a second: long enough to be caught.
            watch = asyncio.ensure_future(beta.shell.run())
            beta.links.on_transfer(alpha.node.id, "send", MIB, 500_000, "link", now_us())
            await eventually(lambda: beta.carried["received"] > 0)
            (alpha if at_sender else beta).traffic += 1
            await eventually(lambda: not alpha.core.running and not beta.core.running, patience_s=1.5)
            assert 0 < alpha.carried["sent"] < MIB
            assert HOURLY - alpha.core.available_bytes(now_us()) == alpha.carried["sent"]
            assert alpha.sends(beta.node.id) is None
            watch.cancel()
            await asyncio.wait({watch})

    run(main(at_sender=True))
    run(main(at_sender=False))


def test_without_a_budget_there_is_nothing_to_run(tmp_path: Path) -> None:
    async def main() -> None:
        async with probing(tmp_path, 20, 0, 0) as (alpha, beta):
            await asyncio.wait_for(alpha.shell.run(), 1)
            assert not alpha.carried
            assert not beta.carried

    run(main())
