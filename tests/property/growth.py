"""How much memory a long run keeps, and who keeps it."""

import gc
import logging
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager


class Growth:
    """Bytes of Python objects still held at each ``mark``; ``bytes`` is what the last two differ by."""

    def __init__(self) -> None:
        self._marks: list[tracemalloc.Snapshot] = []
        self._held: list[int] = []

    def mark(self) -> None:
        gc.collect()
        self._held.append(tracemalloc.get_traced_memory()[0])
        self._marks = [*self._marks[-1:], tracemalloc.take_snapshot()]

    @property
    def bytes(self) -> int:
        return self._held[-1] - self._held[-2]

    def keepers(self) -> str:
        """The lines that keep most of what was added, for the message of a failed assertion."""
        before, after = self._marks
        return "\n".join(str(line) for line in after.compare_to(before, "lineno")[:8])


@contextmanager
def growth() -> Iterator[Growth]:
    """Logs are silent inside: pytest keeps every record until the test ends."""
    logging.disable()
    tracemalloc.start()
    try:
        yield Growth()
    finally:
        tracemalloc.stop()
        logging.disable(logging.NOTSET)
