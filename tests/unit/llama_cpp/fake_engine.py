"""A stand-in for llama.cpp's two programs: real processes, real sockets, no arithmetic.

``FAKE`` chooses a fault: ``drop`` (an endpoint is silently left out), ``misplace`` (other layer map), ``sigill`` (dies at the
first token, by an illegal instruction: the program ``ILLEGAL``), ``lose`` (says at the first token that an rpc-server went away, and aborts), ``worker-sigill`` (so does every
rpc-server by one), ``silent`` (never healthy). As rpc-server it accepts and reads. Starts are told in the file ``STARTS``.
"""

import http.server
import os
import signal
import socket
import sys
from pathlib import Path


def value(flag: str, default: str = "") -> str:
    return sys.argv[sys.argv.index(flag) + 1] if flag in sys.argv else default


def serve_rpc() -> None:
    listening = socket.create_server((value("-H"), int(value("-p"))))
    print("Starting RPC server v4.0.3", flush=True)
    while True:
        taken, _ = listening.accept()
        while said := taken.recv(65_536):
            if said == b"compute" and os.environ.get("FAKE") == "worker-sigill":
                os.execv(os.environ["ILLEGAL"], ["ggml-rpc-server"])
            taken.sendall(b"ok")
        taken.close()


def reachable(endpoint: str, word: bytes = b"hello") -> bool:
    host, _, port = endpoint.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), 5) as tried:
            tried.sendall(word)
            return tried.recv(2) == b"ok"
    except OSError:
        return False


def list_devices() -> None:
    endpoints = [each for each in value("--rpc").split(",") if reachable(each)]
    if os.environ.get("FAKE") == "drop":
        print("E Failed to connect to " + endpoints.pop())
    print("Available devices:")
    for index, endpoint in enumerate(endpoints):
        print(f"  RPC{index}: {endpoint} (1000 MiB, 900 MiB free)")


class Answers(http.server.BaseHTTPRequestHandler):
    key = ""

    def do_GET(self) -> None:
        self.send_response(503 if os.environ.get("FAKE") == "silent" else 200)
        self.end_headers()

    def do_POST(self) -> None:
        if self.headers.get("authorization") != f"Bearer {self.key}":
            self.send_response(401)
            self.end_headers()
            return
        if os.environ.get("FAKE") == "sigill":
            os.execv(os.environ["ILLEGAL"], ["llama-server"])
        if os.environ.get("FAKE") in {"lose", "worker-sigill"}:
            for endpoint in value("--rpc").split(","):
                reachable(endpoint, b"compute")
            print("ggml-rpc.cpp:498: Remote RPC server crashed or returned malformed response", flush=True)
            os.abort()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")


def serve_head() -> None:
    counts = [int(each) for each in value("-ts").split(",")] if value("-ts") else []
    names = [name for name, count in zip(value("--device").split(","), counts, strict=False) for _ in range(count)]
    if os.environ.get("FAKE") == "misplace":
        names[0] = names[-1]
    for layer, name in enumerate(names):
        print(f"0.01 D load_tensors: layer {layer:3} assigned to device {name}, is_swa = 0", flush=True)
    Answers.key = Path(value("--api-key-file")).read_text().strip()
    server = http.server.HTTPServer(("127.0.0.1", int(value("--port"))), Answers)
    print("0.02 I slot print_timing:        eval time =      50.00 ms /     4 tokens", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    if "STARTS" in os.environ:
        with Path(os.environ["STARTS"]).open("a") as starts:
            starts.write(" ".join(sys.argv[1:]) + "\n")
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as in the real programs
    if "--version" in sys.argv:
        print("version: 7 (abc123)")
    elif "--list-devices" in sys.argv:
        list_devices()
    elif "--rpc" in sys.argv or "-m" in sys.argv:
        serve_head()
    else:
        serve_rpc()
