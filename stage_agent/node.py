"""The daemon's life: judge, go on the air, serve, say goodbye. One process, one loop, one task group.

Order of start: settings are judged, identity and mesh are read, the state directory is locked and its boots counted, the
machine is measured, both ports are bound, and only then does anything talk. Whatever a person can mend ends the start
with one line. SIGHUP reads the configuration again; SIGTERM says goodbye to the mesh, stops the engines and ends with 0.
"""

import asyncio
import contextlib
import gc
import re
import secrets
import signal
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from config.installed import installed_version
from config.load import calibration_text
from config.log import set_up_logging
from config.paths import cache_dir, state_dir
from config.reload import reload
from config.secrets import api_token
from config.settings import Settings
from coordinator.planner.problem import Calibration
from coordinator.simulator.profiles import parse_profile
from protocol.beat import phase_us
from protocol.errors import ConfigurationError, IdentityBarred, IdentityError, ModelError
from protocol.ids import Instance
from protocol.quic.identity import Identity
from protocol.quic.mesh_files import load_membership
from stage_agent.addresses import own_addresses, with_real_port
from stage_agent.admittance import standing_identity
from stage_agent.api.app import build_app
from stage_agent.api.server import ApiListener, bind_api, serve_api
from stage_agent.assembly import Assembled, Prepared, assemble
from stage_agent.clock import monotonic_us
from stage_agent.discovery.hints import Hints, tag_of
from stage_agent.discovery.lan import LanDiscovery, require_zeroconf
from stage_agent.journal import Journal
from stage_agent.library import LocalModel, ModelLibrary
from stage_agent.mesh_book import MeshBook
from stage_agent.notify import SystemdNotifier
from stage_agent.operations import Operations
from stage_agent.own_row import Hardware, Identification
from stage_agent.picture import Picture
from stage_agent.probes.lag import LagMeter
from stage_agent.probes.measure import measure_node
from stage_agent.router.proxy import HeadProxy
from stage_agent.runtimes.factory import NOT_FOR_PRODUCTION, engine_label
from stage_agent.said import SERVED_SPACE, forget_said
from stage_agent.state.store import StateStore
from stage_agent.switches import Switches
from stage_agent.whereabouts import Whereabouts

GOODBYE_S = 0.3
"""Time for the goodbye to leave before the sockets close."""
STATUS_S = 5.0
"""systemd's status line is renewed at least this often."""


class _Stop(Exception):  # noqa: N818 - ends the task group in order; not an error
    """Somebody asked the daemon to end."""


async def run_node(settings: Settings, read_again: Callable[[], Settings]) -> None:
    """Serve until SIGTERM, SIGINT or ``leave``. Raises ``StagemeshError`` for what a person can mend.

    ``read_again`` reads the configuration for SIGHUP. A node that got a new key begins again under it.
    """
    settings = settings.model_copy(update={"listen": with_real_port(settings.listen)})
    switches, journal = Switches(), Journal()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, switches.terminate)
    while True:
        await _run_once(settings, read_again, switches, journal)
        if switches.terminated or not switches.again:
            return
        switches.next_run()
        with contextlib.suppress(ConfigurationError):  # what was reloaded counts; a file broken since changes nothing
            settings = read_again().model_copy(update={"listen": settings.listen})


async def _run_once(
    settings: Settings, read_again: Callable[[], Settings], switches: Switches, journal: Journal
) -> None:
    """The node under the identity that it has now, until asked to stop."""
    if settings.discovery.lan:
        require_zeroconf()
    directory = state_dir(settings)
    own_calibration(settings)  # a profile that cannot be read is refused before anything starts
    mesh, identity = load_membership(directory), Identity.load(directory)
    if mesh is None:
        raise IdentityError(
            f"{directory} is in no mesh: run `stagemesh init`, or `stagemesh join TOKEN` with a token from a member"
        )
    book = mesh.book()
    with StateStore.open(directory) as store:
        identity = standing_identity(directory, identity, book)
        if store.set_aside is not None:
            journal.tell("state_corrupt", f"the state was damaged and is now {store.set_aside}", "error")
        if settings.runtime.kind == "reference":
            journal.tell("verification_engine", NOT_FOR_PRODUCTION, "warning")
        # The verification engine and llama.cpp's RPC send float32 activations; other engines float16.
        wide = settings.runtime.kind in {"reference", "llama_cpp"}
        library = ModelLibrary(4 if wide else 2, settings.model.cache_type)
        configured = open_models(settings, store, library, journal)
        listener = bind_api(settings.api, token=api_token(settings))
        with contextlib.closing(listener.socket):
            boot = store.boot()
            engine = await asyncio.to_thread(engine_label, settings.runtime)
            facts = await asyncio.to_thread(measure_node, settings, cache_dir(settings))
            if facts.failure:
                journal.tell("benchmark_failed", f"this node's speed is unknown: {facts.failure}", "warning")
            prepared = Prepared(
                settings=settings,
                identity=identity,
                who=Identification(
                    node_id=identity.node_id,
                    public_key=identity.public_key,
                    instance=Instance(secrets.token_hex(16)),
                    boot_counter=boot.boot_counter,
                    name=settings.node.name or socket.gethostname()[:64] or "node",
                    version=installed_version("stagemesh"),
                ),
                whereabouts=Whereabouts(
                    lambda: own_addresses(settings.listen), listener.reachable_address, monotonic_us()
                ),
                hardware=Hardware(facts.detected_memory_bytes, settings.shape.memory_bytes is not None, facts.devices),
                book=MeshBook(book, directory, dict.fromkeys(mesh.seeds)),
                store=store,
                library=library,
                journal=journal,
                calibration=own_calibration(settings, engine),
                last_term=boot.last_term,
                configured=configured,
                engine=engine,
            )
            await _live(prepared, listener, read_again, switches)


