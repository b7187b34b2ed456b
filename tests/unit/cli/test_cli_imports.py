"""What a verb imports before it does anything: each of these would be felt at every call."""

from __future__ import annotations

import subprocess
import sys

import pytest

SLOW = ("ansible_runner", "asyncio", "invoke", "jinja2", "ruamel.yaml", "paramiko", "pydantic")


def imported(module: str) -> set[str]:
    code = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split()) & set(SLOW)


@pytest.mark.parametrize(
    ("module", "needs"),
    [
        ("clusterctl.cli.run", set()),
        ("clusterctl.spec", {"pydantic"}),
        ("clusterctl.providers.local.helper", {"pydantic"}),
        ("clusterctl.transport.ssh", {"paramiko"}),
        ("clusterctl.scheduler.session", {"paramiko", "pydantic", "ruamel.yaml"}),
        ("clusterctl.jobs", {"paramiko", "pydantic", "ruamel.yaml"}),
    ],
)
def test_nothing_slow_is_imported_without_need(module: str, needs: set[str]) -> None:
    assert imported(module) <= needs
