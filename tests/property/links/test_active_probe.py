"""Properties of the active bandwidth probe for any order of traffic, requests, refusals and endings."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from config.settings import LinkSettings
from protocol.ids import NodeId
from protocol.links.active_probe import HOUR_US, PROBE_MAX_BYTES, AbortProbe, ActiveProbe, Effect, StartProbe

MIB = 1_048_576
PEERS = tuple(NodeId(name * 8) for name in "abcd")
BUDGETS = st.sampled_from([300_000, MIB, 3 * MIB, 20 * MIB, 200 * MIB])
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["wait", "wait", "end", "end", "break", "refuse", "ask", "traffic", "quiet"]),
        st.one_of(st.integers(1, 20_000_000), st.integers(1, HOUR_US)),
        st.integers(0, 1_000),
    ),
    max_size=80,
)


class World:
    """A shell that obeys the core, and keeps every byte it moved with its time."""

    def __init__(self, budget: int, seed: int) -> None:
        self.budget = budget
        self.now_us = 0
        settings = LinkSettings(active_probe_bytes_per_hour=budget)
        self.core = ActiveProbe(settings, Random(seed), 0)
        self.open: tuple[NodeId, int, bool, int] | None = None
        """Peer, size, incoming, start."""
        self.traffic = False
        self.moved: list[tuple[int, int]] = []
        self.starts = 0

    def obey(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, StartProbe):
                assert self.open is None, "one at a time"
                assert not self.traffic, "never beside traffic"
                assert LinkSettings().bandwidth_min_frame_bytes <= effect.size_bytes <= PROBE_MAX_BYTES
                self.open = effect.peer, effect.size_bytes, False, self.now_us
                self.starts += 1
            else:
                assert isinstance(effect, AbortProbe)
                assert self.open is not None
                assert self.open[0] == effect.peer
                self.end(500, broken=True)

    def end(self, share: int, *, broken: bool = False) -> None:
        if self.open is None:
            return
        peer, size, incoming, start_us = self.open
        self.open = None
        done = size * share // 1_000 if broken else size
        # The first half moved at once, the rest in the last moment.
        self.moved += [(start_us, done // 2), (self.now_us, done - done // 2)]
        if incoming:
            self.core.received(peer, done, self.now_us)
        else:
            self.core.finished(peer, done, None if broken else self.now_us - start_us, self.now_us)

    def step(self, kind: str, wait_us: int, share: int) -> None:
        self.now_us += wait_us
        if kind == "end":
            self.end(share)
        elif kind == "break":
            self.end(share, broken=True)
        elif kind == "refuse" and self.open is not None and not self.open[2]:
            peer, self.open = self.open[0], None
            self.core.refused(peer, self.now_us)
        elif kind == "ask":
            size = 1 + share * 70_000
            if self.core.asked(PEERS[share % 4], size, self.now_us):
                assert self.open is None, "one at a time"
                assert not self.traffic, "never beside traffic"
                self.open = PEERS[share % 4], size, True, self.now_us
        elif kind == "traffic":
            self.traffic = True
            self.obey(self.core.traffic_started(self.now_us))
            assert self.open is None, "traffic ends what runs"
        elif kind == "quiet":
            self.traffic = False
            self.core.traffic_ended(self.now_us)
        self.obey(self.core.on_timer(PEERS, self.now_us))


@given(BUDGETS, STEPS, st.integers(0, 99))
def test_no_hour_wherever_it_begins_moves_more_than_the_budget(
    budget: int, steps: list[tuple[str, int, int]], seed: int
) -> None:
    world = World(budget, seed)
    for step in steps:
        world.step(*step)
        assert world.core.available_bytes(world.now_us) >= 0
    for begin_us, _ in world.moved:
        hour = sum(size for at_us, size in world.moved if begin_us <= at_us <= begin_us + HOUR_US)
        assert hour <= budget


@given(STEPS, st.integers(0, 99))
def test_without_a_budget_nothing_is_sent_accepted_or_waited_for(steps: list[tuple[str, int, int]], seed: int) -> None:
    world = World(0, seed)
    for step in steps:
        world.step(*step)
        assert world.core.next_deadline() is None
    assert world.moved == []
    assert world.starts == 0


@given(st.integers(100_000, 600_000_000), st.integers(0, 99))
def test_a_link_of_any_speed_is_measured_within_four_probes(bytes_per_s: int, seed: int) -> None:
    settings = LinkSettings(active_probe_bytes_per_hour=1_000 * MIB)
    core, now_us = ActiveProbe(settings, Random(seed), 0), 0
    for _ in range(4):
        now_us = core.next_deadline() or 0
        (start,) = core.on_timer(PEERS[:1], now_us)
        assert isinstance(start, StartProbe)
        duration_us = start.size_bytes * 1_000_000 // bytes_per_s
        now_us += duration_us
        core.finished(start.peer, start.size_bytes, duration_us, now_us)
        if duration_us >= settings.bandwidth_min_duration_us:
            return
    raise AssertionError("never long enough")


def test_what_was_not_sent_before_an_abort_can_be_used_again() -> None:
    core = ActiveProbe(LinkSettings(active_probe_bytes_per_hour=3 * MIB), Random(1), 0)
    now_us = core.next_deadline() or 0
    assert core.on_timer(PEERS[:1], now_us) == [StartProbe(PEERS[0], MIB)]
    assert core.available_bytes(now_us) == 2 * MIB
    assert core.traffic_started(now_us) == [AbortProbe(PEERS[0])]
    assert core.traffic_started(now_us) == [], "called off once"
    core.finished(PEERS[0], 1_000, None, now_us)
    assert core.available_bytes(now_us) == 3 * MIB - 1_000
    assert core.next_deadline() is None
    core.traffic_ended(now_us)
    assert core.on_timer(PEERS[:1], now_us + 4_999_999) == [], "not in the very moment of quiet"
    assert core.on_timer(PEERS[:1], now_us + 15_000_000) == [StartProbe(PEERS[0], MIB)]


def test_who_refused_is_left_alone_for_minutes_while_others_are_measured() -> None:
    core = ActiveProbe(LinkSettings(active_probe_bytes_per_hour=100 * MIB), Random(1), 0)
    now_us = core.next_deadline() or 0
    core.on_timer(PEERS[:1], now_us)
    core.refused(PEERS[0], now_us)
    assert core.on_timer(PEERS[:1], now_us + 15_000_000) == []
    assert core.on_timer(PEERS[:2], now_us + 31_000_000) == [StartProbe(PEERS[1], MIB)]
    core.finished(PEERS[1], MIB, 200_000, now_us + 31_200_000)
    assert core.on_timer(PEERS[:1], now_us + 460_000_000) == [StartProbe(PEERS[0], MIB)]


def test_a_receiver_refuses_what_it_cannot_pay_and_while_a_probe_or_traffic_runs() -> None:
    core = ActiveProbe(LinkSettings(active_probe_bytes_per_hour=2 * MIB), Random(1), 0)
    assert not core.asked(PEERS[0], 2 * MIB + 1, 0)
    assert core.asked(PEERS[0], MIB, 0)
    assert not core.asked(PEERS[1], MIB, 0)
    core.received(PEERS[0], MIB, 0)
    assert not core.asked(PEERS[1], MIB + 1, HOUR_US)
    assert core.asked(PEERS[1], MIB, HOUR_US)
    core.received(PEERS[1], 0, HOUR_US)
    core.traffic_started(HOUR_US)
    assert not core.asked(PEERS[1], MIB, HOUR_US)