OWN_PROFILE = {"llama_cpp": "llama-cpp-rpc", "reference": "reference"}
"""What prices plans when nobody names a profile, by engine; other engines are taken for a plain chain."""


FEWER_ROUND_TRIPS = re.compile(r" rpc (?:[7-9]|\d\d+)\.")
"""In the label of a llama.cpp whose protocol needs about one round trip per remote stage and token."""


def own_calibration(settings: Settings, engine: str = "") -> Calibration:
    """What prices this node's plans; ``engine`` is its engine's label. Raises ``ConfigurationError``."""
    own = OWN_PROFILE.get(settings.runtime.kind, "skippy")
    if settings.runtime.kind == "llama_cpp" and FEWER_ROUND_TRIPS.search(engine):
        own = "llama-cpp-rpc-7"
    found = load_calibration(settings.planner.calibration or own)
    on_last = settings.runtime.kind == "llama_cpp" and settings.runtime.llama_output_layer == "last"
    return replace(found, tied_output="last") if on_last else found


def load_calibration(name: str) -> Calibration:
    """The engine profile called ``name``, or in the file ``name``. Raises ``ConfigurationError`` when there is none."""
    return parse_profile(Path(name).name.removesuffix(".toml"), calibration_text(name)).calibration


def open_models(settings: Settings, store: StateStore, library: ModelLibrary, journal: Journal) -> LocalModel | None:
    """The configured model; and hold what was served here before, so that it can be read without asking anybody.

    Raises ``ConfigurationError`` when the configured one cannot be read; others are told and left out.
    """
    for slot, wish in store.documents(SERVED_SPACE).items():
        try:
            if Path(str(wish["source"])).exists():
                library.hold(library.open(str(wish["source"])))
        except ModelError as error:
            journal.tell("model_unreadable", f"slot {slot}: {error}", "error", slot=slot)
    if not settings.model.path:
        return None
    try:
        model = library.open(settings.model.path)
    except ModelError as error:
        raise ConfigurationError(f"model.path: {error}") from None
    library.hold(model)
    return model


async def _live(
    prepared: Prepared, listener: ApiListener, read_again: Callable[[], Settings], switches: Switches
) -> None:
    """Assemble the node and run it until asked to stop. Raises ``IdentityBarred`` when the mesh does not take it any more."""
    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="planner")
    try:
        async with asyncio.TaskGroup() as tasks:
            node = assemble(prepared, tasks, pool, switches)
            await _serve(prepared, node, listener, tasks, switches, read_again)
            raise _Stop  # noqa: TRY301 - it ends the group
    except* _Stop:
        prepared.journal.tell("stopped", "said goodbye and stopped")
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    if switches.barred:
        raise IdentityBarred(switches.barred)


