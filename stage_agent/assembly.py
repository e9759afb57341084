"""Puts one node together: cores, shells, and the driver between them. Nothing here runs yet, nothing decides."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from random import SystemRandom

from config.paths import cache_dir
from config.settings import Settings
from coordinator.coordinator import Coordinator
from coordinator.planner.problem import Calibration
from protocol.ids import Slot
from protocol.links.active_probe import ActiveProbe
from protocol.membership.core import Membership
from protocol.membership.effects import Effect as MembershipEffect
from protocol.messages import Hello
from protocol.quic.conditioner import Conditioner
from protocol.quic.desk import AdmissionDesk
from protocol.quic.endpoint import QuicTransport
from protocol.quic.identity import Identity
from protocol.rows import NodeRow, ServedModel
from protocol.signature import signature_is_genuine
from stage_agent.active_prober import ActiveProber
from stage_agent.active_traffic import ForeignTraffic, Moved, card_bytes, other_traffic, stages_load, unknown_links
from stage_agent.admittance import Admittance
from stage_agent.artifacts.events import told
from stage_agent.artifacts.node_artifacts import NodeArtifacts, Surroundings
from stage_agent.clock import monotonic_us
from stage_agent.driver import Driver
from stage_agent.graves import Graves, kept_tombstones
from stage_agent.journal import Journal
from stage_agent.library import LocalModel, ModelLibrary
from stage_agent.mesh_book import MeshBook
from stage_agent.mesh_events import MeshEvents
from stage_agent.narrator import Narrator
from stage_agent.orders import Orders
from stage_agent.own_process import OwnProcess
from stage_agent.own_row import Hardware, Identification, build_row, usable_memory_bytes
from stage_agent.probes.host import available_memory_bytes
from stage_agent.recall import Recall
from stage_agent.runtimes.direct import DIRECT_ENGINE, direct_warning, is_direct
from stage_agent.runtimes.factory import keeps_loads
from stage_agent.said import CONFIGURED_SPACE, SERVED_SPACE, is_drained, restored_orders
from stage_agent.speeds import readout_speeds
from stage_agent.stage.agent import StageAgent
from stage_agent.stage.record import SlotRecord
from stage_agent.stage_link import BulkStageLink
from stage_agent.stage_runner import StageRunner
from stage_agent.state.store import StateStore
from stage_agent.switches import Switches
from stage_agent.tunnel.tunnels import Tunnels
from stage_agent.whereabouts import Whereabouts
from stage_agent.wishes import Wishes


@dataclass(frozen=True, slots=True)
class Prepared:
    """Everything that was judged before the node goes on the air."""

    settings: Settings
    identity: Identity
    who: Identification
    whereabouts: Whereabouts
    hardware: Hardware
    book: MeshBook
    store: StateStore
    library: ModelLibrary
    journal: Journal
    calibration: Calibration
    last_term: int
    configured: LocalModel | None
    """What the configuration asks the mesh to serve."""
    engine: str
    """The engine and its build, as the row tells it."""


@dataclass(frozen=True, slots=True)
class Assembled:
    """One node, ready to run."""

    driver: Driver
    membership: Membership
    coordinator: Coordinator
    agent: StageAgent
    transport: QuicTransport
    runner: StageRunner
    tunnels: Tunnels
    artifacts: NodeArtifacts
    events: MeshEvents
    admittance: Admittance
    prober: ActiveProber


def assemble(prepared: Prepared, tasks: asyncio.TaskGroup, pool: ThreadPoolExecutor, switches: Switches) -> Assembled:
    """Build the node. Must be called on the loop it will run on."""
    settings, who = prepared.settings, prepared.who
    conditioner = Conditioner(settings.quic.conditioner_file, own_id=who.node_id, own_name=who.name)
    membership = _membership(prepared, conditioner)
    events = MeshEvents(prepared.book, prepared.journal, prepared.whereabouts)
    if is_direct(settings.runtime):
        prepared.journal.tell(DIRECT_ENGINE, direct_warning(settings.runtime), "warning")
    transport = _transport(prepared, conditioner, events)
    coordinator = _coordinator(prepared)
    agent = _agent(prepared)
    link = BulkStageLink(transport, who.node_id)
    tunnels = Tunnels(transport, ledger=prepared.journal.tunnels)
    artifacts = _artifacts(prepared, membership, transport, tasks, lambda: driver.post(driver.row_changed))
    runner = StageRunner(
        settings=settings.runtime,
        node_id=who.node_id,
        tasks=tasks,
        library=prepared.library,
        artifacts=artifacts,
        link=link,
        peer_address=events.address_of,
        report=lambda event: driver.post(lambda: driver.on_runtime(event)),
        tunnels=tunnels,
        engine=prepared.engine,
        shaped_bytes_per_s=settings.shape.memory_bandwidth_bytes_per_s,
        readout_speeds=lambda last: readout_speeds(membership, who.node_id, last),
        frames=prepared.journal.frames,
    )
    wishes, orders = restored_wishes(prepared), restored_orders(prepared.store, who.node_id)
    if is_drained(prepared.store):
        switches.draining = True
        agent.drain()
    driver = Driver(
        node_id=who.node_id,
        membership=membership,
        coordinator=coordinator,
        agent=agent,
        transport=transport,
        runner=runner,
        store=prepared.store,
        book=prepared.book,
        journal=prepared.journal,
        narrator=Narrator(membership, prepared.journal),
        wishes=wishes,
        orders=orders,
        publish_row=_row_publisher(
            prepared, membership, coordinator, agent, runner, artifacts, wishes, orders, switches
        ),
        tasks=tasks,
        planner_pool=pool,
        remember=events.remember,
        persisted=Recall(prepared.store, agent, prepared.journal),
        allocatable_bytes=_allocatable_bytes(prepared.hardware),
    )
    admittance = Admittance(prepared.identity, driver, switches, tasks)
    own_process = OwnProcess(driver, switches, transport.table.outrank)
    graves = Graves(prepared.store, prepared.journal, membership.tombstones)
    prober = _prober(prepared, membership, transport, agent, events)
    events.attach(
        driver, membership, link, runner, agent, tunnels, artifacts, admittance, own_process, graves, prober,
        transport.table.readdress,
    )  # fmt: skip
    transport.on_bulk = events.on_bulk
    return Assembled(
        driver, membership, coordinator, agent, transport, runner, tunnels, artifacts, events, admittance, prober
    )


def _membership(prepared: Prepared, conditioner: Conditioner) -> Membership:
    settings, who = prepared.settings, prepared.who
    return Membership(
        node_id=who.node_id,
        public_key=who.public_key,
        sign=prepared.identity.sign,
        verify=signature_is_genuine,
        settings=settings.membership,
        link_settings=settings.links,
        random=SystemRandom(),
        boot_counter=who.boot_counter,
        instance=who.instance,
        is_admitted=prepared.book.book.__contains__,
        now_us=monotonic_us(),
        seeds=tuple(prepared.book.seeds),
        tombstones=kept_tombstones(prepared.store),
        is_shaped=conditioner.is_shaped,
    )


def _transport(prepared: Prepared, conditioner: Conditioner, events: MeshEvents) -> QuicTransport:
    settings, who, book = prepared.settings, prepared.who, prepared.book
    return QuicTransport(
        identity=prepared.identity,
        settings=settings.quic,
        listen=settings.listen,
        admission=book.book,
        mesh_id=book.book.mesh_id,
        conditioner=conditioner,
        events=events,
        clock_us=monotonic_us,
        hello=Hello(
            mesh_id=book.book.mesh_id,
            instance=who.instance,
            boot_counter=who.boot_counter,
            name=who.name,
            version=who.version,
            addresses=prepared.whereabouts.addresses,
        ),
        desk=AdmissionDesk(
            identity=prepared.identity,
            book=book.book,
            state_dir=book.state_dir,
            seeds=lambda: (*prepared.whereabouts.addresses, *book.seeds),
        ),
    )


def _prober(
    prepared: Prepared, membership: Membership, transport: QuicTransport, agent: StageAgent, events: MeshEvents
) -> ActiveProber:
    journal = prepared.journal
    probed = journal.probe_bytes
    foreign = ForeignTraffic(card_bytes, lambda: Moved(probed["sent"], probed["received"]), monotonic_us())
    return ActiveProber(
        ActiveProbe(prepared.settings.links, SystemRandom(), monotonic_us()),
        open_bulk=transport.open_bulk,
        unknown=lambda: unknown_links(membership.members(monotonic_us()), transport.connected),
        moved=lambda: other_traffic(journal),
        busy=lambda: foreign.flows(monotonic_us()) or events.serving > 0 or stages_load(agent.facts(monotonic_us())),
        carried=probed,
        clock_us=monotonic_us,
    )


def _coordinator(prepared: Prepared) -> Coordinator:
    settings, who = prepared.settings, prepared.who
    return Coordinator(
        node_id=who.node_id,
        instance=who.instance,
        last_term=prepared.last_term,
        election=settings.election,
        assignment=settings.assignment,
        replan=settings.replan,
        planner=settings.planner,
        random=SystemRandom(),
        now_us=monotonic_us(),
        calibration=prepared.calibration,
    )


def _agent(prepared: Prepared) -> StageAgent:
    settings, who = prepared.settings, prepared.who
    return StageAgent(
        node_id=who.node_id,
        instance=who.instance,
        restored={Slot(slot): SlotRecord.from_document(each) for slot, each in prepared.store.slots().items()},
        usable_memory_bytes=usable_memory_bytes(prepared.hardware, settings.node),
        now_us=monotonic_us(),
        settings=settings.election,
        keeps_loads=keeps_loads(settings.runtime),
        amnesia=prepared.store.amnesia,
    )


def _allocatable_bytes(hardware: Hardware) -> Callable[[], int | None]:
    """What asks the system how much could be allocated now, where layers lie in the memory that it counts."""
    on_host = all(device.kind == "cpu" for device in hardware.devices if device.holds_layers)
    return available_memory_bytes if on_host and not hardware.memory_shaped else lambda: None


def restored_wishes(prepared: Prepared) -> Wishes:
    """The wishes kept in the state directory, and the configured model if the configuration has changed since.

    What operators decided while the mesh ran outlives a restart with the same configuration.
    """
    store, settings = prepared.store, prepared.settings

    def keep(wish: ServedModel) -> None:
        store.put(SERVED_SPACE, wish.slot, wish.model_dump(mode="json"))

    wishes = Wishes(prepared.library, prepared.who.node_id, keep)
    for document in store.documents(SERVED_SPACE).values():
        wishes.restore(ServedModel.model_validate(document))
    slot, configured = Slot(settings.model.slot), prepared.configured
    if configured is not None:
        said = {"path": str(configured.path), "digest": configured.package.digest}
        if store.get(CONFIGURED_SPACE, slot) != said:
            wishes.wish(slot, configured, 0)
            store.put(CONFIGURED_SPACE, slot, said)
    return wishes


def _artifacts(
    prepared: Prepared,
    membership: Membership,
    transport: QuicTransport,
    tasks: asyncio.TaskGroup,
    changed: Callable[[], None],
) -> NodeArtifacts:
    settings, narrator = prepared.settings, Narrator(membership, prepared.journal)

    def rows() -> list[NodeRow]:
        members = membership.members().values()
        return [each.row for each in members if each.state in {"alive", "suspect"} and not each.is_self]

    return NodeArtifacts(
        settings.artifacts,
        cache_dir(settings) / "artifacts",
        Surroundings(
            open_bulk=transport.open_bulk,
            rows=rows,
            admitted=prepared.book.book.__contains__,
            local_models=prepared.library.local_paths,
            find_local=prepared.library.path_of,
            report=lambda event: prepared.journal.tell(*told(event, narrator.name_of)),
            clock_us=monotonic_us,
            start=lambda work, name: tasks.create_task(work, name=name),
            changed=changed,
        ),
    )


def _degraded(prepared: Prepared) -> tuple[str, ...]:
    """What the own row says is not as it should be."""
    direct = is_direct(prepared.settings.runtime)
    return (*(["amnesia"] if prepared.store.amnesia else []), *([DIRECT_ENGINE] if direct else []))


def _row_publisher(
    prepared: Prepared,
    membership: Membership,
    coordinator: Coordinator,
    agent: StageAgent,
    runner: StageRunner,
    artifacts: NodeArtifacts,
    wishes: Wishes,
    orders: Orders,
    switches: Switches,
) -> Callable[[int], list[MembershipEffect]]:
    """What the driver calls whenever something that the own row states may have changed."""

    def publish(now_us: int) -> list[MembershipEffect]:
        row = build_row(
            prepared.who,
            prepared.hardware,
            prepared.settings.node,
            addresses=prepared.whereabouts.addresses,
            api_address=prepared.whereabouts.api_address,
            draining=switches.draining,
            leaving=switches.leaving,
            degraded=_degraded(prepared),
            stages=runner.timed(agent.facts(now_us)),
            models=artifacts.facts(prepared.library.packages()),
            serves=wishes.known,
            orders=orders.known(now_us),
            max_term=coordinator.term,
            engine=prepared.engine,
            keeps_loads=keeps_loads(prepared.settings.runtime),
        )
        return membership.publish(row, now_us)

    return publish
