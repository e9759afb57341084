"""`init`, `invite` and `join` through the command line against a running transport, and what stays secret."""

import asyncio
import base64
import contextlib
import dataclasses
import io
import json
import logging
import os
import re
import shlex
import shutil

import pytest
import typer
from typer.testing import CliRunner

from config.settings import QuicSettings
from protocol.errors import JoinError, StagemeshError
from protocol.join_token import JoinToken, decode_token, encode_token
from protocol.quic.desk import AdmissionDesk
from protocol.quic.identity import Identity
from protocol.quic.interface import AdmissionsLearned, DialFailed, PeerConnected
from protocol.quic.joining import join
from protocol.quic.mesh_files import load_membership
from stage_agent.cli.identity import register
from tests.integration.transport_mesh import Node, eventually, run, running

APP = typer.Typer(pretty_exceptions_enable=False)
register(APP)


@dataclasses.dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


def cli(*arguments, stdin=""):
    """What the console script does, in this process: a traceback would be an exception here."""
    ran = CliRunner().invoke(APP, list(arguments), input=stdin, env={"HOME": "/nonexistent"})
    if isinstance(ran.exception, StagemeshError):
        return Done(ran.exception.exit_code, ran.stdout, f"stagemesh: {ran.exception}\n")
    if ran.exception is not None and not isinstance(ran.exception, SystemExit):
        raise ran.exception
    return Done(ran.exit_code, ran.stdout, ran.stderr)


async def cli_async(*arguments, stdin=""):
    return await asyncio.to_thread(cli, *arguments, stdin=stdin)


class Founder(Node):
    """A running transport over a state directory made by the command line."""

    def __init__(self, state_dir, **options):
        identity, membership = Identity.load(state_dir), load_membership(state_dir)
        book = membership.book()
        desk = AdmissionDesk(identity=identity, book=book, state_dir=state_dir, seeds=lambda: ("192.0.2.1:7946",))
        super().__init__(identity, state_dir.name, book, desk=desk, **options)
        self.state_dir = state_dir


def invite(founder, *more):
    done = cli("invite", "--state-dir", str(founder.state_dir), "--address", founder.address, *more)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[0]


def test_two_directories_on_one_machine_become_one_mesh(tmp_path):
    async def main():
        done = cli("init", "--state-dir", str(tmp_path / "a"), "--mesh", "lab", "--json")
        assert json.loads(done.stdout)["mesh_id"].startswith("lab.")
        founder = Founder(tmp_path / "a")
        async with running(founder):
            token = await asyncio.to_thread(invite, founder)
            done = await cli_async("join", token, "--state-dir", str(tmp_path / "b"))
            assert (done.returncode, done.stderr) == (0, "")
            assert "joined mesh lab" in done.stdout
            await founder.until(AdmissionsLearned)
            joined = load_membership(tmp_path / "b")
            assert joined.seeds == (founder.address, "192.0.2.1:7946")
            newcomer = Node(Identity.load(tmp_path / "b"), "b", joined.book())
            async with running(newcomer):
                newcomer.transport.dial(joined.seeds[0])
                assert (await newcomer.until(PeerConnected)).peer == founder.id

    run(main())


def test_where_udp_does_not_pass_a_newcomer_joins_through_tcp_and_a_wrong_token_is_refused_there_too(tmp_path):
    async def main():
        cli("init", "--state-dir", str(tmp_path / "a"))
        founder = Founder(tmp_path / "a")
        async with running(founder):
            token = decode_token(await asyncio.to_thread(invite, founder))
            udp = founder.transport._router._udp
            udp._take = lambda *_: None
            udp.send = lambda *_: ""
            wrong = JoinToken(token.mesh_id, token.inviter, token.addresses, token.token_id, os.urandom(32))
            with pytest.raises(JoinError, match="does not accept this token"):
                await join(Identity.generate(), wrong, "mallory")
            newcomer = Identity.generate()
            membership = await join(newcomer, token, "newcomer")
            assert newcomer.node_id in membership.book()
            assert newcomer.node_id in founder.book
            await eventually(lambda: founder.transport._strangers() == 0)
            assert founder.transport._router._tunnels == {}

    run(main())


