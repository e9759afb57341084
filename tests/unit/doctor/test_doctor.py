"""What ``doctor`` says of an identity, and whose machine it looks at."""

from pathlib import Path

import pytest

from config.settings import RuntimeSettings, Settings
from protocol.admission import AdmissionBook
from protocol.quic.identity import Identity
from protocol.quic.mesh_files import found_mesh, load_membership, save_membership, save_statements
from protocol.quic.rotation import rotate
from stage_agent.cli.doctor import examine
from stage_agent.cli.doctor_local import check_engine, check_identity
from tests.unit.llama_cpp.stages import program


def admitted(directory: Path) -> tuple[Identity, Identity, AdmissionBook]:
    """A founder elsewhere, and the identity in ``directory``, which it let in."""
    founder = Identity.create(directory / "founder")
    book = found_mesh(directory / "founder", founder, "home").book()
    mine = Identity.create(directory / "mine")
    book.admit(mine.public_key, signer_public_key=founder.public_key, sign=founder.sign, successor=mine.successor)
    save_membership(directory / "mine", book, [])
    return founder, mine, book


def test_an_identity_that_the_mesh_takes_is_well(tmp_path: Path) -> None:
    _, mine, _ = admitted(tmp_path)
    finding = check_identity(tmp_path / "mine")
    assert (finding.verdict, finding.text) == ("ok", f"node {mine.node_id} in mesh home")


def test_an_identity_without_a_mesh_is_not(tmp_path: Path) -> None:
    Identity.create(tmp_path)
    finding = check_identity(tmp_path)
    assert (finding.verdict, "in no mesh" in finding.text, "stagemesh join" in finding.next_step) == (
        "fail",
        True,
        True,
    )


def test_a_revoked_identity_says_how_to_come_back(tmp_path: Path) -> None:
    founder, mine, book = admitted(tmp_path)
    book.revoke(mine.node_id, signer_public_key=founder.public_key, sign=founder.sign)
    save_membership(tmp_path / "mine", book, [])
    finding = check_identity(tmp_path / "mine")
    assert (finding.verdict, finding.text) == ("fail", f"node {mine.node_id} is revoked in mesh home")
    assert "new identity" in finding.next_step


@pytest.mark.parametrize("own", [True, False])
def test_a_rotated_key_is_well_where_the_next_one_lies_and_an_old_copy_is_not(tmp_path: Path, *, own: bool) -> None:
    _, mine, book = admitted(tmp_path)
    rotate(tmp_path / "mine", mine, book, [])
    if not own:
        (tmp_path / "mine" / "identity.pem").write_bytes(mine.to_pem())
    finding = check_identity(tmp_path / "mine")
    assert finding.verdict == ("ok" if own else "fail"), finding
    assert (mine.successor if own else "superseded") in finding.text
    assert Identity.load(tmp_path / "mine").node_id == mine.node_id, "looking changes nothing"


def test_an_identity_whose_voucher_was_revoked_is_told_apart(tmp_path: Path) -> None:
    founder, mine, book = admitted(tmp_path)
    (friend_state := tmp_path / "friend").mkdir(mode=0o700)
    friend = Identity.create(friend_state)
    book.admit(friend.public_key, signer_public_key=mine.public_key, sign=mine.sign)
    revocation = book.revocation(mine.node_id, signer_public_key=founder.public_key, sign=founder.sign)[0]
    save_statements(friend_state, book.mesh_id, (*book.statements, revocation), [])
    assert "nobody who is admitted vouches" in check_identity(friend_state).text
    assert load_membership(friend_state) is not None


def test_asking_another_daemon_leaves_this_machine_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STAGEMESH_NODE__STATE_DIR", str(tmp_path / "nothing here"))
    monkeypatch.setenv("STAGEMESH_API__PORT", "1")
    elsewhere = examine(None, "127.0.0.1:1")
    assert [(finding.check, finding.verdict) for finding in elsewhere] == [("scope", "note"), ("daemon", "fail")]
    here = {finding.check: finding.verdict for finding in examine(None, None)}
    assert here["state"] == here["identity"] == "fail"


def test_direct_engines_are_pointed_at(tmp_path: Path) -> None:
    programs = {"llama_server": program(tmp_path), "llama_rpc_server": program(tmp_path)}
    for host, verdict in (("", "ok"), ("192.168.1.20", "note")):
        runtime = RuntimeSettings(kind="llama_cpp", llama_direct_host=host, **programs)
        finding = check_engine(Settings(runtime=runtime))
        assert finding.verdict == verdict
        assert ("without encryption or authentication" in finding.text) == bool(host)


def test_the_verification_engine_is_said_to_be_none_for_production():
    finding = check_engine(Settings(runtime=RuntimeSettings(kind="reference")))
    assert finding.verdict == "note"
    assert "not for production" in finding.text
