"""Stores on a temporary disk."""

import contextlib
import hashlib
import os
import subprocess

import pytest

from config.settings import ArtifactSettings
from stage_agent.artifacts.store import ArtifactStore


def sha(content):
    return hashlib.sha256(content).hexdigest()


def a_store(root, discarded=None, **settings):
    facts = {"mode": "trusted", "free_bytes_min": 0} | settings
    told = discarded if discarded is not None else []
    store = ArtifactStore(root, ArtifactSettings(**facts), lambda *event: told.append(event))
    store.prepare()
    return store


def put(store, content, *, used_ns=None):
    """Install ``content`` as a finished transfer does; returns its path."""
    partial = store.begin(sha(content), len(content))
    partial.append(content, "peer")
    path = store.install(partial)
    store.end(sha(content))
    if used_ns is not None:
        os.utime(path, ns=(used_ns, path.stat().st_mtime_ns))
    return path


@contextlib.contextmanager
def small_disk(path, mib):
    """A file system of ``mib`` MiB at ``path``; skips where mounting is not allowed."""
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(path)], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)
