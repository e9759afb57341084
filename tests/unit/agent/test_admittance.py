"""Who can be revoked where, and that nothing is believed or told that is not on the disk."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from protocol.quic.identity import Identity
from protocol.quic.mesh_files import found_mesh, load_membership
from stage_agent import admittance as room
from stage_agent.admittance import Admittance
from stage_agent.api.commands import Accepted, Refused
from stage_agent.journal import Journal
from stage_agent.mesh_book import MeshBook
from stage_agent.switches import Switches


@dataclass
class Names:
    names: dict[str, str]

    def name_of(self, node_id: str) -> str:
        return self.names.get(node_id, node_id[:8])


@dataclass
class Core:
    announced: list = field(default_factory=list)

    def announce(self, made: list, now_us: int) -> list:
        del now_us
        self.announced += made
        return []


class Group:
    def __init__(self) -> None:
        self.begun: list[str] = []

    def create_task(self, work, name: str) -> None:
        work.close()
        self.begun.append(name)


class World:
    """alpha founded the mesh and let beta in; beta let gamma and twin in. The commands are given on ``here``."""

    def __init__(self, root: Path, here: str) -> None:
        self.people = {name: Identity.generate() for name in ("alpha", "beta", "gamma", "twin")}
        alpha, beta = self.people["alpha"], self.people["beta"]
        root.mkdir(mode=0o700, exist_ok=True)
        (root / "identity.pem").touch(0o600)
        (root / "identity.pem").write_bytes(self.people[here].to_file())
        book = found_mesh(root, alpha, "home").book()
        for name, host in (("beta", alpha), ("gamma", beta), ("twin", beta)):
            who = self.people[name]
            book.admit(who.public_key, signer_public_key=host.public_key, sign=host.sign, successor=who.successor)
        self.book = MeshBook(book, root)
        self.book.save()
        names = {who.node_id: "gamma" if name == "twin" else name for name, who in self.people.items()}
        self.narrator, self.journal, self.membership = Names(names), Journal(), Core()
        self.switches, self.tasks = Switches(), Group()
        self.admittance = Admittance(self.people[here], self, self.switches, self.tasks)  # type: ignore[arg-type]

    def post(self, action) -> None:
        action()

    def carry_membership(self, effects: list) -> None:
        assert effects == []

    def id(self, name: str) -> str:
        return self.people[name].node_id

    def refusal(self, name: str) -> Refused:
        before = (self.book.state_dir / "mesh.json").read_bytes()
        answer = self.admittance.revoke(name)
        assert isinstance(answer, Refused), answer
        assert "\n" not in answer.message
        assert self.membership.announced == []
        assert (self.book.state_dir / "mesh.json").read_bytes() == before
        return answer


def test_a_revocation_is_on_the_disk_when_it_is_told_and_vouches_for_the_others(tmp_path: Path) -> None:
    world = World(tmp_path, "alpha")
    answer = world.admittance.revoke("beta")
    assert isinstance(answer, Accepted)
    assert set(answer.document["vouched_for"]) == {world.id("gamma"), world.id("twin")}
    assert load_membership(tmp_path).book().is_revoked(world.id("beta"))
    assert [each.revoked for each in world.membership.announced] == [True, False, False]
    again = world.admittance.revoke(world.id("beta"))
    assert isinstance(again, Accepted)
    assert again.document["already"]
    assert len(world.membership.announced) == 3


@pytest.mark.parametrize(
    ("here", "name", "code", "word"),
    [
        ("alpha", "alpha", "own_node", "stagemesh leave"),
        ("alpha", "nobody", "unknown_node", "stagemesh peers"),
        ("alpha", "gamma", "ambiguous_node", "say which"),
        ("beta", "alpha", "rests_on_node", "every admission rests on its key"),
        ("gamma", "beta", "rests_on_node", "on alpha"),
    ],
)
def test_what_cannot_be_revoked_here_says_why_and_changes_nothing(
    tmp_path: Path, here: str, name: str, code: str, word: str
) -> None:
    answer = World(tmp_path, here).refusal(name)
    assert (answer.code, word in answer.message) == (code, True), answer.message


def test_a_name_that_a_revoked_node_had_too_means_the_one_that_is_still_in(tmp_path: Path) -> None:
    world = World(tmp_path, "alpha")
    assert isinstance(world.admittance.revoke(world.id("twin")), Accepted)
    answer = world.admittance.revoke("gamma")
    assert isinstance(answer, Accepted)
    assert answer.document["node_id"] == world.id("gamma")


def test_the_start_of_an_id_is_enough_when_it_is_one_nodes(tmp_path: Path) -> None:
    world = World(tmp_path, "alpha")
    answer = world.admittance.revoke(world.id("beta")[:20])
    assert isinstance(answer, Accepted)


def test_a_full_disk_revokes_nobody_and_rotates_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path, "alpha")

    def full(*_arguments: object) -> None:
        raise room.StateError("no room")

    monkeypatch.setattr(room, "save_statements", full)
    monkeypatch.setattr(room.rotation, "save_statements", full)
    assert world.refusal("beta").status == 507
    assert world.id("beta") in world.book.book
    answer = world.admittance.rotate()
    assert isinstance(answer, Refused)
    assert answer.status == 507
    assert world.id("alpha") in world.book.book
    assert world.tasks.begun == []


def test_a_rotation_begins_the_node_again_and_a_second_one_meanwhile_is_refused(tmp_path: Path) -> None:
    world = World(tmp_path, "beta")
    answer = world.admittance.rotate()
    assert isinstance(answer, Accepted)
    assert answer.document == {"node_id": world.id("beta"), "successor": world.people["beta"].successor}
    assert world.tasks.begun == ["rotate key"]
    assert not world.switches.stop.is_set(), "the news leaves first"
    assert {each.node_id for each in world.membership.announced} == {
        world.people["beta"].successor, world.id("gamma"), world.id("twin"),
    }  # fmt: skip
    second = world.admittance.rotate()
    assert isinstance(second, Refused)
    assert second.code == "rotating"


def test_revoking_an_id_whose_key_was_rotated_names_the_new_one(tmp_path: Path) -> None:
    world = World(tmp_path, "alpha")
    beta = world.people["beta"]
    heir = Identity(beta.next_keys[0])
    made = world.book.book.succeed(beta.public_key, heir.public_key, sign=beta.sign, sign_new=heir.sign, successor="")
    world.book.book.merge_all(made)
    world.book.save()
    answer = world.refusal(world.id("beta"))
    assert (answer.code, heir.node_id in answer.message) == ("superseded_node", True)


@pytest.mark.parametrize("own_copy", [True, False])
def test_a_node_that_learns_of_its_end_ends_once_with_one_line(tmp_path: Path, *, own_copy: bool) -> None:
    world = World(tmp_path, "beta")
    alpha, beta = world.people["alpha"], world.people["beta"]
    if own_copy:  # somebody rotated this very key, and the key that follows is not here
        heir = Identity(beta.next_keys[0])
        world.book.book.merge_all(
            world.book.book.succeed(beta.public_key, heir.public_key, sign=beta.sign, sign_new=heir.sign, successor="")
        )
        beta.next_keys = ()
    else:
        world.book.book.revoke(beta.node_id, signer_public_key=alpha.public_key, sign=alpha.sign)
    world.admittance.look()
    assert world.switches.stop.is_set()
    line = world.switches.barred
    assert ("replaced by that of node" if own_copy else "revoked from mesh home by alpha") in line
    assert "\n" not in line
    world.switches.barred = ""
    world.admittance.look()
    assert world.switches.barred == "", "it is ending already"
    assert json.loads((tmp_path / "mesh.json").read_text())["mesh_id"] == world.book.book.mesh_id
