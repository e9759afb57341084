"""A program that the CPU itself ends: a smallest ELF file whose only instruction is defined to be illegal for ever."""

import platform
import struct
from pathlib import Path

import pytest

MACHINES = {"x86_64": (62, b"\x0f\x0b"), "aarch64": (183, b"\x00\x00\x00\x00")}
"""ELF's number of the machine; ``ud2`` and ``udf #0``."""
AT, HEADERS = 0x400_000, 64 + 56


def illegal_program(path: Path) -> str:
    """Written to ``path``; skips on a machine for which none is known here."""
    known = MACHINES.get(platform.machine()) if platform.system() == "Linux" else None
    if known is None:
        pytest.skip(f"no instruction is known here that {platform.system()} {platform.machine()} has not")
    machine, code = known
    size = HEADERS + len(code)
    ident = b"\x7fELF" + bytes((2, 1, 1)) + bytes(9)
    header = struct.pack("<HHIQQQIHHHHHH", 2, machine, 1, AT + HEADERS, 64, 0, 0, 64, 56, 1, 64, 0, 0)
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, AT, AT, size, size, 0x1000)
    path.write_bytes(ident + header + segment + code)
    path.chmod(0o700)
    return str(path)
