"""A real mesh of processes on loopback, formed once for a module, and what the whole model says on one machine."""

import asyncio
import contextlib
import io
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from config.settings import RuntimeSettings
from protocol.errors import StagemeshError
from stage_agent.cli.client import post_json
from stage_agent.demo.mesh import DemoMesh, demo_mesh
from stage_agent.demo.profile import LinkShape, conditioner_text, load_profile, machines
from stage_agent.demo.story import Story
from stage_agent.demo.watch import MeshWatch, SeenEvent
from stage_agent.demo_model import write_demo_model
from stage_agent.model_source import open_model
from stage_agent.runtimes.budget import StartBudget
from stage_agent.runtimes.context import RuntimeContext
from stage_agent.runtimes.reference.runtime import ReferenceRuntime
from tests.e2e.real_engine import counted
from tests.unit.runtimes.stages import EPOCH, assignments

MESHES: list[DemoMesh] = []
"""Those that run now: their logs are shown with a failure."""
LAST_LINES = 60
PROMPT = (1, 300, 301, 302, 303, 304, 305, 306)
NEW_TOKENS = 24


def logs(mesh: DemoMesh) -> Iterator[tuple[str, str]]:
    """What every agent wrote last, by name."""
    for node in mesh.nodes:
        lines = node.log.read_text("utf-8", "replace").splitlines() if node.log.exists() else ["nothing was logged"]
        yield f"log of {node.name}", "\n".join(line[:600] for line in lines[-LAST_LINES:])