def test_a_tunnel_that_carries_nonsense_or_nothing_ends_and_lets_nobody_in(tmp_path):
    async def main():
        cli("init", "--state-dir", str(tmp_path / "a"))
        founder = Founder(tmp_path / "a", settings=QuicSettings(connect_timeout_us=500_000))
        async with running(founder):
            silent, _ = await asyncio.open_connection("127.0.0.1", founder.transport.port)
            assert await asyncio.wait_for(silent.read(), 5) == b"", "who says nothing is cut off after the deadline"
            reader, writer = await asyncio.open_connection("127.0.0.1", founder.transport.port)
            writer.write(b"Q" + b"\x00\x05hello" + b"\x04\xb0" + os.urandom(1_200) + b"\xff")
            await eventually(lambda: founder.transport.counters.dropped["not_quic"] >= 1)
            writer.write_eof()
            assert await asyncio.wait_for(reader.read(), 5) == b""
            await eventually(lambda: founder.transport._strangers() == 0)
            assert founder.transport.table._sessions == set()

    run(main())


def test_every_way_to_go_wrong_is_one_line_and_writes_nothing(tmp_path):
    async def main():
        cli("init", "--state-dir", str(tmp_path / "a"))
        founder = Founder(tmp_path / "a")

        async def refused(token, where="x", stdin=""):
            done = await cli_async("join", token, "--state-dir", str(tmp_path / where), stdin=stdin)
            assert done.returncode == 1
            assert done.stdout == ""
            assert done.stderr.count("\n") == 1, done.stderr
            assert "Traceback" not in done.stderr
            assert list((tmp_path / where).glob("*")) == []
            assert decode_or_none(token) is None or token not in done.stderr
            return done.stderr

        def decode_or_none(token):
            with contextlib.suppress(JoinError):
                return decode_token(token)
            return None

        async with running(founder):
            token = await asyncio.to_thread(invite, founder)
            good = decode_token(token)
            wrong = encode_token(JoinToken(good.mesh_id, good.inviter, good.addresses, good.token_id, bytes(32)))
            assert "does not accept this token" in await refused(wrong)
            assert "damaged or cut off" in await refused(token[:-4])
            assert "neither a join token" in await refused("hello")
            assert "not a join token" in await refused("-", stdin="hello")
            other = encode_token(
                JoinToken(good.mesh_id, Identity.generate().node_id, good.addresses, good.token_id, good.secret)
            )
            assert "not the one that made this token" in await refused(other)
            expired = await asyncio.to_thread(invite, founder, "--ttl", "1s")
            await asyncio.sleep(1.1)
            assert "has expired" in await refused(expired)
            assert (
                await cli_async("join", "-", "--state-dir", str(tmp_path / "b"), stdin=f"{token}\n")
            ).returncode == 0
            assert "was used already" in await refused(token)
            again = await cli_async("join", token, "--state-dir", str(tmp_path / "b"))
            assert "in mesh home already" in again.stderr
            unreachable = await asyncio.to_thread(invite, founder)
        assert "cannot reach the inviter at 127.0.0.1" in await refused(unreachable)

    run(main())


@pytest.mark.parametrize(
    ("arguments", "said", "code"),
    [
        (["init", "--mesh", "Has Spaces"], "use 1 to 24 of a-z", 2),
        (["invite"], "stagemesh init", 1),
        (["invite", "--ttl", "soon"], "write a time", 2),
        (["invite", "--ttl", "31d"], "up to 30 days", 2),
    ],
)
def test_wrong_arguments_say_what_to_write(tmp_path, arguments, said, code):
    done = cli(*arguments, "--state-dir", str(tmp_path / "s"))
    assert said in done.stderr
    assert (done.returncode, done.stderr.count("\n")) == (code, 1)


