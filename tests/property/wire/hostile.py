"""Hostile bytes: random ones, mutated valid ones, and valid envelopes with hostile content. Seeded, no dependency."""

import random

import msgpack

from protocol.codec import encode
from tests.property.wire.valid import MESSAGES

VALID = tuple(encode(message) for message in MESSAGES)
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
    "refutations",
    "versions",
    "assignment",
    "stages",
    "plan_hash",
    "document",
)


def hostile(die: random.Random) -> bytes:
    """One case; most are near a valid message, for that is where parsers break."""
    match die.randrange(8):
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
        case 6:
            return die.choice(VALID)  # nothing wrong with it but who says it, and when
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
