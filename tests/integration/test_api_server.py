"""The API as a real server on a real port, and the command line that talks to it."""

import asyncio
import contextlib
import json
import signal
import socket
import threading
from contextlib import contextmanager

import httpx
import pytest
import typer
from typer.testing import CliRunner

from config.settings import ApiSettings
from protocol.errors import AddressError, ConfigurationError, DaemonUnreachable, StagemeshError
from stage_agent.api.app import build_app
from stage_agent.api.commands import Drain, LockTopology, Pin, Refused, ServeModel, UnserveModel
from stage_agent.api.server import ApiListener, bind_api, serve_api
from stage_agent.cli import completion, doctor, operate, read
from stage_agent.cli.client import ApiRefused, get_json, post_json, stream_events
from tests.unit.api.pictures import PLAN, Remembering, ShownMesh, picture

TOKEN = "0123456789abcdef0123456789abcdef"


@contextmanager
def daemon(view=None, sink=None, **options):
    """A server in a thread with its own loop; yields ``host:port``. It must end by itself when cancelled."""
    listener = bind_api(ApiSettings(port=0), token=options.get("token"))
    app = build_app(view or ShownMesh(), sink or Remembering(), **options)
    started, loop = threading.Event(), asyncio.new_event_loop()
    task = loop.create_task(serve_api(listener, app))
    loop.call_soon(started.set)

    def run():
        with pytest.raises(asyncio.CancelledError):
            loop.run_until_complete(task)
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    started.wait(5)
    try:
        yield listener.address
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(10)
        assert not thread.is_alive(), "the server did not end when it was cancelled"


@pytest.fixture(autouse=True)
def no_configuration_of_this_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("NO_COLOR", "1")


