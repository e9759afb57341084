"""Shaped links between real transports: delay, loss and bandwidth on both lanes, changed while running."""

import asyncio
import itertools
import statistics
import time

import pytest

from protocol.messages import Ping
from protocol.quic.interface import ConditionerReloaded, MessageReceived, TransferObserved
from tests.integration.transport_mesh import eventually, mesh, now_us, run, running

LOOPS = pytest.mark.parametrize("loop", ["asyncio", "uvloop"])


def shapes(tmp_path, delay_ms, **rest):
    lines = "".join(f"{key} = {value}\n" for key, value in rest.items())
    text = "".join(
        f'[links."{a} -> {b}"]\ndelay_ms = {delay_ms}\n{lines}' for a, b in (("alpha", "beta"), ("beta", "alpha"))
    )
    file = tmp_path / "shapes.toml"
    file.write_text(text)
    return file


SEQUENCE = itertools.count()


async def echo_times(near, far, count):
    """Round trips of our own datagram echo, in milliseconds."""
    times = []
    take = far._take
    far.transport.table._events = lambda event: (
        far.transport.send(near.id, event.message, "datagram") if isinstance(event, MessageReceived) else take(event)
    )
    for seq in itertools.islice(SEQUENCE, count):
        begun = now_us()
        assert near.transport.send(far.id, Ping(seq=seq), "datagram")
        await near.until(MessageReceived, lambda event, seq=seq: event.message == Ping(seq=seq), patience_s=3)
        times.append((now_us() - begun) / 1_000)
    far.transport.table._events = take
    return times


@LOOPS
def test_both_directions_are_delayed_and_the_minimum_is_never_below_the_shape(tmp_path, loop):
    async def main():
        alpha, beta = mesh("alpha", "beta", shapes=shapes(tmp_path, 20))
        async with running(alpha, beta):
            await alpha.meet(beta)
            times = await echo_times(alpha, beta, 10)
            assert min(times) >= 39
            assert statistics.median(times) < 60, "loose: the machine is shared; the bench holds 2 ms"

    run(main(), loop=loop)


def test_a_changed_file_reshapes_a_living_connection_and_a_wrong_one_is_reported(tmp_path):
    async def main():
        file = shapes(tmp_path, 0)
        alpha, beta = mesh("alpha", "beta", shapes=file)
        async with running(alpha, beta):
            await alpha.meet(beta)
            assert min(await echo_times(alpha, beta, 5)) < 20
            shapes(tmp_path, 30)
            for node in (alpha, beta):
                assert (await node.until(ConditionerReloaded)).error == ""
            assert min(await echo_times(alpha, beta, 3)) >= 59
            file.write_text("nonsense")
            assert "not TOML" in (await alpha.until(ConditionerReloaded, lambda event: event.error)).error
            assert min(await echo_times(alpha, beta, 3)) >= 59

    run(main())


def test_a_lossy_link_loses_datagrams_and_no_stream_message(tmp_path):
    async def main():
        alpha, beta = mesh("alpha", "beta", shapes=shapes(tmp_path, 1, loss=0.2))
        async with running(alpha, beta):
            await alpha.meet(beta)
            for seq in range(200):
                alpha.transport.send(beta.id, Ping(seq=seq), "datagram")
                alpha.transport.send(beta.id, Ping(seq=1_000 + seq), "stream")
                await asyncio.sleep(0.002)
            await eventually(lambda: len([e for e in beta.seen(MessageReceived) if e.lane == "stream"]) == 200)
            lost = 200 - len([e for e in beta.seen(MessageReceived) if e.lane == "datagram"])
            assert lost > 5
            assert alpha.transport.counters.dropped["shaped_loss"] > 10

    run(main())


def test_a_link_that_loses_everything_is_cut_on_both_lanes_until_it_is_mended(tmp_path):
    """A cable that is pulled also stops what is sent again and again."""

    async def main():
        shaped = shapes(tmp_path, 1)
        alpha, beta = mesh("alpha", "beta", shapes=shaped)
        taken = []

        async def on_bulk(_peer, _kind, _header, reader, _writer):
            taken.append(await reader.readexactly(5))
            taken.append(await reader.readexactly(5))

        beta.transport.on_bulk = on_bulk
        async with running(alpha, beta):
            await alpha.meet(beta)
            _, writer = await alpha.transport.open_bulk(beta.id, "artifact", b"")
            writer.write(b"first")
            await writer.drain()
            await eventually(lambda: taken == [b"first"])
            shapes(tmp_path, 1, loss=1.0)
            await alpha.until(ConditionerReloaded)
            writer.write(b"later")
            alpha.transport.send(beta.id, Ping(seq=7), "datagram")
            await writer.drain()
            await asyncio.sleep(0.5)
            assert taken == [b"first"]
            assert beta.seen(MessageReceived) == []
            shapes(tmp_path, 1)
            await eventually(lambda: taken == [b"first", b"later"])
            writer.abort()

    run(main())


def test_a_bulk_transfer_runs_at_the_shaped_bandwidth_and_is_marked_as_shaped(tmp_path):
    async def main():
        alpha, beta = mesh("alpha", "beta", shapes=shapes(tmp_path, 2, mib_per_s=4))

        async def drink(_peer, _kind, _header, reader, writer):
            while await reader.read(65_536):
                pass
            writer.write(b"done")

        beta.transport.on_bulk = drink
        async with running(alpha, beta):
            await alpha.meet(beta)
            _, writer = await alpha.transport.open_bulk(beta.id, "artifact", b"")
            begun = time.monotonic()
            for _ in range(32):
                writer.write(bytes(65_536))
                await writer.drain()
            await writer.close()
            assert time.monotonic() - begun >= 0.45
            sample = await beta.until(TransferObserved)
            assert sample.shaped
            rate = sample.size * 1_000_000 / sample.duration_us
            assert rate <= 4.6 * 1_048_576

    run(main())
