"""What stands on disk: keys, membership and invitations; never half written, never readable by others."""

import json
import stat
import subprocess
import sys

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from protocol.admission import AdmissionBook
from protocol.errors import IdentityError, StateError
from protocol.ids import node_id_of
from protocol.join_token import join_proof, verifier_of
from protocol.messages import JoinAccepted, JoinRefused, JoinRequest
from protocol.quic import invites
from protocol.quic.desk import AdmissionDesk
from protocol.quic.identity import Identity, certificate_key, trust_anchor
from protocol.quic.invites import InviteBox
from protocol.quic.mesh_files import found_mesh, load_membership, save_membership, store_first
from protocol.quic.private_file import write_private


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_an_identity_comes_back_with_the_same_id_and_certificate(tmp_path):
    made = Identity.create(tmp_path / "state")
    loaded = Identity.load(tmp_path / "state")
    assert loaded.node_id == made.node_id == node_id_of(made.public_key)
    assert loaded.certificate == made.certificate, "derived, so a restart shows the same certificate"
    assert mode(tmp_path / "state" / "identity.pem") == 0o600
    assert mode(tmp_path / "state") == 0o700


def test_an_identity_is_never_overwritten(tmp_path):
    before = Identity.create(tmp_path)
    with pytest.raises(IdentityError, match="it is kept"):
        Identity.create(tmp_path)
    assert Identity.load(tmp_path).node_id == before.node_id
    assert names(tmp_path) == ["identity.pem"], "no temporary file is left"


def test_a_key_that_others_can_read_is_refused_with_the_remedy(tmp_path):
    Identity.create(tmp_path)
    (tmp_path / "identity.pem").chmod(0o640)
    with pytest.raises(IdentityError, match="chmod 600"):
        Identity.load(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"garbage", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"]
)
def test_a_damaged_key_is_one_clear_line(tmp_path, content):
    write_private(tmp_path / "identity.pem", content)
    with pytest.raises(IdentityError, match="is not a key") as caught:
        Identity.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_key_of_another_kind_is_refused(tmp_path):
    key = ec.generate_private_key(ec.SECP256R1())
    write_private(tmp_path / "identity.pem", key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    with pytest.raises(IdentityError, match="another kind of key"):
        Identity.load(tmp_path)


def test_without_an_identity_the_error_says_which_command_makes_one(tmp_path):
    with pytest.raises(IdentityError, match="stagemesh init"):
        Identity.load(tmp_path)


def test_the_private_key_never_shows_in_representations():
    identity = Identity.generate()
    secret = identity.private_key.private_bytes_raw()
    assert secret.hex() not in repr(identity)
    assert repr(identity) == f"Identity({identity.node_id})"


def test_a_certificate_carries_the_key_and_an_anchor_is_made_from_the_key_alone():
    identity = Identity.generate()
    assert certificate_key(identity.certificate) == identity.public_key
    assert certificate_key(None) is None
    anchor = x509.load_der_x509_certificate(trust_anchor(identity.public_key))
    assert anchor.subject == identity.certificate.issuer
    identity.certificate.verify_directly_issued_by(anchor)


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
from protocol.errors import StagemeshError
from protocol.quic.identity import Identity
from protocol.quic.mesh_files import save_membership
from protocol.quic.private_file import write_private
try:
    if sys.argv[2] == "create":
        Identity.create(Path(sys.argv[1]))
    else:
        write_private(Path(sys.argv[1]) / "mesh.json", b"new")
except StagemeshError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize("what", ["create", "replace"])
def test_when_nothing_can_be_written_the_old_file_stays_and_no_piece_is_left(tmp_path, what):
    if what == "replace":
        write_private(tmp_path / "mesh.json", b"old")
    before = names(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path), what], capture_output=True, text=True, check=False
    )
    assert done.stdout.startswith("StateError cannot write ")
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""
    assert names(tmp_path) == before
    if what == "replace":
        assert (tmp_path / "mesh.json").read_bytes() == b"old"


