"""A real agent with an engine that needs an instruction which this CPU lacks: said clearly, started once, never in a loop."""

from pathlib import Path

import pytest

from stage_agent.addresses import free_ports
from stage_agent.demo.mesh import DemoNode, demo_mesh
from stage_agent.demo.profile import DemoProfile, NodeShape, ShapedMachine, settings_text
from tests.e2e.conftest import LiveMesh, told
from tests.unit.llama_cpp.illegal import illegal_program
from tests.unit.llama_cpp.stages import gguf_file, program

pytestmark = pytest.mark.timeout(120)
REFUSED = "not started again: engine was killed by SIGILL: this build needs instructions that this CPU lacks"


def test_an_engine_that_the_cpu_ends_is_started_once_and_the_mesh_says_why_it_does_not_serve(tmp_path: Path) -> None:
    starts, model = tmp_path / "starts", gguf_file(tmp_path / "m.gguf", tied=False)
    engine = program(tmp_path)
    environment = {"FAKE": "sigill", "STARTS": str(starts), "ILLEGAL": illegal_program(tmp_path / "illegal")}
    profile = DemoProfile(why="test", nodes={"alpha": NodeShape(memory_ratio=1, model_read_ms=1)})
    with demo_mesh(profile, keep=False) as mesh, told(mesh):
        directory = mesh.root / "alpha"
        directory.mkdir(mode=0o700)
        port, api = free_ports(2)
        node = DemoNode(ShapedMachine("alpha", 2**31, 10**10), directory, port, api)
        sections = {
            "node": {"name": "alpha", "state_dir": str(directory / "state"), "cache_dir": str(directory / "cache")},
            "listen": {"host": "127.0.0.1", "port": port},
            "api": {"port": api},
            "model": {"path": str(model)},
            "runtime": {
                "kind": "llama_cpp", "llama_server": engine, "llama_rpc_server": engine,
                "restart_limit": 100, "stop_grace_us": 500_000,
            },
            "runtime.environment": environment,
            "election": {"settle_us": 200_000},
            "assignment": {"culprit_backoff_us": 100_000, "culprit_backoff_max_us": 200_000},
        }  # fmt: skip
        node.config.write_text(settings_text(sections), "utf-8")
        mesh.nodes.append(node)
        live = LiveMesh(mesh)
        mesh.form()
        failures: list[str] = []

        def refused_twice() -> bool:
            failures[:] = [event.text for event in live.events if event.kind == "stage_failed"]
            return sum(REFUSED in text for text in failures) >= 2

        live.watch.until("the start that is not made again", 60.0, refused_twice)
        assert "engine_mismatch" in failures[0]
        assert "use another build" in failures[0]
        heads = [line for line in starts.read_text().splitlines() if "--api-key-file" in line]
        assert len(heads) == 1
        assert live.watch.serving() is None
        (reason,) = live.watch.status(node)["not_ready_reasons"]
        assert REFUSED in reason
