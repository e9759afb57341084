"""Shaped links: the file, the arithmetic, and what happens while running."""

import asyncio
import itertools
import os
import random
import time

import pytest

from protocol.errors import ConfigurationError
from protocol.quic.bulk import CHUNK_BYTES, HELD_BYTES, DelayLine
from protocol.quic.conditioner import MIB, QUEUE_SECONDS, Conditioner, Lateness, LinkShape, ShapedLink, parse_shapes

GOOD = """
[links."alpha -> beta"]
delay_ms = 10
jitter_ms = 2.5
loss = 0.01
mib_per_s = 30
mtu = 1280
[links."beta->alpha"]
"""


def test_a_file_is_read_into_directed_links():
    assert parse_shapes(GOOD, "file") == {
        ("alpha", "beta"): LinkShape(10_000, 2_500, 0.01, 30 * MIB, 1280),
        ("beta", "alpha"): LinkShape(),
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("links = ", "not TOML"),
        ("[other]\nx=1", "only .links"),
        ('[links."alpha"]', "link 'alpha': write"),
        ('[links."-> beta"]', "write"),
        ('[links."a -> b"]\ndelay = 3', "unknown key 'delay'; known are delay_ms"),
        ('[links."a -> b"]\nloss = 1.5', "loss must be a number from 0 to 1"),
        ('[links."a -> b"]\ndelay_ms = true', "delay_ms must be"),
        ('[links."a -> b"]\ndelay_ms = nan', "delay_ms must be"),
        ('[links."a -> b"]\nmtu = -1', "mtu must be"),
        ('links = {"a -> b" = 4}', "write"),
    ],
)
def test_a_wrong_file_names_the_table_and_the_key(text, said):
    with pytest.raises(ConfigurationError, match=said) as caught:
        parse_shapes(text, "shapes.toml")
    assert str(caught.value).startswith("shapes.toml")


def test_a_link_is_found_by_id_or_name_and_only_in_its_direction(tmp_path):
    file = tmp_path / "shapes.toml"
    file.write_text('[links."alpha -> beta"]\ndelay_ms = 1\n[links."idalpha -> idgamma"]\ndelay_ms = 2\n')
    conditioner = Conditioner(str(file), own_id="idalpha", own_name="alpha")
    assert conditioner.link("idgamma").shape.delay_us == 2_000
    link = conditioner.link("idbeta")
    assert link.shape == LinkShape()
    conditioner.name("idbeta", "beta")
    assert link.shape.delay_us == 1_000
    assert conditioner.link("idbeta") is link
    assert conditioner.is_shaped("idbeta")
    other = Conditioner(str(file), own_id="idbeta", own_name="beta")
    other.name("idalpha", "alpha")
    assert not other.is_shaped("idalpha")


def test_without_a_file_nothing_is_shaped():
    conditioner = Conditioner("", own_id="a", own_name="a")
    assert conditioner.link("b") is None
    assert not conditioner.is_shaped("b")
    assert not conditioner.reload()


def test_a_missing_file_is_said_at_the_start():
    with pytest.raises(ConfigurationError, match="cannot read the link shapes"):
        Conditioner("/nowhere/shapes.toml", own_id="a", own_name="a")


def test_a_change_is_taken_while_running_and_a_wrong_one_keeps_the_shapes_before(tmp_path):
    file = tmp_path / "shapes.toml"
    file.write_text('[links."a -> b"]\ndelay_ms = 1\n')
    conditioner = Conditioner(str(file), own_id="a", own_name="a")
    link = conditioner.link("b")
    assert not conditioner.reload()
    file.write_text('[links."a -> b"]\ndelay_ms = 77\n')
    assert conditioner.reload()
    assert link.shape.delay_us == 77_000
    file.write_text('[links."a -> b"]\ndelay_ms = "x"\n# longer\n')
    os.utime(file, ns=(1, 1))
    with pytest.raises(ConfigurationError):
        conditioner.reload()
    assert link.shape.delay_us == 77_000
    assert not conditioner.reload(), "said once, until the file changes again"


def test_bytes_leave_one_after_the_other_at_the_links_rate():
    link = ShapedLink(LinkShape(delay_us=10_000, bytes_per_s=1_000_000), random.Random(1))
    dues = [link.depart(1_000, 0.0) for _ in range(3)]
    assert dues == pytest.approx([0.011, 0.012, 0.013])


def test_a_queue_longer_than_its_bound_loses_packets_but_makes_a_stream_wait():
    link = ShapedLink(LinkShape(bytes_per_s=1_000_000), random.Random(1))
    assert link.depart(int(QUEUE_SECONDS * 1_000_000) + 1, 0.0) is not None
    assert link.depart(1, 0.0) is None
    assert link.depart(1, 0.0, bounded=False) == pytest.approx(QUEUE_SECONDS, abs=1e-3)
    assert link.depart(1, 0.1) is not None


def test_jitter_never_changes_the_order():
    link = ShapedLink(LinkShape(delay_us=1_000, jitter_us=5_000), random.Random(3))
    dues = [link.depart(100, step / 10_000) for step in range(500)]
    assert dues == sorted(dues)
    assert min(due - step / 10_000 for step, due in enumerate(dues)) >= 0.001


def test_losses_repeat_with_the_seed_and_have_the_right_share():
    def lost(seed):
        link = ShapedLink(LinkShape(delay_us=1, loss=0.1), random.Random(seed))
        return [link._die.random() < link.shape.loss for _ in range(5_000)]

    assert lost(1) == lost(1) != lost(2)
    assert 400 < sum(lost(1)) < 600


async def sent_through(link, sizes):
    out, lost = [], []
    for number, size in enumerate(sizes):
        reason = link.packet(size, lambda number=number: out.append((number, time.monotonic())))
        if reason:
            lost.append(reason)
    await asyncio.sleep(0.1)
    return out, lost


