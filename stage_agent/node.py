"""The composition root: one process, one loop, one task group.

Order of start: settings are judged, identity and mesh are read, the state directory is locked and its boots counted, the
machine is measured, both ports are bound, and only then does anything talk. Whatever a person can mend ends the start
with one line. SIGTERM says goodbye to the mesh, stops the engines and ends with code 0.
"""

import asyncio
import contextlib
import secrets
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from random import SystemRandom

from config.load import calibration_text
from config.paths import cache_dir, state_dir
from config.secrets import api_token
from config.settings import Settings
from coordinator.coordinator import Coordinator
from coordinator.planner.problem import Calibration
from coordinator.simulator.profiles import parse_profile
from protocol.errors import ConfigurationError, IdentityError, ModelError
from protocol.ids import Instance, Slot
from protocol.membership.core import Membership
from protocol.membership.effects import Effect as MembershipEffect
from protocol.messages import Hello
from protocol.quic.conditioner import Conditioner
from protocol.quic.desk import AdmissionDesk
from protocol.quic.endpoint import QuicTransport
from protocol.quic.identity import Identity
from protocol.quic.mesh_files import load_membership
from protocol.signature import signature_is_genuine
from stage_agent.addresses import own_addresses, with_real_port
from stage_agent.api.app import build_app
from stage_agent.api.server import ApiListener, bind_api, serve_api
from stage_agent.clock import monotonic_us
from stage_agent.driver import Driver
from stage_agent.journal import Journal
from stage_agent.library import ModelLibrary
from stage_agent.mesh_book import MeshBook
from stage_agent.mesh_events import MeshEvents
from stage_agent.narrator import Narrator
from stage_agent.notify import SystemdNotifier
from stage_agent.operations import SERVED_SPACE, Operations
from stage_agent.own_row import Hardware, Identification, build_row, usable_memory_bytes
from stage_agent.picture import Picture
from stage_agent.probes.measure import measure_node
from stage_agent.stage.agent import StageAgent
from stage_agent.stage.record import SlotRecord
from stage_agent.stage_link import BulkStageLink
from stage_agent.stage_runner import StageRunner
from stage_agent.state.store import StateStore
from stage_agent.wishes import Wishes

GOODBYE_S = 0.3
"""Time for the goodbye to leave before the sockets close."""
STATUS_S = 5.0
"""systemd's status line is renewed this often."""


class _Stop(Exception):  # noqa: N818 - ends the task group in order; not an error
    """Somebody asked the daemon to end."""


@dataclass(slots=True)
class _Switches:
    """What operators turn while the daemon runs."""

    stop: asyncio.Event
    draining: bool = False
    leaving: bool = False


async def run_node(settings: Settings) -> None:
    """Serve until SIGTERM, SIGINT or ``leave``. Raises ``StagemeshError`` for what a person can mend."""
    settings = settings.model_copy(update={"listen": with_real_port(settings.listen)})
    directory = state_dir(settings)
    calibration = load_calibration(settings.planner.calibration)
    identity = Identity.load(directory)
    mesh = load_membership(directory)
    if mesh is None:
        raise IdentityError(
            f"{directory} is in no mesh: run `stagemesh init`, or `stagemesh join TOKEN` with a token from a member"
        )
    journal = Journal()
    with StateStore.open(directory) as store:
        if store.set_aside is not None:
            journal.tell("state_corrupt", f"the state was damaged and is now {store.set_aside}", "error")
        library = open_models(settings, store, journal)
        listener = bind_api(settings.api, token=api_token(settings))
        with contextlib.closing(listener.socket):
            boot = store.boot()
            facts = await asyncio.to_thread(measure_node, settings, cache_dir(settings))
            hardware = Hardware(facts.detected_memory_bytes, settings.shape.memory_bytes is not None, facts.devices)
            who = Identification(
                node_id=identity.node_id,
                public_key=identity.public_key,
                instance=Instance(secrets.token_hex(16)),
                boot_counter=boot.boot_counter,
                name=settings.node.name or socket.gethostname()[:64] or "node",
                version=version("stagemesh"),
                addresses=own_addresses(settings.listen),
                api_address="" if listener.host in {"127.0.0.1", "::1"} else listener.address,
            )
            book = MeshBook(mesh.book(), directory, dict.fromkeys(mesh.seeds))
            parts = _Parts(settings, identity, who, hardware, book, store, library, journal, calibration, listener)
            await parts.live(boot.last_term)