@contextlib.contextmanager
def told(mesh: DemoMesh) -> Iterator[None]:
    """Failures inside show the agents' logs: those of a set-up are gone with the mesh before pytest reports it."""
    MESHES.append(mesh)
    completed = False
    try:
        yield
        completed = True
    finally:
        MESHES.remove(mesh)
        if not completed:
            for title, text in logs(mesh):
                print(f"---- {title}\n{text}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    """A failed test shows what the agents of its mesh wrote."""
    report = yield
    if report.failed:
        for mesh in MESHES:
            report.sections += logs(mesh)
    return report


class NoLink:
    """The whole model on one node sends nothing."""

    async def send(self, peer: str, sealed: bytes) -> None:
        raise AssertionError((peer, len(sealed)))


async def unsplit(model: Path) -> tuple[int, ...]:
    """What one process that holds every layer answers."""
    async with asyncio.TaskGroup() as tasks:
        context = RuntimeContext(
            tasks=tasks, node_id="n0", epoch=EPOCH, link=NoLink(), model_path=lambda _: model,
            peer_address=lambda _: "", budget=StartBudget(1, 1_000_000),
        )  # fmt: skip
        runtime = ReferenceRuntime(RuntimeSettings(kind="reference"), context)
        (whole,) = assignments([(0, 28)])
        await runtime.load(whole, lambda _done, _total: None)
        await runtime.activate(EPOCH, whole)
        result = await runtime.generate(PROMPT, NEW_TOKENS)
        await runtime.unload()
    return result.tokens


class LiveMesh:
    """The mesh, the watch on it, and everything its nodes told, in order."""

    def __init__(self, mesh: DemoMesh, model: Path | None = None) -> None:
        self.mesh = mesh
        self.model = model
        self.events: list[SeenEvent] = []
        self.epochs: list[str] = []
        """The plan of every answer."""
        self.watch = MeshWatch(mesh, self.events.append)

    @cached_property
    def whole(self) -> tuple[int, ...]:
        """What the whole model answers on one machine."""
        assert self.model is not None
        return asyncio.run(unsplit(self.model))

    def wait_until_serving(self, limit_s: float = 60.0, above_term: int = 0) -> dict:
        """Until a plan of a term above ``above_term`` is routable; its slot."""

        found: list[dict] = []

        def serving() -> bool:
            slot = self.watch.serving()
            if slot is not None and slot["term"] > above_term:
                found.append(slot)
            return bool(found)

        self.watch.until(f"a plan above term {above_term}", limit_s, serving)
        return found[0]

    def ask(self) -> list[int] | None:
        """Tokens from stage 0 of the plan that serves; ``None`` when it says that the request must be sent again.

        Every answer comes from exactly one plan.
        """
        with contextlib.suppress(StagemeshError):
            slot = self.watch.serving()
            if slot is not None:
                first = self.watch.names()[slot["plan"]["stages"][0]["node_id"]]
                body = {"slot": "default", "prompt": list(PROMPT), "max_tokens": NEW_TOKENS}
                answer = post_json(self.node(first).api, "/api/v1/generate", body)
                assert len(answer["epochs"]) == 1, answer
                self.epochs.append(answer["epochs"][0])
                return answer["tokens"]
        return None

    def ask_everybody(self, tokens: int, limit_s: float = 2.0) -> dict[str, tuple[tuple[int, ...], str]]:
        """Ask every node as if it were stage 0, whatever it believes; the tokens and the one plan of those that answer."""
        found = {}
        body = {"slot": "default", "prompt": list(PROMPT), "max_tokens": tokens}
        for node in self.watch.running():
            with contextlib.suppress(httpx.TransportError):
                answer = httpx.post(f"http://{node.api}/api/v1/generate", json=body, timeout=limit_s)
                if answer.status_code == 200:
                    (epoch,) = answer.json()["epochs"]
                    found[node.name] = tuple(answer.json()["tokens"]), epoch
        return found

    def answers(self, limit_s: float = 60.0) -> tuple[int, ...]:
        """Ask until there is an answer."""
        found: list[list[int]] = []

        def answered() -> bool:
            tokens = self.ask()
            if tokens is not None:
                found.append(tokens)
            return bool(found)

        self.watch.until("an answer", limit_s, answered)
        return tuple(found[0])

    def node(self, name: str):
        return next(node for node in self.mesh.nodes if node.name == name)

    def shape(self, **changes: object) -> None:
        """Rewrite the file of shaped links: ``changes`` on every link that ``only`` names."""
        only = changes.pop("only", None)
        links = {
            link: LinkShape(**{**shape.model_dump(), **changes}) if only is None or link in only else shape
            for link, shape in self.mesh.profile.links.items()
        }
        text = conditioner_text(self.mesh.profile.model_copy(update={"links": links}))
        (self.mesh.root / "links.toml").write_text(text)


def formed(nodes: int, directory: Path) -> Iterator[LiveMesh]:
    """A mesh of ``nodes`` processes that serves the demo's model."""
    model = directory / "demo.gguf"
    write_demo_model(model)
    profile = load_profile(None, nodes)
    with demo_mesh(profile, keep=False) as mesh, told(mesh):
        mesh.prepare(machines(profile, open_model(model)))
        live = LiveMesh(mesh, model)
        mesh.form()
        live.watch.until("every agent sees every other", 60.0, live.watch.everybody_alive)
        live.watch.until("settled links", 60.0, live.watch.links_settled)
        live.watch.until("one coordinator", 60.0, lambda: live.watch.coordinator() is not None)
        live.watch.serve(model)
        live.wait_until_serving()
        yield live


class ToldMesh(LiveMesh):
    """A mesh whose life is the demo's story, told to a console that nobody looks at."""

    def __init__(self, mesh: DemoMesh, model: Path, story: Story, console: io.StringIO) -> None:
        super().__init__(mesh, model)
        self.story = story
        self._console = console

    @property
    def said(self) -> str:
        """Everything that was shown up to now."""
        return self._console.getvalue()


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToldMesh]:
    """Three agents, as `stagemesh demo` forms them."""
    model = tmp_path_factory.mktemp("model") / "demo.gguf"
    write_demo_model(model)
    profile, package, screen = load_profile(None, 3), open_model(model), io.StringIO()
    with demo_mesh(profile, keep=False) as mesh, told(mesh):
        shaped = machines(profile, package)
        mesh.prepare(shaped)
        story = Story(Console(file=screen, width=160), mesh, shaped, package, model)
        story.introduce(profile)
        story.form()
        yield ToldMesh(mesh, model, story, screen)


@pytest.fixture(scope="module")
def engine_time(request: pytest.FixtureRequest) -> Iterator[None]:
    """The module's tests, set-up and all, are part of what the real engine may take."""
    with counted(request.module.__name__):
        yield


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveMesh]:
    yield from formed(5, tmp_path_factory.mktemp("model"))
