"""What a verb imports before it does anything: each of these would be felt at every call."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from clusterctl.scheduler.session import Session

SLOW = (
    "ansible_runner",
    "asyncio",
    "invoke",
    "jinja2",
    "ruamel.yaml",
    "paramiko",
    "pathspec",
    "pydantic",
)


@cache
def imported(module: str) -> list[str]:
    code = f"import sys, clusterctl.cli.run, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.parametrize(
    ("module", "needs"),
    [
        ("clusterctl.cli.run", set()),
        ("clusterctl.spec", {"pydantic"}),
        ("clusterctl.providers.local.helper", {"pydantic"}),
        ("clusterctl.transport.ssh", set()),
        ("clusterctl.scheduler.session", set()),
        ("clusterctl.scheduler.diagnosis", set()),
        ("clusterctl.cli.jobs", set()),
        ("clusterctl.cli.files", set()),
        ("clusterctl.cli.collect", {"pydantic"}),
        ("clusterctl.runs.record", {"pydantic"}),
        ("clusterctl.jobs.watch", set()),
        ("clusterctl.cli.submit", set()),
        ("clusterctl.cli.up", {"jinja2", "pydantic", "ruamel.yaml"}),
        ("clusterctl.jobs", {"pydantic", "ruamel.yaml"}),
    ],
)
def test_nothing_slow_is_imported_without_need(module: str, needs: set[str]) -> None:
    assert set(imported(module)) & set(SLOW) <= needs


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("-o json --cluster none -f none.yaml completion bash", '"shell": "bash"'),
        ("--help", "Usage: clusterctl"),
    ],
)
def test_parsing_and_help_do_not_import_pydantic(words: str, told: str) -> None:
    argv = ["clusterctl", *words.split()]
    code = (
        f"import sys; sys.argv = {argv}; from clusterctl.cli.run import run; run(); "
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    answer, modules = done.stdout.rsplit("\n", 2)[:2]
    assert told in answer
    assert not {*SLOW, "cryptography", "rich", "yaml"} & set(modules.split())


SUBMITS = """
import sys
from clusterctl.cli.run import run
from clusterctl.transport import ssh
from tests.support.here import LocalTransport

ssh.SSHTransport = lambda *_, **__: LocalTransport()
sys.argv = ["clusterctl", "-o", "json", "submit", *{words}]
assert run() == 0
print(*sys.modules)
"""


@pytest.mark.parametrize(
    "words", [[], ["-N", "2", "--time", "5", "--mem", "1G", "--", "--lr", "0.1"]]
)
def test_submit_reads_no_model(here: Session, words: list[str]) -> None:
    """A spec file is read as a model only when its text is new."""
    del here
    Path("job.sh").write_text("#!/bin/bash\ntrue\n")
    repository = Path(__file__).resolve().parents[3]
    variables = {**os.environ, "PYTHONPATH": str(repository)}
    argv = [sys.executable, "-c", SUBMITS.format(words=["job.sh", *words])]
    for _ in range(2):
        done = subprocess.run(argv, capture_output=True, text=True, check=True, env=variables)
    answer, modules = done.stdout.splitlines()
    assert json.loads(answer)["job_id"]
    assert set(modules.split()) & set(SLOW) <= {"jinja2"}
