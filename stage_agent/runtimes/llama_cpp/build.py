"""Which llama.cpp this node has: the commit of ``llama-server`` and the protocol of ``ggml-rpc-server``.

Two builds talk to each other only when their protocols' major versions agree, and even then nobody has tested them
together, so a plan uses one build. The rpc-server says its protocol when it starts, in a buffer that it writes out when a
client has come and gone; nobody else can be connected to this one.
"""

import contextlib
import os
import re
import select
import socket
import subprocess
import time
from dataclasses import dataclass

from protocol.errors import ConfigurationError

_VERSION = re.compile(r"version: (\d+) \(([0-9a-f]+)\)")
_PROTOCOL = re.compile(r"RPC server v(\d+\.\d+\.\d+)")
_LIMIT_S = 10.0
UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Build:
    """What must be equal on all nodes of a plan."""

    commit: str
    protocol: str

    @property
    def label(self) -> str:
        """For the node's row, at most 64 characters."""
        return f"llama.cpp {self.commit[:16]} rpc {self.protocol}"[:64]


def read_build(server: str, rpc_server: str) -> Build:
    """Start both programs for an instant. Raises ``ConfigurationError`` when one is missing or no llama.cpp."""
    said = _output([server, "--version"], "runtime.llama_server")
    version = _VERSION.search(said)
    if version is None:
        raise ConfigurationError(f"runtime.llama_server: {server} is no llama-server: `--version` names no build")
    protocol = _PROTOCOL.search(_banner(rpc_server))
    return Build(version.group(2), protocol.group(1) if protocol else UNKNOWN)


def _output(command: list[str], knob: str) -> str:
    try:
        done = subprocess.run(  # noqa: S603 - the operator's program
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigurationError(f"{knob}: {_why(command[0], error)}") from None
    return (done.stdout + done.stderr).decode("utf-8", "replace")


def _banner(rpc_server: str) -> str:
    """What an rpc-server on an unused port says."""
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = int(chosen.getsockname()[1])
    command = [rpc_server, "-H", "127.0.0.1", "-p", str(port)]
    try:
        process = subprocess.Popen(  # noqa: S603 - the operator's program
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    except OSError as error:
        raise ConfigurationError(f"runtime.llama_rpc_server: {_why(rpc_server, error)}") from None
    with process:
        try:
            return _talked_into_its_banner(process, port)
        finally:
            process.kill()


def _talked_into_its_banner(process: "subprocess.Popen[bytes]", port: int) -> str:
    assert process.stdout is not None
    deadline, said, met = time.monotonic() + _LIMIT_S, b"", False
    while time.monotonic() < deadline and not _PROTOCOL.search(said.decode("utf-8", "replace")):
        if not met:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), 0.2).close()
                met = True
        if select.select([process.stdout], [], [], 0.02)[0]:
            piece = os.read(process.stdout.fileno(), 4_096)
            if not piece:
                break
            said += piece
    return said.decode("utf-8", "replace")


def _why(program: str, error: OSError | subprocess.TimeoutExpired) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{program} was not found on PATH; install llama.cpp built with RPC, or give the program's full path"
    if isinstance(error, subprocess.TimeoutExpired):
        return f"{program} did not answer within {_LIMIT_S:.0f} s"
    return f"{program} cannot be started ({error.strerror})"
