"""Tries ports of other hosts over TCP. Runs on a host (Python 3.9).

The argument names hosts with their addresses and ports, as in '{"d-train-2": ["10.0.0.4", [6818]]}'.
Each port is tried for some seconds, because daemons may be starting. The program prints the causes
of failures by host and port.
"""

from __future__ import annotations

import errno
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

TRY_S = 6.0
ATTEMPT_S = 2.0
PAUSE_S = 0.2
CONCURRENT = 64
WORDS = {errno.EINVAL: "its routes discard packets to that address"}


def reach(address: str, port: int, deadline: float) -> str:
    """Try to connect until the deadline. Return the last error, or "" if the host answers."""
    while True:
        try:
            with socket.create_connection((address, port), timeout=ATTEMPT_S):
                return ""
        except socket.timeout:
            reason = f"no answer within {ATTEMPT_S:g} s"
        except OSError as exc:
            reason = WORDS.get(exc.errno or 0, exc.strerror or str(exc))
        if time.monotonic() > deadline:
            return reason
        time.sleep(PAUSE_S)


def main(targets: str) -> None:
    deadline = time.monotonic() + TRY_S
    with ThreadPoolExecutor(max_workers=CONCURRENT) as pool:
        asking = {
            (host, port): pool.submit(reach, address, port, deadline)
            for host, (address, ports) in json.loads(targets).items()
            for port in ports
        }
        unreached: dict[str, dict[int, str]] = {}
        for (host, port), future in asking.items():
            if reason := future.result():
                unreached.setdefault(host, {})[port] = reason
    print(json.dumps(unreached), flush=True)  # noqa: T201 - the answer