def load_calibration(name: str) -> Calibration:
    """The engine profile called ``name``. Raises ``ConfigurationError`` when there is none."""
    return parse_profile(name, calibration_text(name)).calibration


def open_models(settings: Settings, store: StateStore, journal: Journal) -> ModelLibrary:
    """The configured model, and those served by command before the restart.

    Raises ``ConfigurationError`` when the configured one cannot be read; others are told and left out.
    """
    library = ModelLibrary()
    wanted = {
        Slot(slot): (str(each["path"]), int(each["priority"])) for slot, each in store.documents(SERVED_SPACE).items()
    }
    if settings.model.path:
        wanted[Slot(settings.model.slot)] = (settings.model.path, 0)
    for slot, (path, priority) in wanted.items():
        try:
            library.serve(slot, ModelLibrary.open(path), priority=priority, version=1)
        except ModelError as error:
            if path == settings.model.path:
                raise ConfigurationError(f"model.path: {error}") from None
            journal.tell("model_unreadable", f"slot {slot}: {error}", "error", slot=slot)
    return library


@dataclass(slots=True)
class _Parts:
    """Everything that was judged before the node goes on the air."""

    settings: Settings
    identity: Identity
    who: Identification
    hardware: Hardware
    book: MeshBook
    store: StateStore
    library: ModelLibrary
    journal: Journal
    calibration: Calibration
    listener: ApiListener

    async def live(self, last_term: int) -> None:
        """Build cores and shells, and run them until asked to stop."""
        switches = _Switches(asyncio.Event())
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, switches.stop.set)
        pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="planner")
        try:
            async with asyncio.TaskGroup() as tasks:
                await self._run(tasks, pool, switches, last_term)
                raise _Stop  # noqa: TRY301 - it ends the group
        except* _Stop:
            self.journal.tell("stopped", "said goodbye and stopped")
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    async def _run(
        self, tasks: asyncio.TaskGroup, pool: ThreadPoolExecutor, switches: _Switches, last_term: int
    ) -> None:
        settings, who, now_us = self.settings, self.who, monotonic_us()
        random = SystemRandom()
        conditioner = Conditioner(settings.quic.conditioner_file, own_id=who.node_id, own_name=who.name)
        membership = Membership(
            node_id=who.node_id,
            public_key=who.public_key,
            sign=self.identity.sign,
            verify=signature_is_genuine,
            settings=settings.membership,
            link_settings=settings.links,
            random=random,
            boot_counter=who.boot_counter,
            instance=who.instance,
            is_admitted=self.book.book.__contains__,
            now_us=now_us,
            seeds=tuple(self.book.seeds),
            is_shaped=conditioner.is_shaped,
        )
        mesh_events = MeshEvents(self.book, self.journal)
        transport = QuicTransport(
            identity=self.identity,
            settings=settings.quic,
            listen=settings.listen,
            admission=self.book.book,
            mesh_id=self.book.book.mesh_id,
            conditioner=conditioner,
            events=mesh_events,
            clock_us=monotonic_us,
            hello=Hello(
                mesh_id=self.book.book.mesh_id,
                instance=who.instance,
                boot_counter=who.boot_counter,
                name=who.name,
                version=who.version,
                addresses=who.addresses,
            ),
            desk=AdmissionDesk(
                identity=self.identity,
                book=self.book.book,
                state_dir=self.book.state_dir,
                seeds=lambda: (*who.addresses, *self.book.seeds),
            ),
        )
        coordinator = Coordinator(
            node_id=who.node_id,
            instance=who.instance,
            last_term=last_term,
            election=settings.election,
            assignment=settings.assignment,
            replan=settings.replan,
            planner=settings.planner,
            random=random,
            now_us=now_us,
            calibration=self.calibration,
        )
        agent = StageAgent(
            node_id=who.node_id,
            instance=who.instance,
            restored={Slot(slot): SlotRecord.from_document(each) for slot, each in self.store.slots().items()},
            usable_memory_bytes=usable_memory_bytes(self.hardware, settings.node),
            now_us=now_us,
            settings=settings.election,
        )
        link = BulkStageLink(transport, who.node_id, tasks)
        runner = StageRunner(
            settings=settings.runtime,
            node_id=who.node_id,
            tasks=tasks,
            library=self.library,
            link=link,
            peer_address=mesh_events.address_of,
            report=lambda event: driver.post(lambda: driver.on_runtime(event)),
        )

        def publish_row(at_us: int) -> list[MembershipEffect]:
            row = build_row(
                who,
                self.hardware,
                settings.node,
                draining=switches.draining,
                leaving=switches.leaving,
                degraded=("amnesia",) if self.store.amnesia else (),
                stages=runner.timed(agent.facts(at_us)),
                models=self.library.facts(),
                serves=self.library.served,
                max_term=coordinator.snapshot(at_us).term,
                engine=settings.runtime.kind,
            )
            return membership.publish(row, at_us)

        driver = Driver(
            node_id=who.node_id,
            membership=membership,
            coordinator=coordinator,
            agent=agent,
            transport=transport,
            runner=runner,
            store=self.store,
            book=self.book,
            journal=self.journal,
            narrator=Narrator(membership, self.journal),
            wishes=Wishes(self.library, who.node_id),
            publish_row=publish_row,
            tasks=tasks,
            planner_pool=pool,
        )
        mesh_events.attach(driver, membership, link, runner, agent)
        transport.on_bulk = mesh_events.on_bulk

        def set_draining(draining: bool) -> None:
            switches.draining = draining
            picture.draining = draining
            (agent.drain if draining else agent.resume)()
            driver.post(driver.row_changed)

        serving = tasks.create_task(transport.run(), name="transport")
        await _either(transport.started, serving)
        picture = Picture(
            driver=driver,
            who=who,
            mesh_id=self.book.book.mesh_id,
            listen_address=f"{settings.listen.host}:{transport.port}",
            started_us=now_us,
            settle_max_age_us=settings.links.settle_max_age_us,
        )
        operations = Operations(driver, settings.planner, set_draining, switches.stop.set, lambda: self.calibration)
        app = build_app(picture, operations, settings=settings.api, token=api_token(settings))
        api = tasks.create_task(serve_api(self.listener, app), name="api")
        for admission in self.book.book.statements:
            driver.carry_membership(membership.spread_admission(admission, monotonic_us()))
        driver.post(driver.row_changed)
        timers = tasks.create_task(driver.run_timers(), name="timers")
        notifier = SystemdNotifier()
        watchdog = tasks.create_task(_report(notifier, picture), name="systemd")
        self.journal.tell(
            "started",
            f"{who.name} listens on {picture.listen_address}, API on http://{self.listener.address}/",
            node_id=who.node_id,
            boot_counter=who.boot_counter,
        )
        notifier.ready(picture.snapshot().status_text)
        await switches.stop.wait()
        notifier.stopping()
        switches.leaving = True
        agent.drain()
        driver.post(driver.row_changed)
        driver.carry_membership(membership.leave(monotonic_us()))
        await asyncio.sleep(GOODBYE_S)
        await runner.close()
        for task in (api, timers, watchdog, serving):
            task.cancel()


async def _either(started: asyncio.Event, serving: asyncio.Task[None]) -> None:
    """Until the transport listens, or has failed (then its error ends the task group)."""
    waiting = asyncio.ensure_future(started.wait())
    await asyncio.wait({waiting, serving}, return_when=asyncio.FIRST_COMPLETED)
    if not started.is_set():
        waiting.cancel()
        await serving


async def _report(notifier: SystemdNotifier, picture: Picture) -> None:
    """Feed systemd's watchdog and status line from the loop, so that a stuck loop is noticed."""
    interval_s = (notifier.watchdog_interval_us or round(STATUS_S * 1e6)) / 1e6
    while True:
        notifier.watchdog()
        notifier.status(picture.snapshot().status_text)
        await asyncio.sleep(min(interval_s, STATUS_S))