def test_packets_come_out_in_order_after_the_delay():
    async def main():
        link = ShapedLink(LinkShape(delay_us=20_000), random.Random(1))
        begun = time.monotonic()
        out, lost = await sent_through(link, [100] * 50)
        assert [number for number, _ in out] == list(range(50))
        assert lost == []
        assert all(at - begun >= 0.02 for _, at in out), "never before it is due"

    asyncio.run(main())


class LateLoop(asyncio.SelectorEventLoop):
    """A processor that comes back 4 ms late after a sleep of 8 ms and more."""

    def call_later(self, delay, callback, *args, context=None):
        return super().call_later(delay + (0.004 if delay > 0.008 else 0), callback, *args, context=context)


def test_a_machine_that_wakes_late_still_sends_on_time_once_it_knows_itself():
    async def main():
        link = ShapedLink(LinkShape(delay_us=15_000), random.Random(1))
        late = []
        for _ in range(12):
            out = asyncio.get_running_loop().create_future()
            begun = time.monotonic()
            link.packet(100, lambda out=out, begun=begun: out.set_result(time.monotonic() - begun - 0.015))
            late.append(await out)
        assert late[0] > 0.002, "the loop is as late as it should be"
        assert min(late[4:]) < 0.001
        assert min(late) >= 0

    with asyncio.Runner(loop_factory=LateLoop) as runner:
        runner.run(main())


def test_timers_are_set_early_by_what_nine_in_ten_were_late_within_bounds():
    lateness = Lateness()
    for late_ms in [1] * 30 + [2] * 2:
        lateness.add(late_ms / 1_000)
    assert lateness.margin_s == 0.001
    for late_s in [9.0] * 4:
        lateness.add(late_s)
    assert lateness.margin_s == 0.005
    for _ in range(32):
        lateness.add(-0.001)
    assert lateness.margin_s == 0.0003


def test_packets_over_the_mtu_vanish_and_are_counted_as_such():
    async def main():
        link = ShapedLink(LinkShape(delay_us=1_000, mtu=1280), random.Random(1))
        out, lost = await sent_through(link, [1252, 1253])
        assert [number for number, _ in out] == [0]
        assert lost == ["shaped_mtu"]

    asyncio.run(main())


def test_an_unshaped_link_adds_nothing_unless_older_packets_still_wait():
    async def main():
        link = ShapedLink(LinkShape(delay_us=20_000), random.Random(1))
        out = []
        link.packet(1, lambda: out.append("old"))
        link.shape = LinkShape()
        link.packet(1, lambda: out.append("new"))
        assert out == []
        await asyncio.sleep(0.06)
        assert out == ["old", "new"]
        link.packet(1, lambda: out.append("at once"))
        assert out[-1] == "at once"

    asyncio.run(main())


class Sink:
    def __init__(self):
        self.got = []

    def write(self, data):
        self.got.append((time.monotonic(), data))

    async def drain(self):
        pass


def test_a_stream_is_shaped_by_the_same_link_and_loses_nothing():
    async def main():
        sink = Sink()
        link = ShapedLink(LinkShape(delay_us=5_000, bytes_per_s=4 * MIB, loss=0.2), random.Random(1))
        line = DelayLine(sink, link)
        content = os.urandom(8 * CHUNK_BYTES)
        begun = time.monotonic()
        for start in range(0, len(content), CHUNK_BYTES):
            line.put(content[start : start + CHUNK_BYTES])
            await line.drain()
        await line.flush()
        assert b"".join(data for _, data in sink.got) == content
        assert time.monotonic() - begun >= len(content) / (4 * MIB)

    asyncio.run(main())


def test_who_is_woken_may_ask_to_be_woken_again_at_once():
    async def main():
        link, rounds, over = ShapedLink(LinkShape(delay_us=1_000), random.Random(1)), [], asyncio.Event()
        came = asyncio.Event()

        def again():
            rounds.append(len(rounds))
            if len(rounds) == 5:
                over.set()
            else:
                link.wake(time.monotonic(), again)

        link.wake(time.monotonic() + 0.002, again)
        link.packet(1, came.set)
        async with asyncio.timeout(2):
            await over.wait()
            await came.wait()
        assert rounds == [0, 1, 2, 3, 4]
        assert not link._waiting

    complaints = []
    with asyncio.Runner() as runner:
        runner.get_loop().set_exception_handler(lambda _, context: complaints.append(context))
        runner.run(main())
    assert complaints == []


def test_a_stream_over_a_long_path_holds_a_bounded_amount():
    async def main():
        line = DelayLine(Sink(), ShapedLink(LinkShape(delay_us=60_000_000), random.Random(1)))

        async def pour():
            while line.held_bytes <= 2 * HELD_BYTES:
                line.put(bytes(16 * CHUNK_BYTES))
                await line.drain()

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pour(), 0.5)
        assert line.held_bytes <= HELD_BYTES + 16 * CHUNK_BYTES
        line.stop()
        await line.drain()

    asyncio.run(main())


def test_what_falls_due_together_leaves_the_loop_its_turns():
    async def main():
        sink, turns = Sink(), []
        line = DelayLine(sink, ShapedLink(LinkShape(delay_us=1_000), random.Random(1)))
        line.put(bytes(64 * CHUNK_BYTES))
        time.sleep(0.02)  # noqa: ASYNC251 - now all of it is due

        async def others():
            while line.waiting:
                turns.append(len(sink.got))
                await asyncio.sleep(0)

        await asyncio.wait_for(asyncio.gather(line.flush(), others()), 2)
        assert max(after - before for before, after in itertools.pairwise(turns)) <= 4

    asyncio.run(main())
