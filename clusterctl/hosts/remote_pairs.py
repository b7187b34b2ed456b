"""Tests which ports of other hosts can be reached over TCP. Runs on all hosts at once (Python 3.9).

The program listens on a port that the kernel chooses, and on ports in its second argument that are
free. It prints these ports in this order. When all hosts listen, it reads the other hosts' ports
from stdin as in '{"d-train-2": ["10.0.0.4", {"41234": true, "6818": false}]}'. True: this program
listens on that port of the other host. It tries each port for some seconds, prints the causes of
failures by host and port, and listens until stdin ends.
"""

from __future__ import annotations

import errno
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

GREETING = b"clusterctl\n"
ATTEMPT_S = 2.0
PAUSE_S = 0.2
CONCURRENT = 64
WORDS = {
    errno.EINVAL: "its routes discard packets to that address",
    errno.ECONNREFUSED: "the connection is refused although a program listens on the port",
}


def listeners(ports: list[int]) -> Iterator[socket.socket]:
    for port in (0, *ports):
        # Another program may have this port.
        with suppress(OSError):
            yield socket.create_server(("0.0.0.0", port), backlog=256)  # noqa: S104


def answer(server: socket.socket) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        with connection:
            try:
                connection.sendall(GREETING)
            except OSError:
                continue


def reach(address: str, port: int, greets: bool, deadline: float) -> str | None:
    """Try to connect to another host until the deadline. Return the last error, unless the host
    answers.

    greets: this test program listens on that port. If not, a refused connection counts as an
        answer.
    """
    while True:
        try:
            with socket.create_connection((address, port), timeout=ATTEMPT_S) as connection:
                if not greets or connection.recv(len(GREETING)):
                    return None
                reason = "the connection was closed"
        except socket.timeout:
            reason = f"no answer within {ATTEMPT_S:g} s"
        except OSError as exc:
            if exc.errno == errno.ECONNREFUSED and not greets:
                return None
            reason = WORDS.get(exc.errno or 0, exc.strerror or str(exc))
        if time.monotonic() > deadline:
            return reason
        time.sleep(PAUSE_S)


def main(seconds: str, ports: str) -> None:
    servers = list(listeners(json.loads(ports)))
    for server in servers:
        threading.Thread(target=answer, args=(server,), daemon=True).start()
    listening = [server.getsockname()[1] for server in servers]
    print(json.dumps(listening), flush=True)  # noqa: T201 - the answer
    peers = json.loads(sys.stdin.readline() or "{}")
    deadline = time.monotonic() + float(seconds)
    with ThreadPoolExecutor(max_workers=CONCURRENT) as pool:
        asking = {
            (name, port): pool.submit(reach, address, int(port), greets, deadline)
            for name, (address, ports_there) in peers.items()
            for port, greets in ports_there.items()
        }
        unreached: dict[str, dict[str, str]] = {}
        for (name, port), future in asking.items():
            if reason := future.result():
                unreached.setdefault(name, {})[port] = reason
    print(json.dumps(unreached), flush=True)  # noqa: T201 - the answer
    # Slower hosts may still connect.
    sys.stdin.read()
