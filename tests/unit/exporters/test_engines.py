import json
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from coordinator.exporters.engines import EXPORTERS
from coordinator.exporters.export import export_document
from coordinator.planner.document import plan_document
from stage_agent.cli import export
from tests.unit.exporters.plans import COUNTS, NAMES, locked_plan, request

GOLDEN = Path(__file__).parent / "golden"


def words(line: str) -> list[str]:
    return shlex.split(line)


def value(line: str, flag: str) -> str:
    found = words(line)
    return found[found.index(flag) + 1]


def by_stage(exported) -> dict:
    return {part.stage_index: part for part in exported.parts}


def test_llama_cpp_s_head_names_every_worker_in_stage_order_and_starts_last() -> None:
    exported = EXPORTERS["llama-cpp"](request())
    assert [part.stage_index for part in exported.parts] == [2, 1, 0]
    _, worker, check, head = by_stage(exported)[0].commands
    assert worker.endswith("&")
    assert value(head, "--rpc") == "127.0.0.1:21061,10.0.0.2:21061,10.0.0.3:21061" == value(check, "--rpc")
    assert value(head, "--device") == "RPC0,RPC1,RPC2"
    assert value(head, "-ts") == "10,12,9"
    assert value(head, "-ngl") == "999"
    assert (value(head, "-c"), value(head, "-np"), value(head, "-fit")) == ("4096", "2", "off")
    assert "--no-repack" in words(head)
    assert words(worker)[:-1] == ["ggml-rpc-server", "-H", "127.0.0.1", "-p", "21061"]
    for index, address in ((1, "10.0.0.2"), (2, "10.0.0.3")):
        warning, command = by_stage(exported)[index].commands
        assert words(command) == ["ggml-rpc-server", "-H", address, "-p", "21061"]
        assert "no encryption and no authentication: let only the plan's hosts reach port 21061" in words(warning)[1]


def test_llama_cpp_s_head_makes_itself_a_key_once_and_nobody_else_may_read_it(tmp_path) -> None:
    make, *_, head = by_stage(EXPORTERS["llama-cpp"](request()))[0].commands
    key = tmp_path / value(head, "--api-key-file")
    made = set()
    for _ in range(2):
        subprocess.run(["sh", "-eu", "-c", make], cwd=tmp_path, check=True)
        made.add(key.read_text())
    assert key.stat().st_mode & 0o777 == 0o600
    assert len(made) == 1
    assert re.fullmatch("[0-9a-f]{64}", made.pop())


def test_llama_cpp_is_told_the_cache_type_of_the_plan_and_the_others_say_that_they_are_not() -> None:
    plain, quantised = request(), request(plan=replace(locked_plan(), cache_type="q8_0"))
    assert "-ctk" not in words(by_stage(EXPORTERS["llama-cpp"](plain))[0].commands[-1])
    head = by_stage(EXPORTERS["llama-cpp"](quantised))[0].commands[-1]
    assert (value(head, "-ctk"), value(head, "-ctv"), value(head, "-fa")) == ("q8_0", "q8_0", "on")
    for engine in EXPORTERS:
        assert any("cache type q8_0" in line for line in EXPORTERS[engine](quantised).cannot) == (engine != "llama-cpp")
        assert not any("cache type" in line for line in EXPORTERS[engine](plain).cannot)


def test_llama_cpp_keeps_a_tied_output_layer_on_the_head_where_it_costs_no_memory() -> None:
    tied = by_stage(EXPORTERS["llama-cpp"](request(tied_embeddings=True)))[0].commands[-1]
    assert value(tied, "-ot") == r"^token_embd\.weight$=CPU"
    assert "-ot" not in words(by_stage(EXPORTERS["llama-cpp"](request(tied_embeddings=False)))[0].commands[-1])


@pytest.mark.parametrize(
    ("engine", "variable"), [("vllm", "VLLM_PP_LAYER_PARTITION"), ("sglang", "SGLANG_PP_LAYER_PARTITION")]
)
def test_torch_engines_get_the_partition_on_every_host_and_ranks_in_stage_order(engine, variable) -> None:
    exported = EXPORTERS[engine](request())
    for index, part in by_stage(exported).items():
        (line,) = part.commands
        assert f"{variable}=10,12,8" in words(line)
        assert value(line, "--node-rank") == str(index)
        assert value(line, "--nnodes") == "3"
        if engine == "vllm":
            assert value(line, "--pipeline-parallel-size") == "3"
            assert (value(line, "--master-addr"), value(line, "--master-port")) == ("10.0.0.1", "21061")
            assert value(line, "--distributed-executor-backend") == "mp"
            assert ("--headless" in words(line)) == (index > 0)
            assert (value(line, "--max-model-len"), value(line, "--max-num-seqs")) == ("2048", "2")
        else:
            assert value(line, "--pp-size") == "3"
            assert value(line, "--dist-init-addr") == "10.0.0.1:21061"
            assert (value(line, "--context-length"), value(line, "--max-running-requests")) == ("2048", "2")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_single_stage_has_no_partition_and_says_so(engine) -> None:
    exported = EXPORTERS[engine](request((30,)))
    (line,) = exported.parts[0].commands
    assert "PARTITION" not in line
    assert "--nnodes" not in words(line)
    assert any("single stage" in sentence for sentence in exported.cannot)


