"""One transport in a namespace, to be measured: ``python -m tests.namespaces.talker far|near STATE [HOST FAR_ID SECONDS]``.

``far`` answers echoes and drinks bulk streams until its input ends. ``near`` connects to it, measures echoes alone and
echoes while a bulk stream runs, and prints one JSON object. Echoes leave by the clock: one that is lost costs its own
sample and not those of the two seconds in which it is waited for.
"""

import asyncio
import itertools
import json
import sys
import time
from pathlib import Path

from protocol.ids import NodeId
from protocol.messages import Ping
from protocol.quic.identity import Identity
from protocol.quic.interface import MessageReceived, PeerConnected
from protocol.quic.mesh_files import load_membership
from tests.integration.transport_mesh import Node, now_us, run, running

PORT = 7946
CHUNK = bytes(1_048_576)
SEQUENCE = itertools.count(1)
LOST_S = 2.0


def node(state, name):
    membership = load_membership(state)
    assert membership is not None
    return Node(Identity.load(state), name, membership.book(), host="0.0.0.0", port=PORT)


async def far(state):
    talker = node(state, "far")

    def answer(event):
        if isinstance(event, MessageReceived) and isinstance(event.message, Ping):
            talker.transport.send(event.peer, event.message, event.lane)

    async def drink(_peer, _kind, _header, reader, writer):
        while await reader.read(1_048_576):
            pass
        writer.write(b"done")
        await writer.drain()

    talker.transport.table._events = answer
    talker.transport.on_bulk = drink
    async with running(talker):
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.read)


async def near(state, host, far_id, seconds):
    talker = node(state, "near")
    async with running(talker):
        talker.transport.dial(f"{host}:{PORT}", far_id)
        await talker.until(PeerConnected, patience_s=30)
        waiting = {}

        def take(event):
            if isinstance(event, MessageReceived) and event.message.seq in waiting:
                waiting.pop(event.message.seq).set_result(event.arrived_us)

        talker.transport.table._events = take

        async def echo(times):
            seq = next(SEQUENCE)
            waiting[seq] = asyncio.get_running_loop().create_future()
            begun_us = now_us()
            talker.transport.send(far_id, Ping(seq=seq), "datagram")
            try:
                times.append((await asyncio.wait_for(waiting[seq], LOST_S) - begun_us) / 1_000)
            except TimeoutError:
                waiting.pop(seq, None)
                times.append(None)

        async def echoes(until_s, every_s):
            times, due_s = [], time.monotonic()
            async with asyncio.TaskGroup() as group:
                while due_s < until_s:
                    group.create_task(echo(times))
                    due_s = max(due_s + every_s, time.monotonic())
                    await asyncio.sleep(due_s - time.monotonic())
            return times

        idle = await echoes(time.monotonic() + seconds, 0.05)
        reader, writer = await talker.transport.open_bulk(far_id, "artifact", b"")
        sent, begun_s = 0, time.monotonic()

        async def pour():
            nonlocal sent
            while time.monotonic() < begun_s + seconds:
                writer.write(CHUNK)
                await writer.drain()
                sent += 1

        async with asyncio.TaskGroup() as group:
            group.create_task(pour())
            busy = await echoes(begun_s + seconds, 0.02)
        await writer.close()
        del reader
        print(json.dumps({"idle_ms": idle, "busy_ms": busy, "bulk_mib_per_s": sent / (time.monotonic() - begun_s)}))


if __name__ == "__main__":
    role, directory = sys.argv[1], Path(sys.argv[2])
    if role == "far":
        run(far(directory), loop="uvloop")
    else:
        run(near(directory, sys.argv[3], NodeId(sys.argv[4]), float(sys.argv[5])), loop="uvloop")
