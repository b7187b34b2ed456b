"""What an addition needs in a second place is missed: by these tests, if nothing else needs it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import clusterctl
from clusterctl.cli.verbs import VERBS
from clusterctl.spec.job_options import OPTIONS, JobOption

ROOT = Path(__file__).parents[3]
# Verb -> its function, if it has another name.
NAMED = {"runs diff": "compare", "runs list": "list_runs", "runs show": "named_run"}
# Verbs for a person: they write a file, need a terminal, or act on machines without a job.
FOR_PEOPLE = {
    *(
        "init",
        "schema",
        "manual",
        "completion",
        "mcp",
        "agent limits",
        "agent log",
    ),
    *("attach", "detach", "list", "doctor", "where", "shell", "code", "runs rm"),
    *("image bake", "cache list", "cache prune", "orphans list", "orphans remove"),
    *("bundle", "storage list", "storage remove", "runs figure"),
    *(name for name in VERBS if name.startswith("node ")),
}


def test_each_verb_has_a_function_or_is_for_people() -> None:
    functions = {*clusterctl.__all__, *vars(clusterctl.Cluster), *vars(clusterctl.Job)}
    without = {name for name in VERBS if NAMED.get(name, name) not in functions}
    assert without == FOR_PEOPLE & VERBS.keys()


WITHOUT_FLAG = [one for one in OPTIONS.values() if not one.in_submit and not one.is_argument]


@pytest.mark.parametrize("option", WITHOUT_FLAG, ids=lambda option: option.name)
def test_each_key_of_a_job_without_a_flag_has_a_row_in_the_manual(option: JobOption) -> None:
    """The help of `submit` and docs/cli.md explain the others."""
    page = (ROOT / "docs" / "jobs.md").read_text(encoding="utf-8")
    assert f"\n| `{option.flag}" in page


def test_each_check_of_a_host_has_a_test() -> None:
    source = ast.parse((ROOT / "clusterctl" / "hosts" / "checks.py").read_text(encoding="utf-8"))
    codes = {
        node.args[2].value
        for node in ast.walk(source)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "Finding"
        and isinstance(node.args[2], ast.Constant)
    }
    assert len(codes) > 10
    tests = "".join(
        path.read_text(encoding="utf-8")
        for level in ("unit", "integration")
        for path in (ROOT / "tests" / level).rglob("test_*.py")
    )
    assert {code for code in codes if not re.search(rf'["`]{code}["`]', tests)} == set()