def test_mlx_ranks_are_reversed_everywhere() -> None:
    exported = EXPORTERS["mlx"](request())
    assert {part.stage_index: part.host.address for part in exported.parts} == {
        2: "10.0.0.3", 1: "10.0.0.2", 0: "10.0.0.1",
    }  # fmt: skip
    for part in exported.parts:
        (line,) = part.commands
        assert words(line)[:2] == ["MLX_HOSTFILE=stagemesh-hosts.json", f"MLX_RANK={2 - part.stage_index}"]
        assert json.loads(part.files["stagemesh-hosts.json"]) == [
            ["10.0.0.3:21061"],
            ["10.0.0.2:21061"],
            ["10.0.0.1:21061"],
        ]
        compile(part.files["stagemesh_mlx.py"], "script", "exec")
        assert "SPLIT = [8, 12, 10]" in part.files["stagemesh_mlx.py"]


def test_mlx_runs_a_single_stage_without_a_ring() -> None:
    exported = EXPORTERS["mlx"](request((30,)))
    (part,) = exported.parts
    assert not part.files
    assert words(part.commands[0])[:4] == ["python", "-m", "mlx_lm", "generate"]
    assert not any("ring" in sentence for sentence in exported.cannot)


def test_exo_is_asked_at_the_given_port_and_told_how_an_instance_is_wrapped() -> None:
    commands = by_stage(EXPORTERS["exo"](request(port=6_000)))[0].commands
    assert all("localhost:6000/" in line for line in commands if "curl" in line)
    assert any('{"instance":' in line for line in commands)


def test_exo_s_shards_are_half_open_and_complete() -> None:
    shards = json.loads(by_stage(EXPORTERS["exo"](request()))[0].files["exo-shards.json"])
    assert [(each["device_rank"], each["start_layer"], each["end_layer"]) for each in shards] == [
        (0, 0, 10), (1, 10, 22), (2, 22, 30),
    ]  # fmt: skip
    assert {(each["world_size"], each["n_layers"]) for each in shards} == {(3, 30)}


def test_prima_cpp_s_ring_closes_and_only_the_head_knows_the_layers() -> None:
    parts = by_stage(EXPORTERS["prima-cpp"](request()))
    assert [value(parts[index].commands[0], "--next") for index in range(3)] == ["10.0.0.2", "10.0.0.3", "10.0.0.1"]
    for index, part in parts.items():
        (line,) = part.commands
        assert part.host.address == f"10.0.0.{index + 1}"
        assert (value(line, "--world"), value(line, "--rank"), value(line, "--master")) == ("3", str(index), "10.0.0.1")
        assert (value(line, "-m"), value(line, "-c")) == ("M.gguf", "2048")
        assert words(line)[0] == ("llama-cli" if index else "llama-server")
        assert ("-lw" in words(line)) == ("-np" in words(line)) == (index == 0)
    assert (value(parts[0].commands[0], "-lw"), value(parts[0].commands[0], "-np")) == ("10,12,8", "2")


@pytest.mark.parametrize("engine", EXPORTERS)
def test_every_exporter_says_what_it_cannot_express_and_quotes_what_a_shell_would_change(engine) -> None:
    exported = EXPORTERS[engine](request(model="my models/it's; rm -rf.gguf"))
    assert exported.cannot
    assert {part.host.name for part in exported.parts} == set(NAMES)
    if engine in {"llama-cpp", "vllm", "sglang", "prima-cpp"}:
        assert "my models/it's; rm -rf.gguf" in words(by_stage(exported)[0].commands[-1])


@pytest.mark.parametrize("engine", EXPORTERS)
def test_what_is_exported_is_what_was_checked_against_the_engine_s_own_rules(engine) -> None:
    golden = json.loads((GOLDEN / f"{engine}.json").read_text())
    assert golden.pop("why")
    assert export_document(EXPORTERS[engine](request(tied_embeddings=True))) == golden


def application() -> typer.Typer:
    app = typer.Typer()
    app.callback()(lambda: None)
    export.register(app)
    return app


def test_the_command_reads_a_plan_file_and_writes_a_folder_per_host(tmp_path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan_document(locked_plan(COUNTS))))
    done = CliRunner().invoke(
        application(),
        [
            "export",
            str(file),
            "--to",
            "llama-cpp",
            "--host",
            "beta=10.1.1.2",
            "--output",
            str(tmp_path / "out"),
            "--json",
        ],
    )
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert [host["stage_index"] for host in document["hosts"]] == [2, 1, 0]
    assert "127.0.0.1:21061,10.1.1.2:21061,gamma:21061" in (tmp_path / "out" / "00-alpha" / "run.sh").read_text()
    assert document["cannot_express"]
    worker = (tmp_path / "out" / "01-beta" / "run.sh").read_text()
    assert worker.index("no authentication") < worker.index("\nggml-rpc-server -H 10.1.1.2 -p 21061")


def test_the_command_refuses_an_unknown_engine_host_or_file(tmp_path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan_document(locked_plan(COUNTS))))
    run = CliRunner()
    assert run.invoke(application(), ["export", str(file), "--to", "petals"]).exit_code == 2
    stranger = run.invoke(application(), ["export", str(file), "--to", "vllm", "--host", "delta=10.0.0.9"])
    assert "no node of the plan" in str(stranger.exception)
    (tmp_path / "no.json").write_text("[]")
    assert "not a plan" in str(
        run.invoke(application(), ["export", str(tmp_path / "no.json"), "--to", "vllm"]).exception
    )