def test_a_mesh_comes_back_as_it_was_and_is_never_overwritten(tmp_path):
    founder = Identity.create(tmp_path)
    founded = found_mesh(tmp_path, founder, "home")
    assert load_membership(tmp_path) == founded
    assert founder.node_id in founded.book()
    with pytest.raises(IdentityError, match="in a mesh already"):
        found_mesh(tmp_path, founder, "other")
    with pytest.raises(IdentityError):
        store_first(tmp_path, founded)
    assert load_membership(tmp_path) == founded
    assert mode(tmp_path / "mesh.json") == 0o600


def test_no_file_means_no_mesh(tmp_path):
    assert load_membership(tmp_path) is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b'{"schema": 2}',
        b"\xff",
        b'{"schema": 1, "mesh_id": "x", "seeds": [1], "admissions": []}',
        b'{"schema": 1, "mesh_id": "x", "seeds": [], "admissions": [{"public_key": "?"}]}',
    ],
)
def test_a_damaged_membership_is_one_clear_line(tmp_path, content):
    write_private(tmp_path / "mesh.json", content)
    with pytest.raises(StateError, match="is damaged"):
        load_membership(tmp_path)


def test_a_tampered_membership_admits_nobody(tmp_path):
    founder, intruder = Identity.create(tmp_path), Identity.generate()
    found_mesh(tmp_path, founder, "home")
    document = json.loads((tmp_path / "mesh.json").read_text())
    forged = dict(document["admissions"][0], node_id=intruder.node_id)
    document["admissions"].append(forged)
    (tmp_path / "mesh.json").write_text(json.dumps(document))
    assert list(load_membership(tmp_path).book()) == [founder.node_id]


def test_seeds_are_kept_once_and_bounded(tmp_path):
    founder = Identity.create(tmp_path)
    book = found_mesh(tmp_path, founder, "home").book()
    save_membership(tmp_path, book, ["a:1", "b:1", "a:1", *(f"c{number}:1" for number in range(1_000))])
    seeds = load_membership(tmp_path).seeds
    assert seeds[:2] == ("a:1", "b:1")
    assert len(seeds) == 256


class Inviter:
    """A founder's desk over a state directory, with a clock to turn."""

    def __init__(self, tmp_path):
        self.time_s = 1_000_000
        self.state_dir = tmp_path / "inviter"
        self.identity = Identity.create(self.state_dir)
        self.book = found_mesh(self.state_dir, self.identity, "home").book()
        self.box = InviteBox(self.state_dir, wall_s=lambda: self.time_s)
        self.desk = self.fresh_desk()

    def fresh_desk(self):
        return AdmissionDesk(
            identity=self.identity,
            book=self.book,
            state_dir=self.state_dir,
            seeds=lambda: ("10.0.0.1:7946",),
            box=InviteBox(self.state_dir, wall_s=lambda: self.time_s),
        )

    def ask(self, joiner, token_id, secret, *, proven_for=None, desk=None):
        proof = join_proof(
            verifier_of(secret),
            mesh_id=self.book.mesh_id,
            token_id=token_id,
            joiner=(proven_for or joiner).node_id,
            inviter=self.identity.node_id,
        )
        request = JoinRequest(token_id=token_id, proof=proof, name="newcomer")
        return (desk or self.desk).redeem(joiner.public_key, request)


def refused(reason):
    return JoinRefused(reason=reason)


def test_a_token_is_redeemed_once_and_the_same_newcomer_may_ask_again(tmp_path):
    inviter, one, two = Inviter(tmp_path), Identity.generate(), Identity.generate()
    token_id, secret = inviter.box.create(60)
    answer = inviter.ask(one, token_id, secret)
    assert isinstance(answer, JoinAccepted)
    assert one.node_id in AdmissionBook(answer.mesh_id, answer.admissions)
    assert answer.seeds == ("10.0.0.1:7946",)
    assert inviter.ask(one, token_id, secret) == answer
    assert inviter.ask(two, token_id, secret) == refused("unknown_or_used_token")
    assert one.node_id in load_membership(inviter.state_dir).book(), "durable before it was answered"


