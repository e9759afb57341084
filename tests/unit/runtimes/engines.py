"""Scriptable engines: real processes, small enough to start in milliseconds."""

import sys

PYTHON = (sys.executable, "-I", "-S", "-c")

LISTENER = """
import json, os, signal, socket, sys, time
arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
print("engine starts", flush=True)
if "--fork" in arguments:
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
if "--stubborn" in arguments:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "--file" in arguments:
    with open(arguments["--file"], "a") as file:
        file.write(json.dumps({"pid": os.getpid(), "arguments": sys.argv[1:], "environment": dict(os.environ)}) + chr(10))
time.sleep(float(arguments.get("--delay", 0)))
if arguments.get("--exit"):
    print("no such device", flush=True)
    sys.exit(int(arguments["--exit"]))
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.bind(("127.0.0.1", int(arguments["--port"])))
server.listen()
print("listening on", arguments["--port"], flush=True)
answers = 0
while True:
    connection, _ = server.accept()
    request = connection.recv(1000) if arguments.get("--http") else b""
    if request.startswith(b"GET /health "):
        answers += 1
        status = "200 OK" if answers > 2 else "503 Loading"
        print("answered", status, file=open(arguments["--http"], "a"), flush=True)
        connection.sendall(f"HTTP/1.1 {{status}}\\r\\nContent-Length: 0\\r\\nConnection: close\\r\\n\\r\\n".encode())
    if request.startswith(b"die"):
        os._exit(9)
    connection.close()
"""


def listener(*options: str) -> tuple[str, ...]:
    """A command whose engine listens on its port."""
    return (*PYTHON, LISTENER, "--port", "{port}", *options)
