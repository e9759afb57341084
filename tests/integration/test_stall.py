"""A real agent whose process stands still: it says so, accuses nobody, and gives up connections that it can spare."""

import asyncio
import json
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from protocol.quic.interface import PeerConnected, PeerDisconnected
from protocol.quic.mesh_files import Membership, store_first
from protocol.quic.private_file import write_private
from stage_agent.addresses import free_ports
from stage_agent.probes.lag import LagMeter
from tests.integration.transport_mesh import Node, eventually, identities, run, running

PEERS = 24
SHED = (PEERS - 16) // 4
"""A quarter of what exceeds sixteen."""


def agent(root, identity, book):
    """A running agent; its process, its port, and its API."""
    port, api = free_ports(2)
    store_first(root / "state", Membership(book.mesh_id, book.statements))
    write_private(root / "state" / "identity.pem", identity.to_pem())
    sections = {
        "node": {"name": "hub", "state_dir": str(root / "state"), "cache_dir": str(root / "cache")},
        "listen": {"host": "127.0.0.1", "port": port},
        "api": {"port": api},
        "shape": {"memory_bytes": 2**30, "memory_bandwidth_bytes_per_s": 10**10},
        "probe": {"benchmark": False},
    }
    lines = [
        line
        for section, values in sections.items()
        for line in (f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items()))
    ]
    (root / "stagemesh.toml").write_text("\n".join(lines))
    process = subprocess.Popen(
        [sys.executable, "-m", "stage_agent", "run", "--config", str(root / "stagemesh.toml")],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    return process, port, api


def get(api, path):
    with urllib.request.urlopen(f"http://127.0.0.1:{api}{path}", timeout=5) as answer:
        return json.load(answer)


async def answers(api, process):
    for _ in range(600):
        assert process.poll() is None
        try:
            return await asyncio.to_thread(get, api, "/api/v1/status")
        except OSError:
            await asyncio.sleep(0.1)
    raise AssertionError("the agent did not start")


@pytest.mark.timeout(120)
def test_an_agent_that_stood_still_for_two_seconds_says_so_and_sheds_what_it_can_spare(tmp_path):
    async def main():
        made, books = identities(PEERS + 1)
        process, port, api = agent(tmp_path, made[0], books[0])
        peers = [Node(identity, f"p{number}", books[number + 1]) for number, identity in enumerate(made[1:])]
        try:
            await answers(api, process)
            async with running(*peers):
                for peer in peers:
                    peer.transport.dial(f"127.0.0.1:{port}")
                    await peer.until(PeerConnected)
                process.send_signal(signal.SIGSTOP)
                await asyncio.sleep(2)
                process.send_signal(signal.SIGCONT)
                await eventually(lambda: sum(len(peer.seen(PeerDisconnected)) for peer in peers) >= SHED)
                events = (await asyncio.to_thread(get, api, "/api/v1/events"))["events"]
                stalls = [event for event in events if event["kind"] == "loop_lag"]
                assert stalls
                assert 1_000_000 < stalls[0]["fields"]["late_us"] < 10_000_000
                nodes = (await asyncio.to_thread(get, api, "/api/v1/nodes"))["nodes"]
                (own,) = (node for node in nodes if node["is_self"])
                assert "loop_lag" in own["degraded"]
                assert not [event for event in events if event["kind"] == "member_changed"], "nobody was accused"
                assert sum(len(peer.seen(PeerDisconnected)) for peer in peers) == SHED, "and no more than that"
        finally:
            process.kill()
            process.wait()

    run(main())


def test_a_loop_that_is_really_blocked_is_reported_with_how_late_it_was():
    async def main():
        heard = []
        meter = asyncio.ensure_future(LagMeter().run(heard.append))
        await asyncio.sleep(0.15)
        heard.clear()  # what other processes did to this one meanwhile
        time.sleep(1.2)  # noqa: ASYNC251 - the very thing that is looked for
        await asyncio.sleep(0.15)
        meter.cancel()
        assert 300_000 <= max(heard) < 5_000_000  # a beat of 500 ms may have begun just before

    run(main())
