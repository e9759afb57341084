"""Key rotation in the admission book: one heir, named beforehand; the old key has nothing to say afterwards."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import admission as rules
from protocol.admission import AdmissionBook, make_admission, mesh_id_of
from protocol.quic.identity import Identity, key_id

FOUNDER, ALICE, BOB, CAROL, THIEF = (Identity.generate() for _ in range(5))
MESH = mesh_id_of("home", FOUNDER.public_key, FOUNDER.successor)


def heir_of(identity):
    return Identity(identity.next_keys[0], Identity.generate().next_keys)


def say(signer, subject, *, version=1, revoked=False, successor=None):
    return make_admission(
        MESH,
        subject.public_key,
        signer_public_key=signer.public_key,
        sign=signer.sign,
        version=version,
        revoked=revoked,
        successor=subject.successor if successor is None else successor,
    )


FOUNDING = say(FOUNDER, FOUNDER)
LINE = [FOUNDING, say(FOUNDER, ALICE), say(ALICE, BOB), say(BOB, CAROL)]


def succession(book, identity, heir):
    return book.succeed(
        identity.public_key, heir.public_key, sign=identity.sign, sign_new=heir.sign, successor=heir.successor
    )


def rotated(identity):
    """A book of four after ``identity`` rotated its key, the heir, and the statements that did it."""
    book, heir = AdmissionBook(MESH, LINE), heir_of(identity)
    made = succession(book, identity, heir)
    assert book.merge_all(made) == len(made)
    book.validate()
    return book, heir, made


@pytest.mark.parametrize("identity", [FOUNDER, ALICE, BOB, CAROL], ids=["founder", "alice", "bob", "carol"])
def test_the_heir_takes_the_place_and_everybody_else_stays(identity):
    book, heir, _ = rotated(identity)
    others = {person.node_id for person in (FOUNDER, ALICE, BOB, CAROL)} - {identity.node_id}
    assert set(book) == others | {heir.node_id}
    assert book.successor(identity.node_id) == heir.node_id
    assert book.is_barred(identity.node_id)
    assert not book.is_revoked(identity.node_id)
    fresh = AdmissionBook(MESH, book.statements)
    assert set(fresh) == set(book), "a newcomer that knows only the mesh id comes to the same view"
    for node in book:
        stranger = AdmissionBook(MESH)
        stranger.merge_all(book.chain(node))
        assert node in stranger, "the chain alone proves it"


@pytest.mark.parametrize("identity", [FOUNDER, ALICE])
def test_whoever_finds_the_old_key_can_do_nothing_with_it(identity):
    book, heir, _ = rotated(identity)
    before, victims = set(book), [BOB, CAROL, heir]
    attempts = [say(identity, THIEF), say(identity, identity, version=9, revoked=True)]
    attempts += [say(identity, victim, version=9, revoked=True) for victim in victims]
    attempts += [say(identity, victim, version=9) for victim in (BOB, CAROL)]
    attempts += [say(identity, identity, version=9, successor=THIEF.node_id)]
    assert [attempt for attempt in attempts if book.merge(attempt)] == []
    assert set(book) == before
    assert THIEF.node_id not in book


def test_the_old_key_cannot_name_another_heir_even_to_a_book_that_knows_nothing_yet():
    ignorant = AdmissionBook(MESH, LINE)
    assert not ignorant.merge(say(ALICE, ALICE, version=2, successor=THIEF.node_id))
    other = say(FOUNDER, FOUNDER, version=2, successor=THIEF.node_id)
    assert not ignorant.merge(other), "the founder's heir is part of the mesh id"
    assert not ignorant.merge(say(ALICE, heir_of(ALICE), revoked=True)), "nor keep its heir out beforehand"
    assert ignorant.merge(say(ALICE, THIEF)), "it may let a node in, as any member may, until it is replaced"
    ignorant.merge_all(rotated(ALICE)[2])
    assert THIEF.node_id not in ignorant


def test_nobody_else_can_change_who_follows():
    book = AdmissionBook(MESH, LINE)
    assert not book.merge(say(FOUNDER, ALICE, version=5, successor=THIEF.node_id))
    assert book.merge(say(FOUNDER, ALICE, version=5))


def test_a_node_can_rotate_again_and_again(monkeypatch):
    monkeypatch.setattr(rules, "MAX_CHAIN", 8)
    book, identity = AdmissionBook(MESH, LINE[:2]), ALICE
    for _ in range(5):
        heir = heir_of(identity)
        book.merge_all(succession(book, identity, heir))
        book.validate()
        assert set(book) == {FOUNDER.node_id, heir.node_id}
        identity = heir


def test_a_revoked_heir_does_not_bring_the_old_key_back():
    book, heir, _ = rotated(ALICE)
    book.revoke(heir.node_id, signer_public_key=FOUNDER.public_key, sign=FOUNDER.sign)
    assert set(book) == {FOUNDER.node_id, BOB.node_id, CAROL.node_id}
    assert book.is_barred(ALICE.node_id)


def test_revocations_of_the_old_key_hold_after_it_was_replaced():
    book = AdmissionBook(MESH, LINE)
    book.revoke(CAROL.node_id, signer_public_key=ALICE.public_key, sign=ALICE.sign)
    made = succession(book, ALICE, heir_of(ALICE))
    late = AdmissionBook(MESH, LINE)  # hears of the succession before it hears of the revocation
    late.merge_all(made)
    assert late.is_revoked(CAROL.node_id)


def test_the_one_on_whom_all_rests_cannot_be_revoked_by_others():
    book, heir, _ = rotated(FOUNDER)
    for target in (FOUNDER, heir):
        assert not book.merge(say(BOB, target, version=9, revoked=True))
        assert not book.merge(say(BOB, target, version=9)), "nor made to hang on somebody who hangs on it"
    assert not AdmissionBook(MESH, LINE).merge(say(BOB, FOUNDER, version=9, revoked=True))
    assert BOB.node_id in book


def test_a_node_knows_whom_it_rests_on():
    book, heir, _ = rotated(ALICE)
    assert book.rests_on(BOB.node_id, heir.node_id)
    assert book.rests_on(BOB.node_id, ALICE.node_id)
    assert not book.rests_on(heir.node_id, BOB.node_id)


@pytest.mark.parametrize("how", ["revoked", "replaced"])
def test_a_barred_node_can_be_shown_why_even_if_it_slept_through_all_of_it(how):
    asleep = AdmissionBook(MESH, LINE[:2])
    book = AdmissionBook(MESH, LINE)
    if how == "revoked":
        newcomer = Identity.generate()
        book.merge(say(FOUNDER, newcomer))
        book.revoke(ALICE.node_id, signer_public_key=newcomer.public_key, sign=newcomer.sign)
    else:
        book.merge_all(succession(book, ALICE, heir_of(ALICE)))
    assert book.proof_against(BOB.node_id) == ()
    asleep.merge_all(book.proof_against(ALICE.node_id))
    assert asleep.is_barred(ALICE.node_id)


@given(st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_books_agree_in_whatever_order_they_hear_of_it(random):
    base = AdmissionBook(MESH, LINE)
    heir = heir_of(ALICE)
    heard = [*LINE, *succession(base, ALICE, heir)]
    random.shuffle(heard)
    book = AdmissionBook(MESH)
    for _ in heard:  # gossip repeats itself: what came too early comes again
        for statement in heard:
            book.merge(statement)
            book.validate()
    assert set(book) == {FOUNDER.node_id, heir.node_id, BOB.node_id, CAROL.node_id}
    assert key_id(ALICE.next_keys[0]) == heir.node_id
