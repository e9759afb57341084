"""What the transport reports, turned into inputs of the driver and the cores. One method an event; decides nothing."""

import asyncio
from collections.abc import Callable
from typing import assert_never

from protocol.beat import next_slow_beat_us, phase_us
from protocol.errors import WireError
from protocol.ids import NodeId
from protocol.membership import effects
from protocol.membership.core import Membership
from protocol.messages import IdentityContested
from protocol.quic import interface as seen
from protocol.quic.bulk import BulkReader, BulkWriter
from stage_agent.active_prober import PROBE_KIND, ActiveProber
from stage_agent.admittance import Admittance
from stage_agent.artifacts.node_artifacts import NodeArtifacts
from stage_agent.artifacts.wire import ARTIFACT_KIND
from stage_agent.clock import monotonic_us
from stage_agent.driver import Driver
from stage_agent.graves import Graves
from stage_agent.journal import Journal
from stage_agent.mesh_book import MeshBook
from stage_agent.own_process import OwnProcess
from stage_agent.path_watch import PathWatch
from stage_agent.probes.lag import OVERLOADED_US
from stage_agent.refusals import Refusals
from stage_agent.stage.agent import StageAgent
from stage_agent.stage_link import FRAMES_KIND, BulkStageLink
from stage_agent.stage_runner import StageRunner
from stage_agent.tunnel.tunnels import Tunnels
from stage_agent.tunnel.wire import TUNNEL_KIND
from stage_agent.whereabouts import Whereabouts


