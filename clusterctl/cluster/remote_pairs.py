"""Runs on every node at once: which of the others does a TCP connection reach? Standard library, Python 3.9.

It listens, and prints its port, its load and its number of CPUs. Once all listen it is sent
'{"d-train-2": ["10.0.0.4", 41234]}', connects to each of them for some seconds, and prints for each one that
was not reached why. It listens until its stdin ends.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

GREETING = b"clusterctl\n"
ATTEMPT_S = 2.0
PAUSE_S = 0.2
CONCURRENT = 64
WORDS = {
    errno.EINVAL: "its routes discard what is sent there",
    errno.ECONNREFUSED: "the connection is refused, though a program listens there",
}


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


def reach(address: str, port: int, deadline: float) -> str | None:
    """None once the other answered; else why it did not until the deadline."""
    while True:
        try:
            with socket.create_connection((address, port), timeout=ATTEMPT_S) as connection:
                if connection.recv(len(GREETING)):
                    return None
                why = "the connection breaks"
        except socket.timeout:  # noqa: UP041  # another class before Python 3.10
            why = f"no answer within {ATTEMPT_S:g} s"
        except OSError as exc:
            why = WORDS.get(exc.errno or 0, exc.strerror or str(exc))
        if time.monotonic() > deadline:
            return why
        time.sleep(PAUSE_S)


def main(seconds: str) -> None:
    server = socket.create_server(("0.0.0.0", 0), backlog=256)  # noqa: S104
    threading.Thread(target=answer, args=(server,), daemon=True).start()
    print(json.dumps([server.getsockname()[1], os.getloadavg()[0], os.cpu_count() or 1]), flush=True)  # noqa: T201 - the answer
    peers = json.loads(sys.stdin.readline() or "{}")
    deadline = time.monotonic() + float(seconds)
    with ThreadPoolExecutor(max_workers=CONCURRENT) as pool:
        asking = {
            name: pool.submit(reach, address, port, deadline) for name, (address, port) in peers.items()
        }
        unreached = {name: future.result() for name, future in asking.items()}
    print(json.dumps({name: why for name, why in unreached.items() if why}), flush=True)  # noqa: T201 - the answer
    sys.stdin.read()  # slower ones may still want to reach us
