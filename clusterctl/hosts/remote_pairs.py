"""Runs on every host at once: which ports of the others does TCP reach? Standard library, Python 3.9.

It listens on a port that the kernel chooses, and on those of its second argument that no program has. It
prints these ports, the first one first. Once all listen it is sent
'{"d-train-2": ["10.0.0.4", {"41234": true, "6818": false}]}': true if a program like this one listens there.
It connects to each port for some seconds, and prints for each host why its ports were not reached. It listens
until its stdin ends.
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
    errno.EINVAL: "its routes discard what is sent there",
    errno.ECONNREFUSED: "the connection is refused, though a program listens there",
}


def listeners(ports: list[int]) -> Iterator[socket.socket]:
    for port in (0, *ports):
        with suppress(OSError):  # a program has this port
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
    """None once the other answered; else why it did not until the deadline.

    greets: whether a program like this one listens there. If not, a refusal only says that no daemon does.
    """
    while True:
        try:
            with socket.create_connection((address, port), timeout=ATTEMPT_S) as connection:
                if not greets or connection.recv(len(GREETING)):
                    return None
                why = "the connection breaks"
        except socket.timeout:  # noqa: UP041  # another class before Python 3.10
            why = f"no answer within {ATTEMPT_S:g} s"
        except OSError as exc:
            if exc.errno == errno.ECONNREFUSED and not greets:
                return None
            why = WORDS.get(exc.errno or 0, exc.strerror or str(exc))
        if time.monotonic() > deadline:
            return why
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
            if why := future.result():
                unreached.setdefault(name, {})[port] = why
    print(json.dumps(unreached), flush=True)  # noqa: T201 - the answer
    sys.stdin.read()  # slower ones may still want to reach us
