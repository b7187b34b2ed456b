"""The helper does nothing more for a caller that has gone away."""

from __future__ import annotations

import subprocess
import sys

ASKS = """
import select, sys
from clusterctl.errors import ProvisionError
from clusterctl.providers.local import helper
sys.stdin.readline()
try:
    helper._refuse_to_go_on_alone()
    print("goes on", flush=True)
    select.select([0], [], [], 30)
    helper._refuse_to_go_on_alone()
except ProvisionError as exc:
    print(exc.why, flush=True)
"""


def test_it_notices_between_two_nodes() -> None:
    argv = [sys.executable, "-c", ASKS]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as helper:
        assert helper.stdin is not None
        assert helper.stdout is not None
        helper.stdin.write("{}\n")
        helper.stdin.flush()
        assert helper.stdout.readline() == "goes on\n"
        helper.stdin.close()
        assert helper.stdout.readline() == "clusterctl went away\n"
