"""The admission book: who is in, who is out, and that all books agree whatever order statements came in."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import admission as rules
from protocol.admission import AdmissionBook, make_admission, mesh_id_of, mesh_name
from protocol.quic.identity import Identity

PEOPLE = [Identity.generate() for _ in range(6)]
FOUNDER = PEOPLE[0]
MESH = mesh_id_of("home", FOUNDER.public_key)


def say(signer, subject, *, version=1, revoked=False, mesh=MESH):
    return make_admission(
        mesh,
        subject.public_key,
        signer_public_key=signer.public_key,
        sign=signer.sign,
        version=version,
        revoked=revoked,
    )


FOUNDING = say(FOUNDER, FOUNDER)


def test_the_mesh_id_names_the_mesh_and_commits_to_its_founder():
    assert mesh_name(MESH) == "home"
    assert mesh_id_of("home", PEOPLE[1].public_key) != MESH
    assert mesh_id_of("work", FOUNDER.public_key) != MESH


def test_only_the_founder_can_let_itself_in():
    assert FOUNDER.node_id in AdmissionBook(MESH, [FOUNDING])
    book = AdmissionBook(MESH)
    assert not book.merge(say(PEOPLE[1], PEOPLE[1]))
    assert book.merge(FOUNDING)
    assert not book.merge(say(PEOPLE[1], PEOPLE[1]))
    assert list(book) == [FOUNDER.node_id]


def test_an_admitted_node_cannot_replace_its_statement_by_one_of_its_own_but_may_say_that_it_is_gone():
    book = AdmissionBook(MESH, [FOUNDING, say(FOUNDER, PEOPLE[1]), say(PEOPLE[1], PEOPLE[2])])
    assert not book.merge(say(PEOPLE[1], PEOPLE[1], version=9))
    assert {PEOPLE[1].node_id, PEOPLE[2].node_id} <= set(book)
    assert book.merge(say(PEOPLE[1], PEOPLE[1], version=9, revoked=True))
    assert PEOPLE[1].node_id not in book


def test_an_admission_by_somebody_who_is_not_admitted_is_not_taken():
    book = AdmissionBook(MESH, [FOUNDING])
    assert not book.merge(say(PEOPLE[1], PEOPLE[2]))
    assert PEOPLE[2].node_id not in book


@pytest.mark.parametrize(
    "forged",
    [
        {"version": 2},
        {"node_id": PEOPLE[3].node_id},
        {"public_key": PEOPLE[3].public_key},
        {"signer": PEOPLE[3].node_id},
        {"signer_public_key": PEOPLE[3].public_key},
        {"revoked": True},
        {"signature": bytes(64)},
        {"mesh_id": "home.elsewhere"},
    ],
)
def test_a_statement_changed_in_any_field_is_not_taken(forged):
    book = AdmissionBook(MESH, [FOUNDING])
    good = say(FOUNDER, PEOPLE[1])
    assert not book.merge(good.model_copy(update=forged))
    assert book.merge(good)


def test_any_admitted_node_may_admit_and_the_chain_proves_it_to_a_book_that_knows_only_the_mesh_id():
    book = AdmissionBook(MESH, [FOUNDING, say(FOUNDER, PEOPLE[1]), say(PEOPLE[1], PEOPLE[2])])
    chain = book.chain(PEOPLE[2].node_id)
    assert [link.node_id for link in chain] == [person.node_id for person in PEOPLE[:3]]
    stranger = AdmissionBook(MESH)
    assert stranger.merge_all(reversed(chain)) == 3
    assert PEOPLE[2].node_id in stranger
    assert book.chain(PEOPLE[4].node_id) == ()


def test_a_revoked_node_is_out_for_ever_and_so_is_whom_it_let_in_until_somebody_vouches():
    book = AdmissionBook(
        MESH, [FOUNDING, say(FOUNDER, PEOPLE[1]), say(PEOPLE[1], PEOPLE[2]), say(PEOPLE[2], PEOPLE[3])]
    )
    assert book.merge(say(FOUNDER, PEOPLE[1], version=2, revoked=True))
    assert list(book) == [FOUNDER.node_id]
    assert book.is_revoked(PEOPLE[1].node_id)
    assert not book.is_revoked(PEOPLE[2].node_id)
    assert not book.merge(say(FOUNDER, PEOPLE[1], version=99))
    assert book.merge(say(FOUNDER, PEOPLE[2], version=2))
    assert PEOPLE[2].node_id in book
    assert PEOPLE[3].node_id in book


def test_revoking_vouches_for_the_others_in_the_same_breath():
    book = AdmissionBook(
        MESH, [FOUNDING, say(FOUNDER, PEOPLE[1]), say(PEOPLE[1], PEOPLE[2]), say(PEOPLE[2], PEOPLE[3])]
    )
    elsewhere = AdmissionBook(MESH, book.statements)
    made = book.revoke(PEOPLE[1].node_id, signer_public_key=FOUNDER.public_key, sign=FOUNDER.sign)
    assert [statement.revoked for statement in made] == [True, False]
    assert set(book) == {person.node_id for person in (FOUNDER, PEOPLE[2], PEOPLE[3])}
    elsewhere.merge_all(made)
    assert set(elsewhere) == set(book)
    assert book.revoke(PEOPLE[1].node_id, signer_public_key=FOUNDER.public_key, sign=FOUNDER.sign) == ()
    assert book.revoke("unheard", signer_public_key=FOUNDER.public_key, sign=FOUNDER.sign) == ()


def test_admitting_twice_gives_the_same_statement():
    book = AdmissionBook(MESH, [FOUNDING])
    one = book.admit(PEOPLE[1].public_key, signer_public_key=FOUNDER.public_key, sign=FOUNDER.sign)
    version = book.version
    assert book.admit(PEOPLE[1].public_key, signer_public_key=FOUNDER.public_key, sign=FOUNDER.sign) == one
    assert book.version == version


def test_two_nodes_that_revoke_each_other_are_both_out():
    first, second = (
        say(PEOPLE[1], PEOPLE[2], version=2, revoked=True),
        say(PEOPLE[2], PEOPLE[1], version=2, revoked=True),
    )
    base = [FOUNDING, say(FOUNDER, PEOPLE[1]), say(FOUNDER, PEOPLE[2])]
    one, other = AdmissionBook(MESH, [*base, first, second]), AdmissionBook(MESH, [*base, second, first])
    assert list(one) == list(other) == [FOUNDER.node_id]


def test_the_book_is_bounded_but_a_full_one_still_takes_revocations(monkeypatch):
    monkeypatch.setattr(rules, "MAX_MEMBERS", 3)
    book = AdmissionBook(MESH, [FOUNDING, say(FOUNDER, PEOPLE[1]), say(FOUNDER, PEOPLE[2])])
    assert not book.merge(say(FOUNDER, PEOPLE[3]))
    assert book.merge(say(FOUNDER, PEOPLE[2], version=2, revoked=True))


def test_a_chain_longer_than_the_bound_is_not_admitted(monkeypatch):
    monkeypatch.setattr(rules, "MAX_CHAIN", 3)
    links = [FOUNDING, *(say(PEOPLE[index], PEOPLE[index + 1]) for index in range(4))]
    book = AdmissionBook(MESH, links)
    assert [person.node_id in book for person in PEOPLE[:5]] == [True, True, True, False, False]
    book.validate()


STATEMENTS = [
    FOUNDING,
    *(
        say(PEOPLE[a], PEOPLE[b], version=v)
        for a, b, v in [(0, 1, 1), (0, 2, 1), (1, 3, 1), (2, 3, 2), (3, 4, 1), (1, 4, 1)]
    ),
    *(say(PEOPLE[a], PEOPLE[b], version=2, revoked=True) for a, b in [(0, 1), (2, 1), (4, 2), (1, 0)]),
]


@settings(max_examples=150, deadline=None)
@given(st.sets(st.sampled_from(range(len(STATEMENTS)))), st.integers(0, 2**32))
def test_books_that_exchange_what_they_hold_agree_whatever_the_order(chosen, seed):
    statements = [FOUNDING, *(STATEMENTS[index] for index in sorted(chosen))]
    books = []
    for salt in range(2):
        shuffled = list(statements)
        random.Random(seed + salt).shuffle(shuffled)
        book = AdmissionBook(MESH)
        for statement in shuffled:
            book.merge(statement)
        books.append(book)
    for _ in range(3):  # anti-entropy
        for source, target in (books, books[::-1]):
            target.merge_all(source.statements)
    for book in books:
        book.merge_all(statements)
        book.validate()
    assert set(books[0]) == set(books[1])
    assert books[0].statements == books[1].statements