def command(*arguments, stdin=None):
    """Run the command line in this process; errors as ``main`` shows them."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    for module in (read, operate, doctor, completion):
        module.register(app)
    result = CliRunner().invoke(app, list(arguments), input=stdin)
    if isinstance(result.exception, StagemeshError):
        return result.exception.exit_code, f"stagemesh: {result.exception}"
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_port_zero_becomes_a_real_port_that_answers():
    with daemon() as node:
        assert not node.endswith(":0")
        assert get_json(node, "/api/v1/status")["node"]["name"] == "alpha"


def test_a_port_in_use_is_one_clear_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(AddressError, match=rf"127.0.0.1:{port} .*in use.*api.port") as caught:
            bind_api(ApiSettings(port=port))
    assert "\n" not in str(caught.value)


def test_an_address_of_another_machine_is_one_clear_line():
    with pytest.raises(AddressError, match=r"no-such-host\.invalid"):
        bind_api(ApiSettings(host="no-such-host.invalid", port=0))
    with pytest.raises(AddressError, match=r"cannot listen on 192\.0\.2\.1"):
        bind_api(ApiSettings(host="192.0.2.1", port=0), token=TOKEN)


def test_an_api_that_others_can_reach_needs_a_token():
    with pytest.raises(ConfigurationError, match=r"set api\.token_file"):
        bind_api(ApiSettings(host="0.0.0.0", port=0))
    listener = bind_api(ApiSettings(host="0.0.0.0", port=0), token=TOKEN)
    listener.socket.close()
    listener = bind_api(ApiSettings(host="::1", port=0))
    assert listener.address.startswith("[::1]:")
    listener.socket.close()


@pytest.mark.parametrize(
    ("host", "addresses", "reachable"),
    [
        ("127.0.0.1", ("10.0.0.1:7946",), ""),
        ("::1", ("10.0.0.1:7946",), ""),
        ("0.0.0.0", ("gpu-box:7946", "10.0.0.1:7946"), "gpu-box:7947"),
        ("::", ("[fd00::1]:7946",), "[fd00::1]:7947"),
        ("0.0.0.0", (), ""),
        ("10.0.0.9", ("10.0.0.1:7946",), "10.0.0.9:7947"),
    ],
)
def test_others_are_told_an_address_that_they_can_ask(host, addresses, reachable):
    with socket.socket() as unused:
        assert ApiListener(unused, host, 7947).reachable_address(addresses) == reachable


def test_the_server_leaves_the_signal_handlers_of_the_daemon_alone():
    async def serve():
        listener = bind_api(ApiSettings(port=0))
        before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
        task = asyncio.ensure_future(serve_api(listener, build_app(ShownMesh(), Remembering())))
        async with httpx.AsyncClient(base_url=f"http://{listener.address}", trust_env=False) as client:
            assert (await client.get("/healthz")).status_code == 200
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert listener.socket.fileno() == -1

    asyncio.run(serve())


def test_a_cancelled_server_ends_although_a_stream_is_open():
    view = ShownMesh()
    view.happens("one")
    with daemon(view) as node:
        stream = stream_events(node)
        assert next(stream)["kind"] == "one"
    with pytest.raises(DaemonUnreachable):
        next(stream)


def test_events_are_followed_as_they_happen():
    view = ShownMesh()
    with daemon(view) as node:
        stream = stream_events(node)
        view.happens("plan_active", "plan 0123 is active", plan_id="0123")
        assert next(stream)["fields"] == {"plan_id": "0123"}
        view.happens("node_lost")
        assert next(stream)["kind"] == "node_lost"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("status", ["alpha", "this node, term 4", "1 alive, 1 suspect, 1 dead", "4/alphaaaa/00000000", "50.0 ms"]),
        ("peers", ["alpha (this, coordinator)", "100.0 GB/s", "shaped", "suspect", "dead"]),
        ("links", ["alpha → beta", "2.00 ms", "50.0 MB/s", "shaped, degraded", "not yet"]),
        ("stages", ["serving", "0–26", "4/alphaaaa/00000000"]),
        ("events", ["plan_active", "plan 0123 is active"]),
    ],
)
def test_read_commands_show_tables_to_people_and_one_document_to_programs(name, words):
    view = ShownMesh()
    view.happens("plan_active", "plan 0123 is active")
    with daemon(view) as node:
        code, text = command(name, "--node", node)
        assert code == 0
        for word in words:
            assert word in text
        assert "\x1b" not in text
        code, text = command(name, "--node", node, "--json")
        assert (code, isinstance(json.loads(text), dict)) == (0, True)


def test_a_peers_name_cannot_drive_the_terminal_of_who_lists_it():
    view = ShownMesh(picture(name="a\x1b[2Jb"))
    view.happens("peer\x07", "\x1b]0;owned\x07")
    with daemon(view) as node:
        for name in ("status", "events"):
            assert not {"\x1b", "\x07"} & set(command(name, "--node", node)[1])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("serve", "alias", "--slot", "a", "--priority", "3"), ServeModel(model="alias", slot="a", priority=3)),
        (("unserve", "a"), UnserveModel(slot="a")),
        (("drain",), Drain()),
        (("pin", "--stage0", "beta", "--coordinator", ""), Pin(stage0="beta", coordinator="")),
        (("lock", "--release"), LockTopology()),
    ],
)
def test_operator_commands_arrive_as_commands(arguments, expected):
    sink = Remembering()
    with daemon(sink=sink) as node:
        assert command(*arguments, "--node", node)[0] == 0
    assert sink.asked == [expected]


def test_a_lock_file_is_checked_before_it_is_sent(tmp_path):
    sink = Remembering()
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps({"version": 1, "stages": [{"node": "alpha", "layer_start": 0, "layer_end": 40}]}))
    with daemon(sink=sink) as node:
        for content in ("{", "[]", "{}", "[" * 100_000):
            bad.write_text(content)
            code, text = command("lock", str(bad), "--node", node)
            assert (code, str(bad) in text) == (2, True)
        assert command("lock", str(good), "--node", node)[0] == 0
    (lock,) = sink.asked
    assert [(stage.node, stage.layer_end) for stage in lock.stages] == [("alpha", 40)]


def test_leaving_is_asked_for_and_not_done_without_a_yes():
    sink = Remembering()
    with daemon(sink=sink) as node:
        assert command("leave", "--node", node, stdin="n\n")[0] == 1
        assert sink.asked == []
        assert command("leave", "--node", node, "--yes")[0] == 0
    assert len(sink.asked) == 1


@pytest.mark.parametrize(
    ("code", "exit_code"), [("no_valid_topology", 3), ("locked_missing_node", 3), ("target_missed", 4), ("busy", 1)]
)
def test_a_refusal_is_one_line_with_the_exit_code_it_stands_for(code, exit_code):
    with daemon(sink=Remembering(Refused(code, "because of this"))) as node:
        assert command("drain", "--node", node) == (exit_code, "stagemesh: because of this")
        with pytest.raises(ApiRefused) as caught:
            post_json(node, "/api/v1/plan:preview", {})
    assert caught.value.document() == {"error": {"code": code, "message": "because of this", "details": {}}}


def test_no_daemon_is_exit_five_and_says_what_to_do():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        code, text = command("status", "--node", f"127.0.0.1:{port}")
    assert code == 5
    assert f"127.0.0.1:{port}" in text
    assert "stagemesh run" in text
    assert text.count("\n") == 0


def test_something_else_on_the_port_is_said_to_be_something_else():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def speak():
            with contextlib.suppress(OSError):  # the listener closes when the test is over
                for _ in range(2):
                    connection, _ = server.accept()
                    connection.recv(1024)
                    connection.sendall(b"SSH-2.0-OpenSSH\r\n")
                    connection.close()

        threading.Thread(target=speak, daemon=True).start()
        code, text = command("status", "--node", f"127.0.0.1:{server.getsockname()[1]}")
    assert code == 5
    assert "is that a stagemesh API port?" in text


@pytest.mark.parametrize("node", ["", "a/b", "user@host:1", "host:0", "host:65536", "a:b:c", "[::1"])
def test_an_address_that_is_none_is_refused_before_anything_is_sent(node):
    code, text = command("status", "--node", node)
    assert code == 1
    assert "HOST:PORT" in text


def test_the_command_line_carries_the_token_of_the_configuration(tmp_path, monkeypatch):
    with daemon(token=TOKEN) as node:
        code, text = command("status", "--node", node)
        assert (code, "api.token_file" in text) == (1, True)
        (tmp_path / "token").write_text(TOKEN + "\n")
        monkeypatch.setenv("STAGEMESH_API__TOKEN_FILE", str(tmp_path / "token"))
        assert command("status", "--node", node)[0] == 0


def test_the_local_daemon_is_where_the_configuration_says(monkeypatch):
    with daemon() as node:
        monkeypatch.setenv("STAGEMESH_API__PORT", node.rpartition(":")[2])
        assert command("status")[0] == 0


def test_a_proxy_of_the_environment_is_not_asked_for_a_neighbour(monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with daemon() as node:
        assert command("status", "--node", node)[0] == 0


def test_doctor_says_the_next_step_for_every_failure(tmp_path, monkeypatch):
    monkeypatch.setenv("STAGEMESH_NODE__STATE_DIR", str(tmp_path / "absent"))
    monkeypatch.setenv("STAGEMESH_MODEL__PATH", str(tmp_path / "absent.gguf"))
    monkeypatch.setenv("STAGEMESH_RUNTIME__KIND", "process")
    monkeypatch.setenv("STAGEMESH_RUNTIME__COMMAND", "no-such-engine")
    with daemon(ShownMesh(picture(draining=True))) as node:
        code, text = command("doctor", "--config", own_configuration(tmp_path), "--node", node, "--json")
    assert code == 1
    findings = {finding["check"]: finding for finding in json.loads(text)["findings"]}
    failed = {name for name, finding in findings.items() if finding["verdict"] == "fail"}
    assert failed == {"state", "identity", "engine", "model", "daemon", "peer beta", "peer gone"}
    assert all(findings[name]["next_step"] for name in failed)
    assert findings["link to beta"]["verdict"] == "note"
    assert findings["signals"]["verdict"] == "ok"


def test_doctor_without_a_daemon_tries_the_ports_that_it_would_need(tmp_path, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv("STAGEMESH_API__PORT", str(taken.getsockname()[1]))
        monkeypatch.setenv("STAGEMESH_LISTEN__PORT", "0")
        monkeypatch.setenv("STAGEMESH_NODE__STATE_DIR", str(tmp_path))
        code, text = command("doctor", "--config", own_configuration(tmp_path), "--node", "127.0.0.1:1")
    assert code == 1
    assert f"port {taken_port(text)}/tcp" in text
    assert "in use" in text
    assert "stagemesh run" in text


def own_configuration(tmp_path):
    """Says that the daemon at ``--node`` is this machine's own."""
    path = tmp_path / "stagemesh.toml"
    path.touch()
    return str(path)


def taken_port(text):
    return next(line for line in text.splitlines() if "in use" in line).split("port ")[1].split("/")[0]


def test_doctor_stops_at_a_broken_configuration(tmp_path):
    broken = tmp_path / "broken.toml"
    broken.write_text("[api]\nprot = 1\n")
    code, text = command("doctor", "--config", str(broken))
    assert code == 1
    assert "did you mean 'port'" in text


def test_completion_prints_a_script_for_every_shell_it_names():
    for shell in ("bash", "zsh", "fish"):
        code, text = command("completion", shell)
        assert code == 0
        assert "_STAGEMESH_COMPLETE" in text
    assert command("completion", "tcsh")[0] == 2


def test_the_plan_of_the_api_is_what_the_client_gets():
    with daemon() as node:
        assert get_json(node, "/api/v1/plan") == PLAN
