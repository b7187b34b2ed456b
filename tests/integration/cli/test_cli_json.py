"""`-o json`: one object on stdout, always, from every verb that the program has."""

from __future__ import annotations

import json
from typing import Any

import pytest

from clusterctl.cli.main import app
from scripts.cli_reference import verbs
from tests.support.verbs import Clusterctl

# Verbs that answer without a cluster, and the keys of their answers.
ANSWERS: dict[str, tuple[list[str], set[str]]] = {
    "init": ([], {"file", "notes"}),
    "validate": ([], {"cluster", "provider", "nodes"}),
    "schema": ([], {"schema"}),
    "plan": (
        [],
        {
            "cluster",
            "provider",
            "changes",
            "kept",
            "affected_jobs",
            "affected_jobs_unknown",
            "cost",
            "notes",
            "tasks",
        },
    ),
    "list": ([], {"clusters", "storage"}),
    "storage list": ([], {"storage"}),
    "orphans list": ([], {"cluster", "provider", "orphans"}),
    "orphans remove": ([], {"cluster", "provider", "orphans"}),
    "agent limits": ([], {"file", "exists", "limits", "used"}),
    "agent log": ([], {"calls"}),
    "agent resume": ([], {"failed_in_a_row"}),
    "completion": (["bash"], {"shell", "script"}),
}
# Verbs that need one, and the words that they can't do without. What they answer: tests/e2e.
NEED_A_CLUSTER: dict[str, list[str]] = {
    "up": [],
    "down": ["--yes"],
    "status": [],
    "doctor": [],
    "submit": ["train"],
    "rehearse": ["train"],
    "replay": ["1"],
    "jobs": [],
    "logs": ["1"],
    "stacks": ["1"],
    "top": [],
    "code": ["1"],
    "cancel": ["1"],
    "wait": ["1"],
    "usage": [],
    "where": [],
    "collect": [],
    "put": ["cluster.yaml", "."],
    "get": ["x", "."],
    "ssh": ["--", "true"],
    "shell": ["--", "true"],
    "image bake": [],
    "invite": ["ada"],
    "storage remove": ["json"],
    "node drain": ["json-train-1", "--reason", "x"],
    **{
        f"node {verb}": ["json-train-1"]
        for verb in ("resume", "reboot", "add", "remove", "replace", "forget")
    },
}
# They look at, and remove, what other clusters share.
OF_THE_MACHINE = {
    "cache list",
    "cache prune",
}
OF_A_BUNDLE = {"bundle create", "bundle verify", "bundle show"}  # see test_bundle_verbs.py
OF_A_SITE = {"attach", "detach"}  # see test_cli_attach.py and test_attach.py
OF_RUNS = {"runs list", "runs show", "runs diff", "runs rm", "report"}  # see test_cli_find_runs.py
FAILURE = {"code", "cause", "host", "phase", "fix", "retryable"}
SPEC = "version: 1\nname: json\nprovider: {type: local}\npartitions:\n  - {name: train, nodes: 1}\n"
WRONG = SPEC.replace("nodes", "noodles")


def answer(cli: Clusterctl, *argv: str, rc: int) -> dict[str, Any]:
    out = cli(*argv, rc=rc).stdout
    assert out.count("\n") == 1, out
    found = json.loads(out)
    assert isinstance(found["ok"], bool)
    assert isinstance(found["failures"], list)
    return dict(found)


def test_json_answers_are_tested_for_every_verb() -> None:
    known = {" ".join(path) for path, _ in verbs(app)}
    assert (
        known
        == set(ANSWERS) | set(NEED_A_CLUSTER) | OF_THE_MACHINE | OF_A_BUNDLE | OF_A_SITE | OF_RUNS
    )


@pytest.mark.parametrize("verb", ANSWERS)
def test_answer_has_its_keys(cli: Clusterctl, verb: str) -> None:
    if verb != "init":
        (cli.cwd / "cluster.yaml").write_text(SPEC)
    words, keys = ANSWERS[verb]
    found = answer(cli, *verb.split(), *words, "-o", "json", rc=0)
    assert found["ok"]
    assert set(found) == {"ok", "failures"} | keys


@pytest.mark.parametrize("verb", NEED_A_CLUSTER)
def test_error_is_an_answer_too(cli: Clusterctl, verb: str) -> None:
    """`up` and `image bake` get a spec that they refuse; to the others, the cluster is not up."""
    (cli.cwd / "cluster.yaml").write_text(WRONG if verb == "up" else SPEC)
    found = answer(cli, "-o", "json", *verb.split(), *NEED_A_CLUSTER[verb], rc=2)
    assert not found["ok"]
    assert found["failures"]
    assert all(set(failure) == FAILURE for failure in found["failures"])
