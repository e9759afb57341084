"""A measuring program as a child: what it wrote to stdout, or one line that says why there is nothing."""

import subprocess
from collections.abc import Mapping, Sequence

from config.errors import StagemeshError

_MAX_OUTPUT = 1_000_000


class BenchmarkFailed(StagemeshError):  # noqa: N818 - named like the other failures of measurements
    """A benchmark gave no figures; nothing was kept."""


def output_of(
    who: str, command: Sequence[str], *, limit_s: float, asked: str = "", environment: Mapping[str, str] | None = None
) -> bytes:
    """Run ``command`` with ``asked`` on its stdin; blocks, at most ``limit_s``; the first megabyte of its stdout.

    Raises ``BenchmarkFailed``, one line that begins with ``who``, when it cannot start, fails or takes longer.
    """
    try:
        done = subprocess.run(  # noqa: S603 - our own program, or the one that the operator names in the settings
            command, input=asked.encode(), capture_output=True, check=False, timeout=limit_s, env=environment
        )
    except OSError as error:
        raise BenchmarkFailed(f"{who} did not start: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise BenchmarkFailed(f"{who} did not end within {limit_s:.0f} s") from error
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
        raise BenchmarkFailed(f"{who} ended with {done.returncode}: {last[0][:200]}")
    return done.stdout[:_MAX_OUTPUT]
