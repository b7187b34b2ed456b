"""Every command heeds the options that choose a cluster, or refuses them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest

from clusterctl.cli.main import PROGRAM, app
from clusterctl.cli.verbs import VERBS
from clusterctl.state.ledger import RUNS
from tests.support.messages import condition
from tests.unit.runs.made import made_run

# The words that a command needs.
WORDS = {
    "submit": ["probe"],
    "wait": ["1"],
    "cancel": ["1"],
    "rehearse": ["train"],
    "runs show": ["1"],
    "runs diff": ["1", "2"],
    "runs figure": ["loss", "1"],
    "runs rm": ["1", "--yes"],
    "report": ["1"],
    "replay": ["1"],
    "node drain": ["n", "--reason", "x"],
    "node resume": ["n"],
    "node reboot": ["n"],
    "node remove": ["n"],
    "node forget": ["n"],
    "node add": ["n"],
    "node replace": ["n"],
    "shell": ["true"],
    "code": ["1"],
    "put": ["x"],
    "get": ["x"],
    "storage remove": ["x"],
    "completion": ["bash"],
    "down": ["--yes"],
    "bundle": ["--out", "x"],
    "cache prune": ["--images"],
}
# More modes of commands: the options count in each.
MODES = {
    "collected usage": ["usage", "--runs"],
    "stacks": ["logs", "--stacks", "1"],
    "ranking": ["runs", "list", "--sweep", "1"],
    "dry run": ["submit", "probe", "--dry-run"],
    "earlier run": ["submit", "train", "--from-run", "1", "--dry-run"],
    "planned removal": ["down", "--dry-run"],
    "run at a path": ["runs", "show", "demo-1-train"],
    "everything": ["collect", "--all"],
}
# `mcp` has no answer but its protocol.
CASES = {
    words: [*words.split(), *WORDS.get(words, [])] for words in VERBS if words != "mcp"
} | MODES
# `init` writes the file. The others also tell of clusters that no longer exist.
NOT_READ = {
    "init": "file",
    "runs list": "cluster",
    "collected usage": "cluster",
    "orphans list": "cluster",
    "orphans remove": "cluster",
}
# Modes of commands in which the options mean nothing.
NO_MODE = {
    "init": ["--examples"],
    "attach": ["me@login"],
    "cache prune": [],
}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLUSTERCTL_HOME", str(tmp_path / "state"))
    Path("x").touch()
    made_run(RUNS, 1)
    made_run(RUNS, 2)


def failure_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> Any:
    """The condition of the failure of a command; None: it succeeded."""
    try:
        code = app(["-o", "json", *words], prog_name=PROGRAM, standalone_mode=False)
    except click.NoSuchOption:
        return "no such option"
    if code in {None, 0}:
        return None
    (failure,) = json.loads(capsys.readouterr().out)["failures"]
    return condition(failure)


@pytest.mark.parametrize("case", CASES)
def test_choice_of_a_cluster_counts_or_is_refused(
    case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = CASES[case]
    without = VERBS[case].without if case in VERBS else ()
    for name, option, found in (
        ("file", ["--file", "missing.yaml"], {"not-found/file", "file-invalid/cluster-name"}),
        # A run of another cluster is refused, or the cluster is not known.
        (
            "cluster",
            ["--cluster", "nowhere"],
            {
                "not-found/cluster",
                "not-found/run-of-cluster",
                "not-found/collected-run",
                "not-found/name",
                "not-up",
            },
        ),
    ):
        if NOT_READ.get(case) == name:
            continue
        before = failure_of([*option, *words], capsys)
        after = failure_of([*words, *option], capsys)
        if name in without:
            assert (before, after) == ("option-invalid/option-unused", "no such option")
        else:
            assert before in found, (case, option, before)
            assert after == before


@pytest.mark.parametrize("words", NO_MODE)
def test_mode_that_chooses_no_cluster_refuses_the_options(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for option in (["-f", "missing.yaml"], ["--cluster", "nowhere"]):
        if words == "init" and option[0] == "--cluster":
            continue
        failure = failure_of([*option, *words.split(), *NO_MODE[words]], capsys)
        assert failure in {"options-exclusive", "option-invalid/option-missing"}, option
