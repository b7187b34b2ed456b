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
        "agent resume",
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


@pytest.mark.parametrize("option", OPTIONS.values(), ids=lambda option: option.name)
def test_each_option_of_a_job_has_a_row_in_the_manual(option: JobOption) -> None:
    page = (ROOT / "docs" / "jobs.md").read_text(encoding="utf-8")
    named = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| `")]
    row = re.compile(
        rf"`{re.escape(option.flag)}{'' if option.flag.endswith('=') else '(?![a-z-])'}"
    )
    assert option.is_argument or any(row.search(names) for names in named)


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
