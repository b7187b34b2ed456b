"""What a verb imports before it does anything: each of these would be felt at every call."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SLOW = ("ansible_runner", "asyncio", "invoke", "jinja2", "ruamel.yaml", "paramiko", "pathspec", "pydantic")


def imported(*modules: str) -> list[str]:
    code = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.parametrize(
    ("module", "needs"),
    [
        ("clusterctl.cli.run", set()),
        ("clusterctl.spec", {"pydantic"}),
        ("clusterctl.providers.local.helper", {"pydantic"}),
        ("clusterctl.transport.ssh", {"paramiko"}),
        ("clusterctl.transport.connections", set()),
        ("clusterctl.scheduler.session", set()),
        ("clusterctl.cli.status", set()),
        ("clusterctl.scheduler.diagnosis", set()),
        ("clusterctl.cli.jobs", set()),
        ("clusterctl.cli.files", set()),
        ("clusterctl.jobs.watch", set()),
        ("clusterctl.cli.submit", {"pydantic", "ruamel.yaml"}),
        ("clusterctl.jobs", {"paramiko", "pydantic", "ruamel.yaml"}),
    ],
)
def test_nothing_slow_is_imported_without_need(module: str, needs: set[str]) -> None:
    assert set(imported(module)) & set(SLOW) <= needs


@pytest.mark.parametrize(
    ("verbs", "most"),
    [
        ("up", 100),
        ("submit", 65),
        ("replay", 75),
        ("collect", 55),
        ("job", 40),
        ("files", 30),
        ("jobs", 20),
        ("status", 35),
        ("run", 15),
    ],
)
def test_a_verb_imports_a_small_part_of_clusterctl(verbs: str, most: int) -> None:
    ours = [
        name
        for name in imported("clusterctl.cli.run", f"clusterctl.cli.{verbs}")
        if name.startswith("clusterctl")
    ]
    assert len(ours) <= most, "\n".join(sorted(ours))


def test_the_words_of_a_verb_are_read_without_pydantic() -> None:
    words = ["clusterctl", "-o", "json", "--cluster", "none", "-f", "none.yaml", "completion", "bash"]
    code = f"import sys; sys.argv = {words}; from clusterctl.cli.run import run; run(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    answer, modules = done.stdout.splitlines()
    assert json.loads(answer)["shell"] == "bash"
    assert not {"pydantic", "rich"} & set(modules.split())
