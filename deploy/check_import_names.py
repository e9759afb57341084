# ruff: noqa: INP001 - a script of the image build, not a module
"""Fail the image build when somebody else's package answers to one of our four generic import names.

`config` and `protocol` are also projects on PyPI. A name is ours when every installed distribution that provides it is
stagemesh itself, and when Python really imports it from where stagemesh was installed.
"""

import importlib.util
import sys
from importlib import metadata

OURS = "stagemesh"
NAMES = ("config", "protocol", "coordinator", "stage_agent")


def intruders() -> list[str]:
    """One sentence per name that is not ours alone."""
    owners = metadata.packages_distributions()
    home = metadata.distribution(OURS).locate_file("")
    found = []
    for name in NAMES:
        distributions = sorted(set(owners.get(name, ())))
        spec = importlib.util.find_spec(name)
        origin = spec.origin if spec is not None else None
        if distributions != [OURS]:
            found.append(f"{name}: provided by {distributions or 'nobody'}, expected {OURS} alone")
        elif origin is None or not origin.startswith(str(home)):
            found.append(f"{name}: imported from {origin}, expected below {home}")
    return found


if __name__ == "__main__":
    problems = intruders()
    for problem in problems:
        sys.stderr.write(f"{problem}\n")
    sys.exit(1 if problems else 0)
