"""What a command imports before it does anything, because each user waits for it at each call."""

from __future__ import annotations

import subprocess
import sys

import pytest

SLOW = {"ansible", "ansible_runner", "jinja2", "paramiko", "pydantic", "ssl", "yaml"}
LOADED = """
import sys
from clusterctl.cli.main import LazyVerb, app

for verb in {verbs!r}:
    LazyVerb(verb).load()
    app.main([verb, "--help"], "clusterctl", standalone_mode=False)
print(*sys.modules)
"""


@pytest.mark.parametrize(
    ("verbs", "more"),
    [
        (["status", "jobs", "logs", "wait", "cancel"], set()),
        # The options of jobs are models.
        (["submit"], {"pydantic"}),
    ],
)
def test_commands_about_jobs_import_no_slow_package(verbs: list[str], more: set[str]) -> None:
    argv = [sys.executable, "-c", LOADED.format(verbs=verbs)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert set(done.stdout.splitlines()[-1].split()) & SLOW <= more