class MeshEvents:
    """Called by the transport on the loop. Nothing comes before ``attach``: the transport is not running yet."""

    def __init__(self, book: MeshBook, journal: Journal, whereabouts: Whereabouts) -> None:
        self._book = book
        self._journal = journal
        self._whereabouts = whereabouts
        self._addresses: dict[NodeId, str] = {}
        self._refusals = Refusals(journal)
        self._failure = ""
        """Why the mesh's file cannot be written, said once."""
        self.serving = 0
        """Artifact streams that peers have open here."""

    def attach(
        self,
        driver: Driver,
        membership: Membership,
        link: BulkStageLink,
        runner: StageRunner,
        agent: StageAgent,
        tunnels: Tunnels,
        artifacts: NodeArtifacts,
        admittance: Admittance,
        own_process: OwnProcess,
        graves: Graves,
        prober: ActiveProber,
        readdress: Callable[[tuple[str, ...]], None],
    ) -> None:
        """The cores exist now."""
        self._driver = driver
        self._membership = membership
        self.paths = PathWatch(membership, self._journal)
        self._link = link
        self._runner = runner
        self._agent = agent
        self._tunnels = tunnels
        self._artifacts = artifacts
        self._admittance = admittance
        self._own_process = own_process
        self._graves = graves
        self._prober = prober
        self._readdress = readdress

    def __call__(self, event: seen.TransportEvent) -> None:
        """Take one event."""
        self._driver.post(lambda: self._take(event))

    async def watch(self) -> None:
        """Look at what nobody reports, until cancelled: links that became far worse, addresses that changed. Membership counts that as news."""
        phase, seen = phase_us(self._driver.node_id), -1
        while True:
            now_us = monotonic_us()
            await asyncio.sleep((next_slow_beat_us(now_us, phase) - now_us) / 1e6)
            if seen != self._membership.revision:
                seen = self._membership.revision
                self._driver.post(self.paths.look)
            self.paths.tell_blocked(monotonic_us())
            self._look_at_addresses(monotonic_us())
            self._graves.keep(monotonic_us())
            self._keep_book()

    def _look_at_addresses(self, now_us: int) -> None:
        before = self._whereabouts.look(now_us)
        if before is None:
            return
        now = self._whereabouts.addresses
        self._journal.tell(
            "addresses_changed",
            f"this node can be reached at {', '.join(now)} now (was {', '.join(before)})",
            addresses=list(now),
            was_addresses=list(before),
        )
        self._readdress(now)
        self._driver.post(self._driver.row_changed)

    def _keep_book(self) -> None:
        failure = self._book.keep()
        if failure and failure != self._failure:
            self._journal.tell("state_unavailable", failure, "error")
        self._failure = failure

    def remember(self, effect: effects.MemberChanged | effects.Conflict) -> None:
        """What the membership core says and the state directory must know at the next start."""
        match effect:
            case effects.MemberChanged(new=state):
                self._graves.changed(monotonic_us(), goodbye=state == "left")
            case effects.Conflict(node_id, boot_counter) if node_id == self._driver.node_id:
                self._own_process.outranked(boot_counter)

    def settle(self) -> None:
        """The daemon ends: keep what is not kept yet."""
        self._graves.keep(monotonic_us(), spacing_us=0)
        self._keep_book()

    def on_loop_lag(self, late_us: int) -> None:
        """The loop was late: nobody may be accused for that time, and a stall of more than a second costs connections."""
        if late_us > OVERLOADED_US:
            text = f"the loop stood still for {late_us / 1e6:.1f} s: probing rests, connections that can be spared are closed"
            self._journal.tell("loop_lag", text, "warning", late_us=late_us)
        self._driver.post(lambda: self._driver.carry_membership(self._membership.on_loop_lag(late_us, monotonic_us())))

    def address_of(self, peer: str) -> str:
        """Where ``peer`` was last connected, ``host:port``; empty when it never was."""
        return self._addresses.get(NodeId(peer), "")

    async def on_bulk(self, peer: NodeId, kind: str, header: bytes, reader: BulkReader, writer: BulkWriter) -> None:
        """Serve an incoming bulk stream by its kind; one that is not known here is refused by returning."""
        if kind == FRAMES_KIND:
            await self._link.receive(peer, reader, self._on_frame)
        elif kind == TUNNEL_KIND:
            await self._tunnels.serve(peer, header, reader, writer)
        elif kind == ARTIFACT_KIND:
            self.serving += 1
            try:
                await self._artifacts.on_bulk(peer, header, reader, writer)
            finally:
                self.serving -= 1
        elif kind == PROBE_KIND:
            await self._prober.serve(peer, header, reader, writer)
        else:
            self._journal.rejected["unexpected_stream"] += 1

    def _on_frame(self, peer: NodeId, sealed: bytes) -> None:
        try:
            self._runner.on_frame(peer, sealed, self._agent, self._journal.stale_frames, monotonic_us())
        except WireError as error:
            self._journal.rejected[error.reason] += 1

    def _take(self, event: seen.TransportEvent) -> None:  # noqa: C901, PLR0912 - one case an event
        driver, membership, now_us = self._driver, self._membership, monotonic_us()
        match event:
            case seen.MessageReceived(peer, IdentityContested() as message):
                self._own_process.contested(peer, message)
            case seen.MessageReceived(peer, message, lane, _, arrived_us):
                driver.on_message(peer, message, lane, arrived_us)
            case seen.PeerConnected(peer, address, _, path, interface):
                self._addresses[peer] = address
                self._journal.tell("peer_connected", f"connected to {event.hello.name} at {address}", node_id=peer)
                self.paths.connected(event)
                driver.carry_membership(
                    membership.on_connected(peer, address, now_us, interface=interface, over_tcp=path == "tls")
                )
                driver.members_changed()
                for told in event.hello.addresses[:1]:
                    self._book.seen(told)
            case seen.PeerDisconnected(peer, reason):
                self._link.forget(peer)
                self._journal.tell(
                    "peer_disconnected",
                    f"lost the connection to {driver.narrator.name_of(peer)} ({reason})",
                    node_id=peer,
                )
                self.paths.disconnected(peer)
                driver.carry_membership(membership.on_disconnected(peer, now_us))
                driver.members_changed()
                self._own_process.cut_off(reason, self._addresses.get(peer, ""))
            case seen.PeerMoved(peer, address, path, interface):
                self._addresses[peer] = address
                self.paths.moved(event)
                driver.carry_membership(
                    membership.on_moved(peer, address, now_us, interface=interface, over_tcp=path == "tls")
                )
                driver.members_changed()
            case seen.DialFailed(address, reason):
                self._journal.tell("dial_failed", f"no connection to {address} ({reason})", "debug")
                driver.carry_membership(membership.on_dial_failed(address, now_us))
                if reason == "older_boot":
                    self._own_process.cut_off(reason, address)
            case seen.Rejected(reason, address):
                self._refusals.tell(reason, address, now_us)
            case seen.IdentityConflict(_, _, address, turned_away=True):
                self._own_process.turned_away(address)
            case seen.IdentityConflict(peer, instances, address):
                self._own_process.shared(peer, instances[-1], address)
            case seen.AdmissionsLearned(admissions):
                self._book.touched()
                self._keep_book()
                for admission in admissions:
                    driver.carry_membership(membership.spread_admission(admission, now_us))
                self._admittance.look()
            case seen.TransferObserved(peer, direction, size, duration_us, limited_by):
                membership.on_transfer(peer, direction, size, duration_us, limited_by, now_us)
                driver.members_changed()
            case seen.ConditionerReloaded(error):
                self._journal.tell(
                    "conditioner_reloaded", error or "link shapes were read again", "warning" if error else "info"
                )
            case _:
                assert_never(event)
