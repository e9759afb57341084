"""Rotating keys on disk: whatever moment the power goes, the node is either as it was or its own successor."""

import pytest

from protocol.errors import IdentityBarred, StateError
from protocol.quic import rotation
from protocol.quic.identity import Identity
from protocol.quic.mesh_files import found_mesh, load_membership
from protocol.quic.rotation import rotate, settle, why_not


class PowerCutError(Exception):
    pass


def stored(state):
    identity, book = Identity.load(state), load_membership(state).book()
    return settle(state, identity, book), load_membership(state).book()


def test_a_rotation_survives_restarts_and_can_be_repeated(tmp_path):
    first = Identity.create(tmp_path)
    found_mesh(tmp_path, first, "home")
    seen = {first.node_id}
    for _ in range(3):
        identity, book = stored(tmp_path)
        assert why_not(identity, book) == ""
        made = rotate(tmp_path, identity, book, ["a:1"])
        assert identity.node_id in book, "nothing is believed before it was merged"
        book.merge_all(made)
        after, kept = stored(tmp_path)
        assert after.node_id == identity.successor
        assert set(kept) == set(book) == {after.node_id}
        assert after.node_id not in seen
        seen.add(after.node_id)
        assert len(Identity.load(tmp_path).next_keys) == 1, "the old key is gone from the disk"
        assert first.to_pem() not in (tmp_path / "identity.pem").read_bytes()
    assert load_membership(tmp_path).seeds == ("a:1",)


@pytest.mark.parametrize("cut", ["before the first write", "before the commit", "before the old key goes"])
def test_a_power_cut_at_any_moment_loses_nothing(tmp_path, monkeypatch, cut):
    identity = Identity.create(tmp_path)
    book = found_mesh(tmp_path, identity, "home").book()

    def dies(*_arguments):
        raise PowerCutError

    with monkeypatch.context() as patched:
        if cut == "before the first write":
            patched.setattr(rotation, "write_private", dies)
        elif cut == "before the commit":
            patched.setattr(rotation, "save_statements", dies)
        if cut == "before the old key goes":
            rotate(tmp_path, identity, book, [])
            patched.setattr(rotation, "write_private", dies)
            with pytest.raises(PowerCutError):
                stored(tmp_path)
        else:
            with pytest.raises(PowerCutError):
                rotate(tmp_path, identity, book, [])
    after, kept = stored(tmp_path)
    assert after.node_id in kept
    assert after.node_id == (identity.successor if cut == "before the old key goes" else identity.node_id)
    if after.node_id == identity.node_id:
        rotate(tmp_path, after, kept, [])
        again, kept = stored(tmp_path)
        assert again.node_id == identity.successor
        assert again.node_id in kept


def test_a_full_disk_leaves_the_node_as_it_was_and_able_to_try_again(tmp_path, monkeypatch):
    identity = Identity.create(tmp_path)
    book = found_mesh(tmp_path, identity, "home").book()

    def full(*_arguments):
        raise StateError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(rotation, "write_private", full)
        with pytest.raises(StateError):
            rotate(tmp_path, identity, book, [])
    rotate(tmp_path, identity, book, [])
    after, kept = stored(tmp_path)
    assert after.node_id in kept
    assert len(after.next_keys) == 1, "the key after the next one is on the disk too"


def test_an_old_copy_of_the_key_is_told_that_it_is_one(tmp_path):
    identity = Identity.create(tmp_path)
    book = found_mesh(tmp_path, identity, "home").book()
    book.merge_all(rotate(tmp_path, identity, book, []))
    (tmp_path / "identity.pem").write_bytes(identity.to_pem())
    with pytest.raises(IdentityBarred, match=f"replaced by that of node {identity.successor}"):
        stored(tmp_path)


def test_a_node_that_was_admitted_without_a_next_key_says_what_to_do(tmp_path):
    lone = Identity(Identity.generate().private_key)
    book = found_mesh(tmp_path, lone, "home").book()
    assert "stagemesh leave" in why_not(lone, book)
    assert "not admitted" in why_not(Identity.generate(), book)
