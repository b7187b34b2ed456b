"""Carry out a call of an agent that costs or destroys. Called as: agent_carry.py CALL WORD...

It is a process of its own, so that a killed server neither stops it nor leaves unknown how it ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from clusterctl.agent.journal import Journal
from clusterctl.cli.agent_program import Program, write_end
from clusterctl.errors import ClusterctlError


def main(call: str, *words: str) -> int:
    """Run clusterctl with these words, write how the call ended, and print the answer."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        # Whoever ends the server must not end a submission in its middle.
        signal.signal(number, signal.SIG_IGN)
    started_at = time.monotonic()
    answer = Program(words, Path.cwd(), os.environ).run(_note)
    with suppress(ClusterctlError):
        # The server tries again, and tells the agent if the disk is full.
        write_end(Journal(), call, answer, seconds=time.monotonic() - started_at)
    # The server may be gone.
    with suppress(OSError):
        print(json.dumps(answer.body), flush=True)
    return answer.rc


def _note(line: str) -> None:
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    # Not by the interpreter's end, which would report that stdout is closed.
    os._exit(code)
