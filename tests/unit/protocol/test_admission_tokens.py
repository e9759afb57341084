"""Join tokens: one pasted word, a secret that never shows, a proof that fits one connection only."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import JoinError
from protocol.join_token import JoinToken, decode_token, encode_token, join_proof, proof_holds, verifier_of

TOKEN = JoinToken(
    "home.abc", "inviterid", ("192.168.1.20:7946", "[fd00::1]:7946"), "abcdefgh23456777", bytes(range(32))
)


def test_a_token_survives_being_pasted():
    word = encode_token(TOKEN)
    assert decode_token(f"  {word}\n") == TOKEN
    assert " " not in word
    assert word.startswith("sm1_")


@pytest.mark.parametrize(
    "spoil", [lambda w: w[:-1], lambda w: w[:-9], lambda w: w + "A", lambda w: w[:20] + "x" + w[21:]]
)
def test_a_truncated_or_altered_token_is_told_from_no_token_and_never_repeated(spoil):
    word = spoil(encode_token(TOKEN))
    with pytest.raises(JoinError, match="damaged or cut off") as caught:
        decode_token(word)
    assert word not in str(caught.value)


@pytest.mark.parametrize("text", ["", "hello", "sm2_abc", "x" * 100_000])
def test_something_else_is_not_a_token(text):
    with pytest.raises(JoinError, match="not a join token") as caught:
        decode_token(text)
    assert len(str(caught.value)) < 200


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_", max_size=400))
def test_no_text_crashes_the_decoder(text):
    with pytest.raises(JoinError):
        decode_token("sm1_" + text)


def test_a_token_shows_no_secret_when_printed():
    for text in (repr(TOKEN), str(TOKEN), f"{TOKEN}"):
        assert TOKEN.secret.hex() not in text
        assert repr(TOKEN.secret) not in text


def proof(**changes):
    fields = {"mesh_id": "home.abc", "token_id": "t", "joiner": "j", "inviter": "i"} | changes
    return join_proof(verifier_of(TOKEN.secret), **fields)


@pytest.mark.parametrize("field", ["mesh_id", "token_id", "joiner", "inviter"])
def test_a_proof_fits_one_mesh_one_token_and_the_two_ids_of_one_connection(field):
    assert proof_holds(proof(), proof())
    assert not proof_holds(proof(**{field: "another"}), proof())


def test_a_proof_cannot_be_moved_between_fields():
    assert proof(joiner="ab", inviter="c") != proof(joiner="a", inviter="bc")


def test_another_secret_gives_another_proof():
    assert verifier_of(bytes(32)) != verifier_of(TOKEN.secret)
    fields = {"mesh_id": "home.abc", "token_id": "t", "joiner": "j", "inviter": "i"}
    assert join_proof(verifier_of(bytes(32)), **fields) != proof()
