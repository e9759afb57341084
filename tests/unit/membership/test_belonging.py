"""Who is barred leaves at once, who lost its voucher may find another; the buried of another life answer to be let in."""

from protocol.membership import CloseConnection, MemberChanged
from protocol.membership.admissions import CUT_OFF_US
from protocol.membership.effects import Conflict
from protocol.membership.table import Tombstone
from protocol.messages import DigestRequest, GossipPush, RowVersion
from protocol.rows import Admission
from tests.simulation.membership_mesh import Identity, identity
from tests.unit.membership.hands import SECOND, Bench, sent


def statement(
    about: Identity, signer: Identity, *, version: int = 1, revoked: bool = False, successor: str = ""
) -> Admission:
    return Admission(
        mesh_id="m.x", node_id=about.node_id, public_key=about.public_key, version=version, revoked=revoked,
        successor=successor, signer=signer.node_id, signer_public_key=signer.public_key, signature=bytes(64),
    )  # fmt: skip


def test_who_lost_its_voucher_stays_ten_seconds_and_longer_only_with_a_new_one() -> None:
    bench = Bench()
    for number in (1, 2, 3):
        bench.connect(number)
    bench.admitted -= {identity(number).node_id for number in (1, 2, 3)}
    effects = bench.core.spread_admission(statement(identity(1), bench.me, version=2, revoked=True), bench.now_us)
    assert [effect for effect in effects if isinstance(effect, MemberChanged)] == [
        MemberChanged(identity(1).node_id, "alive", None, "revoked")
    ]
    assert (bench.state(2), bench.state(3)) == ("alive", "alive")
    bench.admitted.add(identity(2).node_id)
    seen = bench.run(CUT_OFF_US / SECOND + 1)
    assert CloseConnection(identity(3).node_id, "unvouched") in seen
    assert bench.state(3) is None
    assert bench.state(2) is not None


def test_a_succession_drops_the_old_key_and_nobody_else() -> None:
    bench = Bench()
    old, new = identity(1), identity(4)
    bench.connect(1)
    bench.connect(2)
    bench.core.spread_admission(statement(old, bench.me, successor=new.node_id), bench.now_us)
    bench.admitted.discard(old.node_id)
    effects = bench.core.spread_admission(statement(new, old), bench.now_us)
    assert CloseConnection(old.node_id, "superseded") in effects
    assert bench.state(1) is None
    assert bench.state(2) == "alive"


def test_an_announcement_reaches_everybody_connected_in_one_message_the_barred_too() -> None:
    bench = Bench()
    for number in (1, 2):
        bench.connect(number)
    news = [statement(identity(1), bench.me, version=2, revoked=True), statement(identity(2), bench.me, version=2)]
    bench.admitted.discard(identity(1).node_id)
    effects = bench.core.announce(news, bench.now_us)
    told = sent(effects, GossipPush)
    assert {send.peer for send in told} == {identity(1).node_id, identity(2).node_id}
    assert all(send.message.gossip.admissions == tuple(news) for send in told)
    assert effects.index(told[0]) < effects.index(CloseConnection(identity(1).node_id, "revoked"))


def test_a_replayed_row_of_the_departed_brings_nobody_back_after_a_restart() -> None:
    bench = Bench(tombstones=(Tombstone(identity(2).node_id, 3, 50),))
    bench.connect(1)
    for boot, seq in ((3, 49), (3, 50), (3, 99), (9, 1)):
        bench.gossip(1, rows=(bench.row(2, seq, boot),))
        assert bench.state(2) is None, "whatever others say"
    bench.core.on_connected(identity(2).node_id, "10.0.0.3:1", bench.now_us)
    bench.gossip(2, rows=(bench.row(2, 50, 3),))
    assert bench.state(2) is None, "not even by itself with the row of its burial"
    bench.gossip(2, rows=(bench.row(2, 51, 3),))
    assert bench.state(2) == "alive"


def test_a_node_that_was_buried_before_a_restart_is_told_so_and_can_answer() -> None:
    bench = Bench(tombstones=(Tombstone(identity(2).node_id, 3, 50),))
    effects = bench.core.on_connected(identity(2).node_id, "10.0.0.3:1", bench.now_us)
    (digest,) = sent(effects, DigestRequest)
    line = RowVersion(node_id=identity(2).node_id, boot_counter=3, seq=50, dead=True)
    assert line in digest.message.rows
    (to_others,) = sent(bench.core.on_connected(identity(1).node_id, "10.0.0.2:1", bench.now_us), DigestRequest)
    assert line not in to_others.message.rows

    buried = Bench()  # the other side of it: whoever reads that about itself issues a higher row
    buried.connect(1)
    before = buried.core.own_row
    mine = RowVersion(node_id=buried.me.node_id, boot_counter=5, seq=before.seq, dead=True)
    buried.say(1, DigestRequest(rows=(mine,)))
    assert buried.core.own_row.seq > before.seq


def test_rows_count_on_from_a_raised_boot_counter_and_the_same_process_goes_on() -> None:
    bench = Bench()
    before = bench.core.own_row
    bench.core.outrank(1_000, bench.now_us)
    after = bench.core.own_row
    assert (after.boot_counter, after.instance) == (1_000, before.instance)
    bench.core.outrank(7, bench.now_us)
    assert bench.core.own_row.boot_counter == 1_000, "never back"


def test_a_row_of_another_process_with_my_key_tells_its_boot_counter() -> None:
    bench = Bench()
    bench.connect(1)
    effects = bench.gossip(1, rows=(bench.row(0, 3, boot=8, instance="c" * 32),))
    assert Conflict(bench.me.node_id, 8) in effects
    assert bench.gossip(1, rows=(bench.row(0, 3, boot=4, instance="c" * 32),)) == [], (
        "an earlier start of mine is no news"
    )