async def _serve(
    prepared: Prepared,
    node: Assembled,
    listener: ApiListener,
    tasks: asyncio.TaskGroup,
    switches: Switches,
    read_again: Callable[[], Settings],
) -> None:
    settings, driver = prepared.settings, node.driver
    transport = tasks.create_task(node.transport.run(), name="transport")
    await _listening(node.transport.started, transport)
    picture = Picture(
        driver=driver,
        who=prepared.who,
        mesh_id=prepared.book.book.mesh_id,
        listen_address=f"{settings.listen.host}:{node.transport.port}",
        started_us=monotonic_us(),
        link_settings=settings.links,
        switches=switches,
        probed=node.prober.explains,
    )
    operations = Operations(driver, node.agent, switches, prepared.calibration, node.artifacts, node.admittance)
    proxy = HeadProxy(picture, node.tunnels, prepared.who.node_id, tasks)
    app = build_app(picture, operations, settings=settings.api, token=api_token(settings), engine_routes=proxy.routes())
    api = tasks.create_task(serve_api(listener, app), name="api")
    for admission in prepared.book.book.statements:
        driver.carry_membership(node.membership.spread_admission(admission, monotonic_us()))
    await node.artifacts.prepare()
    node.admittance.inherit_orders()
    driver.post(driver.orders_changed)
    timers = tasks.create_task(driver.run_timers(), name="timers")
    watch = tasks.create_task(node.events.watch(), name="paths")
    probes = tasks.create_task(node.prober.run(), name="bandwidth probes")
    lag = tasks.create_task(LagMeter().run(node.events.on_loop_lag, phase_us(prepared.who.node_id)), name="loop lag")
    if settings.discovery.lan:
        tasks.create_task(_discovery(prepared, node, tasks).run(), name="lan discovery")
    notifier = SystemdNotifier()
    watchdog = tasks.create_task(_report(notifier, picture), name="systemd")
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _Reloader(prepared, operations, read_again))
    prepared.journal.tell(
        "started",
        f"{prepared.who.name} listens on {picture.listen_address}, API on http://{listener.address}/",
        node_id=prepared.who.node_id,
        boot_counter=prepared.who.boot_counter,
    )
    notifier.ready(picture.snapshot().status_text)
    gc.collect()
    gc.freeze()  # what start-up made lives as long as the process: no later collection walks it again
    await switches.stop.wait()
    if not switches.again:
        notifier.stopping()
    await _say_goodbye(node, switches)
    if switches.forget_mesh:
        prepared.book.forget()
        forget_said(prepared.store)
    await proxy.close()
    for task in (api, timers, watch, probes, lag, watchdog, transport):
        task.cancel()


def _discovery(prepared: Prepared, node: Assembled, tasks: asyncio.TaskGroup) -> LanDiscovery:
    """Looks for peers on the local network."""
    book, who, driver = prepared.book.book, prepared.who, node.driver
    return LanDiscovery(
        prepared.settings.discovery,
        tag=tag_of(book.mesh_id, who.node_id),
        addresses=lambda: prepared.whereabouts.addresses,
        hints=Hints(book, who.node_id),
        dial=lambda address, peer: driver.post(lambda: node.transport.dial(address, peer)),
        connected=lambda: node.transport.connected,
        clock_us=monotonic_us,
        journal=prepared.journal,
        tasks=tasks,
    )


async def _say_goodbye(node: Assembled, switches: Switches) -> None:
    """Tell everybody that this node leaves, so that nobody has to find out; then stop the engines."""
    switches.leaving = True
    node.agent.drain()
    node.driver.post(node.driver.row_changed)
    node.driver.carry_membership(node.membership.leave(monotonic_us()))
    await asyncio.sleep(GOODBYE_S)
    await node.runner.close()
    node.artifacts.close()
    node.events.settle()


async def _listening(started: asyncio.Event, transport: asyncio.Task[None]) -> None:
    """Until the transport listens; raises what ended it before."""
    waiting = asyncio.ensure_future(started.wait())
    await asyncio.wait({waiting, transport}, return_when=asyncio.FIRST_COMPLETED)
    if not started.is_set():
        waiting.cancel()
        await transport


async def _report(notifier: SystemdNotifier, picture: Picture) -> None:
    """Feed systemd's watchdog and status line from the loop, so that a stuck loop is noticed."""
    interval_s = (notifier.watchdog_interval_us or round(STATUS_S * 1e6)) / 1e6
    while notifier.listens:  # a look at 32 nodes every few seconds is a twentieth of what an idle daemon costs
        notifier.watchdog()
        notifier.status(picture.snapshot().status_text)
        await asyncio.sleep(min(interval_s, STATUS_S))


class _Reloader:
    """SIGHUP: take over what can change live, name what needs a restart; a broken file changes nothing."""

    def __init__(self, prepared: Prepared, operations: Operations, read_again: Callable[[], Settings]) -> None:
        self._settings = prepared.settings
        self._journal = prepared.journal
        self._operations = operations
        self._read_again = read_again

    def __call__(self) -> None:
        try:
            # The port that was chosen for 0 is not a change.
            read = self._read_again()
            listen = self._settings.listen if read.listen.port == 0 else read.listen
            done = reload(self._settings, read.model_copy(update={"listen": listen}))
        except ConfigurationError as error:
            self._journal.tell("reload_refused", str(error), "error")
            return
        self._settings = done.settings
        set_up_logging(done.settings.log)
        self._operations.on_settings(done.settings.planner, done.settings.replan)
        text = f"applied: {', '.join(done.applied) or 'nothing'}"
        if done.needs_restart:
            text += f"; needs a restart: {', '.join(done.needs_restart)}"
        self._journal.tell("reloaded", text, applied=list(done.applied), needs_restart=list(done.needs_restart))
