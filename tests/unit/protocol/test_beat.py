"""The beat that periodic work shares."""

from hypothesis import given
from hypothesis import strategies as st

from protocol.beat import BEAT_US, SLOW_BEAT_US, at_beat_us, next_slow_beat_us, phase_us
from protocol.ids import NodeId


@given(st.integers(0, 2**50), st.integers(0, BEAT_US - 1))
def test_a_moment_is_moved_to_the_next_beat_and_never_by_a_whole_one(moment_us: int, phase: int) -> None:
    at_us = at_beat_us(moment_us, phase)
    assert 0 <= at_us - moment_us < BEAT_US
    assert at_us % BEAT_US == phase
    assert at_beat_us(at_us, phase) == at_us


@given(st.integers(0, 2**50), st.integers(0, SLOW_BEAT_US - 1))
def test_the_next_slow_beat_is_about_a_second_away_and_is_a_beat_too(moment_us: int, phase: int) -> None:
    at_us = next_slow_beat_us(moment_us, phase)
    assert SLOW_BEAT_US // 2 <= at_us - moment_us < SLOW_BEAT_US * 3 // 2
    assert at_us % SLOW_BEAT_US == phase
    assert at_beat_us(at_us, phase) == at_us


def test_nodes_of_one_machine_do_not_all_wake_at_once() -> None:
    phases = {phase_us(NodeId(f"node{number}")) // (SLOW_BEAT_US // 10) for number in range(100)}
    assert len(phases) == 10
