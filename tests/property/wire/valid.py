"""One valid message of every type there is, each with something in every list that it has."""

from protocol.ballots import (
    Abort,
    Activate,
    Active,
    ArtifactRef,
    Keepalive,
    Nack,
    Prepare,
    Promise,
    PublishedPlan,
    Ready,
    Retire,
    Stage,
    StageAssignment,
    StageProgress,
    StageShare,
)
from protocol.codec import encode_row
from protocol.messages import (
    Ack,
    DigestRequest,
    Gossip,
    GossipPush,
    Hello,
    IdentityContested,
    JoinAccepted,
    JoinRefused,
    JoinRequest,
    PackageOffer,
    PackageRequest,
    PathEcho,
    PathTake,
    Ping,
    PingRequest,
    RowRequest,
    RowVersion,
)
from protocol.rows import Accusation, Admission, DeviceFact, LinkFact, NodeRow, Refutation, SignedRow
from protocol.wire import Epoch

INSTANCE, DIGEST = "0" * 32, "0" * 64
BALLOT = Epoch(term=1, node_id="n", instance=INSTANCE)
ROW = NodeRow(
    node_id="n" * 32,
    public_key=bytes(32),
    boot_counter=1,
    seq=2,
    instance=INSTANCE,
    name="n",
    version="1",
    addresses=("a:1",),
    devices=(DeviceFact(name="cpu", kind="cpu", memory_bytes=1),),
    links=(LinkFact(target="m", min_rtt_us=1, samples=1),),
)
ADMISSION = Admission(
    mesh_id="m.x",
    node_id="n",
    public_key=bytes(32),
    version=1,
    signer="s",
    signer_public_key=bytes(32),
    signature=bytes(64),
)
VERSION = RowVersion(node_id="n", boot_counter=1, seq=1)
GOSSIP = Gossip(
    rows=(SignedRow(payload=encode_row(ROW), signature=bytes(64)),),
    accusations=(Accusation(node_id="n", boot_counter=1, incarnation=0, verdict="suspect", accuser="m"),),
    admissions=(ADMISSION,),
    refutations=(Refutation(node_id="n", boot_counter=1, incarnation=1, seq=2, signature=bytes(64)),),
    versions=(VERSION,),
)
ASSIGNMENT = StageAssignment(
    slot="default",
    stage_index=0,
    stage_count=1,
    node_id="n",
    instance=INSTANCE,
    model_digest=DIGEST,
    model_source="m.gguf",
    layer_start=0,
    layer_end=8,
    roles=("driver", "embedding", "readout"),
    required_bytes=2,
    parameter_bytes=1,
    context_length=64,
    lanes=1,
    artifacts=(ArtifactRef(path="layer.0", sha256=DIGEST, size_bytes=1),),
    stages=(StageShare(node_id="n", layer_start=0, layer_end=8),),
)
HELD = {"ballot": BALLOT, "slot": "default", "plan_hash": DIGEST, "instance": INSTANCE}
MESSAGES = (
    Hello(mesh_id="m.x", instance=INSTANCE, boot_counter=1, name="n", version="1", admissions=(ADMISSION,)),
    JoinRequest(token_id="t", proof=bytes(32), name="n"),
    JoinAccepted(mesh_id="m.x", admissions=(ADMISSION,), seeds=("a:1",)),
    JoinRefused(reason="busy"),
    Ping(seq=1, gossip=GOSSIP),
    Ack(seq=1, target="t", health=3),
    PingRequest(seq=2, target="t"),
    GossipPush(gossip=GOSSIP),
    DigestRequest(rows=(VERSION,), admissions=(VERSION,), reply=True),
    RowRequest(rows=("n",)),
    IdentityContested(instance="1" * 32, address="192.0.2.1:7946"),
    Prepare(ballot=BALLOT, slot="default", participant_set_hash=DIGEST),
    Promise(ballot=BALLOT, slot="default", instance=INSTANCE, accepted=BALLOT, accepted_hash=DIGEST),
    Nack(ballot=BALLOT, slot="default", claim="stage", promised=BALLOT, reason="draining", retry_after_us=1),
    Stage(ballot=BALLOT, slot="default", plan_hash=DIGEST, assignment=ASSIGNMENT, participants=("n",)),
    StageProgress(ballot=BALLOT, slot="default", loaded_bytes=1, total_bytes=2),
    Ready(**HELD),
    Activate(**HELD),
    Active(**HELD),
    Abort(ballot=BALLOT, slot="default", reason="why"),
    Retire(ballot=BALLOT, slot="default", superseded_by=BALLOT),
    Keepalive(ballot=BALLOT, slot="default"),
    PublishedPlan(ballot=BALLOT, slot="default", generation=1, state="serving", document=b"{}"),
    PackageRequest(digest=DIGEST),
    PackageOffer(digest=DIGEST, document=b"x"),
    PathEcho(seq=1),
    PathTake(),
)
