"""Keeps numpy's matrix library to one thread in a process that decodes.

OpenBLAS lets its threads spin while they wait for each other. With several agents on one machine (a demo, a test) that is
ruinous: a token of a 135 M model took 219 ms with one thread and 2 185 ms with two on two busy cores. Best effort: other
matrix libraries are left alone.
"""

import contextlib
import ctypes
from pathlib import Path

import numpy as np

_NAMES = ("scipy_openblas_set_num_threads64_", "scipy_openblas_set_num_threads", "openblas_set_num_threads64_")


def use_one_thread() -> bool:
    """Whether a known library was found and told. For the whole process; harmless when repeated."""
    package = Path(np.__file__).parent
    for directory in (package.parent / "numpy.libs", package / ".dylibs"):
        for path in sorted(directory.glob("*openblas*")):
            with contextlib.suppress(OSError):
                library = ctypes.CDLL(str(path))
                for name in _NAMES:
                    if hasattr(library, name):
                        getattr(library, name)(1)
                        return True
    return False
