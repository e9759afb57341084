"""What a node hears of the mesh is written many statements at a time, and a full disk does not end it."""

from pathlib import Path

import pytest

from protocol.admission import make_admission
from protocol.quic.identity import Identity
from protocol.quic.mesh_files import found_mesh, load_membership
from stage_agent import mesh_book
from stage_agent.mesh_book import MeshBook


def test_a_hundred_statements_cost_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    founder = Identity.create(tmp_path)
    book = MeshBook(found_mesh(tmp_path, founder, "home").book(), tmp_path)
    writes = []
    save = mesh_book.save_membership
    monkeypatch.setattr(mesh_book, "save_membership", lambda *given: (writes.append(1), save(*given)))
    for _ in range(100):
        who = Identity.generate()
        statement = make_admission(
            book.book.mesh_id, who.public_key, signer_public_key=founder.public_key, sign=founder.sign
        )
        assert book.learn(statement)
        assert not book.learn(statement)
    assert writes == []
    assert book.keep() == book.keep() == ""
    assert len(writes) == 1
    assert len(load_membership(tmp_path).book()) == 101
    book.seen("10.0.0.1:7946")
    book.seen("10.0.0.1:7946")
    book.keep()
    assert len(writes) == 2
    assert load_membership(tmp_path).seeds == ("10.0.0.1:7946",)


def test_a_disk_that_takes_nothing_is_said_and_tried_again(tmp_path: Path) -> None:
    founder = Identity.create(tmp_path)
    book = MeshBook(found_mesh(tmp_path, founder, "home").book(), tmp_path)
    book.seen("10.0.0.1:7946")
    file, aside = tmp_path / "mesh.json", tmp_path / "aside"
    file.rename(aside)
    file.mkdir()
    assert "mesh.json" in book.keep()
    file.rmdir()
    aside.rename(file)
    assert book.keep() == ""
    assert load_membership(tmp_path).seeds == ("10.0.0.1:7946",)


def test_a_mesh_that_was_left_is_not_written_again_by_late_gossip(tmp_path: Path) -> None:
    founder = Identity.create(tmp_path)
    book = MeshBook(found_mesh(tmp_path, founder, "home").book(), tmp_path)
    book.forget()
    book.seen("10.0.0.1:7946")
    assert book.keep() == ""
    assert load_membership(tmp_path) is None


def test_what_the_transport_merged_by_itself_is_kept_too(tmp_path: Path) -> None:
    founder, other = Identity.create(tmp_path), Identity.generate()
    book = MeshBook(found_mesh(tmp_path, founder, "home").book(), tmp_path)
    book.book.admit(other.public_key, signer_public_key=founder.public_key, sign=founder.sign)
    book.touched()
    assert book.keep() == ""
    assert other.node_id in load_membership(tmp_path).book()