def test_a_used_token_stays_used_after_a_restart(tmp_path):
    inviter, one, two = Inviter(tmp_path), Identity.generate(), Identity.generate()
    token_id, secret = inviter.box.create(60)
    inviter.ask(one, token_id, secret)
    assert inviter.ask(two, token_id, secret, desk=inviter.fresh_desk()) == refused("unknown_or_used_token")


def test_an_expired_token_admits_nobody(tmp_path):
    inviter, one = Inviter(tmp_path), Identity.generate()
    token_id, secret = inviter.box.create(60)
    inviter.time_s += 59
    assert isinstance(inviter.ask(one, token_id, secret), JoinAccepted)
    token_id, secret = inviter.box.create(60)
    inviter.time_s += 60
    assert inviter.ask(Identity.generate(), token_id, secret) == refused("expired")


def test_a_proof_that_was_relayed_or_replayed_on_another_connection_is_refused_and_burns_nothing(tmp_path):
    inviter, victim, relay = Inviter(tmp_path), Identity.generate(), Identity.generate()
    token_id, secret = inviter.box.create(60)
    assert inviter.ask(relay, token_id, secret, proven_for=victim) == refused("bad_proof")
    assert relay.node_id not in inviter.book
    assert isinstance(inviter.ask(victim, token_id, secret), JoinAccepted)


@pytest.mark.parametrize("token_id", ["unknown", "../../identity", "a" * 16, "..", "abcdefgh2345677."])
def test_an_unknown_token_or_one_that_names_another_file_is_refused(tmp_path, token_id):
    inviter = Inviter(tmp_path)
    request = JoinRequest.model_construct(token_id=token_id, proof=bytes(32), name="n")
    assert inviter.desk.redeem(Identity.generate().public_key, request) == refused("unknown_or_used_token")


def test_a_revoked_node_cannot_come_back_with_a_new_token(tmp_path):
    inviter, one = Inviter(tmp_path), Identity.generate()
    token_id, secret = inviter.box.create(60)
    inviter.ask(one, token_id, secret)
    inviter.book.revoke(one.node_id, signer_public_key=inviter.identity.public_key, sign=inviter.identity.sign)
    token_id, secret = inviter.box.create(60)
    assert inviter.ask(one, token_id, secret) == refused("unknown_or_used_token")


def test_when_the_inviter_cannot_write_nobody_gets_an_answer_and_the_token_is_not_lost(tmp_path):
    inviter, one = Inviter(tmp_path), Identity.generate()
    token_id, secret = inviter.box.create(60)
    file, aside = inviter.state_dir / "mesh.json", tmp_path / "aside"
    file.rename(aside)
    file.mkdir()
    assert inviter.ask(one, token_id, secret) == refused("busy")
    file.rmdir()
    aside.rename(file)
    assert isinstance(inviter.ask(one, token_id, secret), JoinAccepted)
    assert one.node_id in load_membership(inviter.state_dir).book()


def test_an_invitation_on_disk_holds_no_secret(tmp_path):
    inviter = Inviter(tmp_path)
    token_id, secret = inviter.box.create(60)
    path = inviter.state_dir / "invites" / f"{token_id}.json"
    content = path.read_bytes()
    assert secret not in content
    assert secret.hex().encode() not in content
    assert mode(path) == 0o600


def test_open_invitations_are_bounded_and_expired_ones_make_room(tmp_path, monkeypatch):
    monkeypatch.setattr(invites, "MAX_OPEN", 5)
    inviter = Inviter(tmp_path)
    for _ in range(5):
        inviter.box.create(60)
    with pytest.raises(StateError, match="invitations are open"):
        inviter.box.create(60)
    inviter.time_s += 61
    inviter.box.create(60)
    assert len(list((inviter.state_dir / "invites").iterdir())) == 1


@pytest.mark.parametrize(
    "content", [b"", b"[]", b'{"token_id": 1}', b'{"token_id": "x", "verifier": "zz", "expires_at_s": 1}']
)
def test_a_damaged_invitation_is_no_invitation(tmp_path, content):
    inviter = Inviter(tmp_path)
    token_id, secret = inviter.box.create(60)
    write_private(inviter.state_dir / "invites" / f"{token_id}.json", content)
    assert inviter.ask(Identity.generate(), token_id, secret) == refused("unknown_or_used_token")
