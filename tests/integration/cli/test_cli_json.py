"""`-o json`: one object on stdout, always, from every verb that the program has."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clusterctl.cli.main import app
from clusterctl.cli.options import COMMON, command
from clusterctl.cli.output import Screen, Terminated
from scripts.cli_reference import verbs
from tests.support.messages import condition
from tests.support.processes import eventually, until_it_sleeps
from tests.support.verbs import Clusterctl

# Verbs that answer without a cluster, and the words that they can't do without.
ANSWERS: dict[str, list[str]] = {
    "init": [],
    "validate": [],
    "schema": [],
    "manual": [],
    "plan": [],
    "list": [],
    "storage list": [],
    "orphans list": [],
    "orphans remove": [],
    "completion": ["bash"],
    "agent limits": [],
    "agent log": [],
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
OF_A_BUNDLE = {"bundle"}  # see test_onprem.py
OF_AGENTS = {"mcp"}  # see test_mcp_server.py
OF_A_SITE = {"attach", "detach"}  # see test_cli_attach.py and test_attach.py
OF_RUNS = {
    "runs list",
    "runs show",
    "runs diff",
    "runs figure",
    "runs rm",
    "report",
}  # see test_cli_find_runs.py
FAILURE = {"code", "about", "cause", "host", "phase", "fix", "retryable"}
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
        == set(ANSWERS)
        | set(NEED_A_CLUSTER)
        | OF_THE_MACHINE
        | OF_A_BUNDLE
        | OF_A_SITE
        | OF_RUNS
        | OF_AGENTS
    )


@pytest.mark.parametrize("verb", ANSWERS)
def test_verb_answers(cli: Clusterctl, verb: str) -> None:
    """The keys of the answer are held to docs/json.md, as those of all answers."""
    if verb != "init":
        (cli.cwd / "cluster.yaml").write_text(SPEC)
    assert answer(cli, *verb.split(), *ANSWERS[verb], "-o", "json", rc=0)["ok"]


@pytest.mark.parametrize("verb", NEED_A_CLUSTER)
def test_error_is_an_answer_too(cli: Clusterctl, verb: str) -> None:
    """`up` and `image bake` get a spec that they refuse; to the others, the cluster is not up."""
    (cli.cwd / "cluster.yaml").write_text(WRONG if verb == "up" else SPEC)
    found = answer(cli, "-o", "json", *verb.split(), *NEED_A_CLUSTER[verb], rc=2)
    assert not found["ok"]
    assert found["failures"]
    assert all(set(failure) == FAILURE for failure in found["failures"])


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("-o", "json"), "option-invalid/command-line"),
        (("node", "drain", "-vojson"), "option-invalid/command-line"),
        (("-vo", "json", "launch"), "option-invalid/command-line"),
        (("-ojson", "submit"), "option-invalid/command-line"),
        (("--output=json", "jobs", "--bad"), "option-invalid/command-line"),
        (("-o", "json", "submit", "train", "--nodes", "x"), "option-invalid/command-line"),
        (("cancel", "--output", "json"), "option-invalid/command-line"),
        (("-o", "json", "--file"), "option-invalid/command-line"),
        (("submit", "train", "x", "-o", "json"), "option-invalid/program-arguments"),
    ],
)
def test_wrong_command_line_is_answered(cli: Clusterctl, words: tuple[str, ...], code: str) -> None:
    (failure,) = answer(cli, *words, rc=2)["failures"]
    assert set(failure) == FAILURE
    assert condition(failure) == code


def answer_of(program: Callable[[Screen], None], capsys: pytest.CaptureFixture[str]) -> Any:
    """Return (exit code, answer) of a verb that runs this program."""
    given = {**dict.fromkeys(COMMON), "output": "json"}
    code = command("other", program).main([], standalone_mode=False, obj=given)
    out = capsys.readouterr().out
    assert out.count("\n") == 1, out
    return code, json.loads(out)


@pytest.mark.parametrize(
    ("ending", "expected"),
    [
        (KeyboardInterrupt(), (130, "interrupted")),
        (Terminated.by(signal.SIGTERM), (128 + signal.SIGTERM, "interrupted/terminated")),
        (KeyError("x"), (1, "internal")),
    ],
    ids=repr,
)
def test_every_end_is_one_answer_with_what_is_known(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    ending: BaseException,
    expected: tuple[int, str],
) -> None:
    monkeypatch.setenv("CLUSTERCTL_HOME", str(tmp_path))

    def end(screen: Screen) -> None:
        screen.partial_answer = {"runs": ["a"]}
        raise ending

    code, output = answer_of(end, capsys)
    assert not output["ok"]
    assert output["runs"] == ["a"]
    (failure,) = output["failures"]
    assert set(failure) == FAILURE
    assert (code, condition(failure)) == expected


def test_end_after_the_answer_prints_no_second_one(capsys: pytest.CaptureFixture[str]) -> None:
    def end(screen: Screen) -> None:
        screen.result({"runs": []})
        raise KeyboardInterrupt

    assert answer_of(end, capsys) == (130, {"ok": True, "failures": [], "runs": []})


def test_numbers_that_json_lacks_are_null(capsys: pytest.CaptureFixture[str]) -> None:
    values = [1.5, math.nan, {"x": -math.inf}]
    _, output = answer_of(lambda screen: screen.result({"values": values}), capsys)
    assert output["values"] == [1.5, None, {"x": None}]


def _opened(pipe: Path) -> int:
    """Return a descriptor for writing to the pipe, 0 while it has no reader."""
    try:
        return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError as exc:
        if exc.errno != errno.ENXIO:
            raise
        return 0


def test_signal_ends_a_verb_with_an_answer(cli: Clusterctl) -> None:
    """Before a verb runs, too: here while it reads a spec that never comes."""
    pipe = cli.cwd / "cluster.yaml"
    os.mkfifo(pipe)
    running = cli.start("-o", "json", "validate", "-f", "cluster.yaml")
    writer = eventually(lambda: _opened(pipe))
    with os.fdopen(writer, "w"):
        until_it_sleeps(running.pid)
        running.send_signal(signal.SIGTERM)
        out, _ = running.communicate(timeout=60)
    assert running.returncode == 128 + signal.SIGTERM
    assert [condition(failure) for failure in json.loads(out)["failures"]] == [
        "interrupted/terminated"
    ]
