"""Which of two connections stays; both ends must say the same."""

from hypothesis import given
from hypothesis import strategies as st

from protocol.quic.peers import BOOTS_MAX, BootRegister, Candidate


def offer(peer="b", instance="i", boot=1, dialled=False, **rest):
    return Candidate(peer, instance, boot, dialled, **rest)


def test_the_first_connection_is_taken():
    assert BootRegister("a").judge(None, offer()) == "take"


def test_a_newer_process_replaces_and_an_older_one_is_reported_even_when_nothing_is_connected():
    register = BootRegister("a")
    assert register.judge(None, offer(instance="one", boot=1)) == "take"
    assert register.judge(offer(instance="one", boot=1), offer(instance="two", boot=2)) == "replace"
    assert register.judge(None, offer(instance="one", boot=1)) == "older_boot"
    assert register.judge(None, offer(instance="three", boot=2)) == "older_boot"
    assert register.newest("b") == "two"
    assert register.newest("c") is None


@given(st.booleans(), st.booleans())
def test_of_two_living_connections_both_ends_keep_the_same_one(a_is_smaller, first_by_a):
    small, large = ("a", "b")
    names = (small, large) if a_is_smaller else (large, small)
    for own, peer in (names, names[::-1]):
        mine_first = first_by_a == (own == names[0])
        register = BootRegister(own)
        register.judge(None, offer(peer=peer, dialled=mine_first))
        verdict = register.judge(offer(peer=peer, dialled=mine_first), offer(peer=peer, dialled=not mine_first))
        new_dialled_by = own if not mine_first else peer
        assert verdict == ("replace" if new_dialled_by == small else "duplicate")


def test_of_two_by_the_same_side_the_newer_stays():
    register = BootRegister("a")
    for dialled in (True, False):
        register.judge(None, offer(dialled=dialled))
        assert register.judge(offer(dialled=dialled), offer(dialled=dialled)) == "replace"


def test_quic_beats_tls_and_a_peer_that_falls_back_is_followed():
    register = BootRegister("a")
    quic, tls = offer(dialled=True), offer(dialled=True, path="tls")
    register.judge(None, tls)
    assert register.judge(tls, quic) == "replace"
    assert register.judge(quic, tls) == "duplicate", "this end still hears the peer over QUIC"
    assert register.judge(quic, offer(dialled=False, path="tls")) == "replace", "the peer does not hear this end"
    assert register.judge(offer(dialled=True, alive=False), tls) == "replace"


def test_the_register_is_bounded():
    register = BootRegister("a")
    for number in range(BOOTS_MAX + 10):
        register.judge(None, offer(peer=str(number)))
    assert register.newest("0") is None
    assert register.newest(str(BOOTS_MAX + 9)) == "i"
