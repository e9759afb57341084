"""Hostile bytes: random ones, mutated valid ones, and valid envelopes with hostile content. Seeded, no dependency."""

import random

import msgpack

from protocol.ballots import Prepare
from protocol.codec import encode, encode_row
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
    Ping,
    PingRequest,
    RowVersion,
)
from protocol.rows import Accusation, Admission, NodeRow, SignedRow
from protocol.wire import Epoch

ROW = NodeRow(node_id="n" * 32, public_key=bytes(32), boot_counter=1, seq=2, instance="0" * 32, name="n", version="1")
ADMISSION = Admission(
    mesh_id="m.x",
    node_id="n",
    public_key=bytes(32),
    version=1,
    signer="s",
    signer_public_key=bytes(32),
    signature=bytes(64),
)
GOSSIP = Gossip(
    rows=(SignedRow(payload=encode_row(ROW), signature=bytes(64)),),
    accusations=(Accusation(node_id="n", boot_counter=1, incarnation=0, verdict="suspect", accuser="m"),),
    admissions=(ADMISSION,),
)
VALID = tuple(
    encode(message)
    for message in (
        Hello(mesh_id="m.x", instance="0" * 32, boot_counter=1, name="n", version="1", admissions=(ADMISSION,)),
        JoinRequest(token_id="t", proof=bytes(32), name="n"),
        JoinAccepted(mesh_id="m.x", admissions=(ADMISSION,), seeds=("a:1",)),
        JoinRefused(reason="busy"),
        Ping(seq=1, gossip=GOSSIP),
        Ack(seq=1, target="t", health=3),
        PingRequest(seq=2, target="t"),
        IdentityContested(instance="1" * 32, address="192.0.2.1:7946"),
        GossipPush(gossip=GOSSIP),
        DigestRequest(rows=(RowVersion(node_id="n", boot_counter=1, seq=1),)),
        Prepare(ballot=Epoch(term=1, node_id="n", instance="0" * 32), slot="default", participant_set_hash="0" * 64),
    )
)
SCALARS = (
    None,
    True,
    -1,
    0,
    2**63,
    2**64 - 1,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x" * 70_000,
    b"",
    b"\x00" * 70_000,
)
KEYS = (
    "v",
    "type",
    "body",
    "seq",
    "gossip",
    "rows",
    "payload",
    "signature",
    "node_id",
    "admissions",
    "name",
    "ballot",
    "term",
)


def hostile(die: random.Random) -> bytes:
    """One case; most are near a valid message, for that is where parsers break."""
    match die.randrange(7):
        case 0:
            return die.randbytes(die.randrange(0, 200))
        case 1:
            raw = bytearray(die.choice(VALID))
            for _ in range(die.randrange(1, 6)):
                raw[die.randrange(len(raw))] = die.randrange(256)
            return bytes(raw)
        case 2:
            raw = die.choice(VALID)
            return raw[: die.randrange(len(raw))]
        case 3:
            one, two = die.choice(VALID), die.choice(VALID)
            return one[: die.randrange(len(one))] + two[die.randrange(len(two)) :]
        case 4:
            return msgpack.packb(_tree(die, 4))
        case 5:
            envelope = msgpack.unpackb(die.choice(VALID))
            _spoil(die, envelope)
            return msgpack.packb(envelope)
        case _:
            return bytes([die.choice([0x91, 0x81, 0xDC, 0xDE, 0xC7, 0xD9])]) * die.randrange(1, 3_000)


def _tree(die: random.Random, depth: int) -> object:
    if depth == 0 or die.random() < 0.3:
        return die.choice(SCALARS)
    if die.random() < 0.4:
        return [_tree(die, depth - 1) for _ in range(die.randrange(4))]
    return {die.choice(KEYS): _tree(die, depth - 1) for _ in range(die.randrange(5))}


def _spoil(die: random.Random, node: object) -> None:
    """Change one place somewhere in a decoded envelope."""
    if isinstance(node, dict) and node:
        key = die.choice(list(node))
        if die.random() < 0.5 and isinstance(node[key], dict | list):
            _spoil(die, node[key])
        elif die.random() < 0.2:
            del node[key]
        else:
            node[key] = _tree(die, 2)
    elif isinstance(node, list) and node:
        if die.random() < 0.3:
            node.extend([node[0]] * die.randrange(70))
        else:
            _spoil(die, node[die.randrange(len(node))])
