"""A real mesh of three processes on loopback, formed once for the module."""

from collections.abc import Iterator

import pytest

from stage_agent.demo.mesh import DemoMesh, demo_mesh
from stage_agent.demo.profile import load_profile, machines
from stage_agent.demo.watch import MeshWatch, SeenEvent
from stage_agent.demo_model import write_demo_model
from stage_agent.model_source import open_model


class LiveMesh:
    """The mesh, the watch on it, and everything its nodes told, in order."""

    def __init__(self, mesh: DemoMesh) -> None:
        self.mesh = mesh
        self.events: list[SeenEvent] = []
        self.watch = MeshWatch(mesh, self.events.append)

    def wait_until_serving(self, limit_s: float = 60.0) -> dict:
        self.watch.until("a serving plan", limit_s, lambda: self.watch.serving() is not None)
        return self.watch.serving()

    def node(self, name: str):
        return next(node for node in self.mesh.nodes if node.name == name)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveMesh]:
    model = tmp_path_factory.mktemp("model") / "demo.gguf"
    write_demo_model(model)
    profile = load_profile(None, None)
    with demo_mesh(profile, keep=False) as mesh:
        mesh.prepare(machines(profile, open_model(model)))
        live = LiveMesh(mesh)
        mesh.form()
        live.watch.until("every agent sees every other", 40.0, live.watch.everybody_alive)
        live.watch.until("settled links", 40.0, live.watch.links_settled)
        live.watch.serve(model)
        live.wait_until_serving()
        yield live