def test_init_never_overwrites_and_goes_on_after_a_crash_between_its_two_files(tmp_path):
    first = cli("init", "--state-dir", str(tmp_path), "--json")
    assert cli("init", "--state-dir", str(tmp_path)).returncode == 1
    (tmp_path / "mesh.json").unlink()
    again = cli("init", "--state-dir", str(tmp_path), "--json")
    assert json.loads(again.stdout) == json.loads(first.stdout)


def test_a_bad_address_of_an_invitation_is_refused_before_a_token_exists(tmp_path):
    cli("init", "--state-dir", str(tmp_path))
    done = cli("invite", "--state-dir", str(tmp_path), "--address", "::1:7946")
    assert "in brackets" in done.stderr
    assert not (tmp_path / "invites").exists()


def test_the_next_command_that_init_prints_leads_to_the_same_directory(tmp_path):
    directory = tmp_path / "my state"
    done = cli("init", "--state-dir", str(directory))
    commands = re.findall(r"`stagemesh ([^`]+)`", done.stdout)
    assert [shlex.split(command) for command in commands] == [
        ["run", "--state-dir", str(directory)], ["invite", "--state-dir", str(directory)],
    ]  # fmt: skip
    asked = cli(*shlex.split(commands[1]), "--address", "127.0.0.1:7946")
    assert asked.returncode == 0, asked.stderr


def test_a_state_directory_that_cannot_be_made_is_one_clear_line(tmp_path):
    (tmp_path / "file").write_text("")
    done = cli("init", "--state-dir", str(tmp_path / "file" / "state"))
    assert done.returncode == 1
    assert "Not a directory" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_copied_state_directory_is_found_out_as_a_clone(tmp_path):
    async def main():
        cli("init", "--state-dir", str(tmp_path / "a"))
        founder = Founder(tmp_path / "a")
        async with running(founder):
            token = await asyncio.to_thread(invite, founder)
            await cli_async("join", token, "--state-dir", str(tmp_path / "b"))
            shutil.copytree(tmp_path / "b", tmp_path / "copy")
            book = load_membership(tmp_path / "b").book()
            real = Node(Identity.load(tmp_path / "b"), "b", book, instance="1" * 32)
            copy = Node(Identity.load(tmp_path / "copy"), "b", book, instance="2" * 32)
            async with running(real, copy):
                real.transport.dial(founder.address)
                await founder.until(PeerConnected)
                copy.transport.dial(founder.address)
                assert (await copy.until(DialFailed)).reason == "identity_conflict"

    run(main())


def test_no_secret_reaches_a_log_an_event_or_an_error(tmp_path):
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    heard = []

    async def main():
        cli("init", "--state-dir", str(tmp_path / "a"))
        founder = Founder(tmp_path / "a")
        async with running(founder):
            token = decode_token(await asyncio.to_thread(invite, founder))
            newcomer = Identity.generate()
            await join(newcomer, token, "newcomer")
            wrong = JoinToken(token.mesh_id, token.inviter, token.addresses, token.token_id, os.urandom(32))
            with pytest.raises(JoinError) as caught:
                await join(Identity.generate(), wrong, "newcomer")
            await eventually(lambda: founder.transport.table.strangers == 0)
        heard.extend([
            stream.getvalue(), repr(founder.events), repr(token), repr(caught.value), repr(founder.transport.counters),
        ])  # fmt: skip
        secrets = [
            token.secret, wrong.secret,
            *(identity.private_key.private_bytes_raw() for identity in (founder.identity, newcomer)),
        ]  # fmt: skip
        assert "newcomer" not in secrets
        for text in heard:
            for secret in secrets:
                for form in (secret.hex(), repr(secret)[2:-1], base64.b64encode(secret).decode()[:40]):
                    assert form not in text

    try:
        run(main())
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
    assert "QUIC" in heard[0] or "TLS" in heard[0] or "Negotiated" in heard[0], "aioquic did log something"
