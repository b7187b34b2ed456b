"""The files that a command of an agent opens: refused where they are opened, whatever names them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from clusterctl.cli import submit as submit_verb
from clusterctl.cli.agent_tools import limits_of_user
from clusterctl.cli.output import Screen
from clusterctl.jobs.submit import Submitter
from clusterctl.state.workspace import Workspace
from clusterctl.util.confine import VARIABLE, LimitError
from tests.integration.cli.conftest import Answer as Verb
from tests.support.agent_project import Project
from tests.support.messages import refused

SPEC = "version: 1\nname: other\nprovider: {type: local}\npartitions: [{name: train, nodes: 1}]\n"


@pytest.fixture
def outside(project: Project, tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    (folder / "run").mkdir(parents=True)
    (folder / "secret").write_text("hunter2\n")
    (folder / "table.csv").write_text("lr\n1\n")
    (folder / "cluster.yaml").write_text(SPEC)
    (project.folder / "train.py").write_text("print('hello')\n")
    project.limit(verbs_off=[])
    return folder


def call(project: Project, verb: str, arguments: dict[str, Any]) -> str:
    """Return the code of a call's answer, or the limit that forbids the call. The answer never has
    what the files outside have.
    """
    answer = project.calls.call(verb, arguments)
    assert "hunter2" not in json.dumps(answer.body)
    return str(answer.body["limit"]["name"]) if answer.code == "agent-limit" else answer.code


@pytest.mark.parametrize(
    ("verb", "arguments"),
    [
        ("submit", {"target": "OUT/secret"}),
        ("submit", {"target": "../outside/secret"}),
        ("submit", {"target": "link.py"}),
        ("submit", {"target": "~/.ssh/id_ed25519"}),
        ("submit", {"target": "train.py", "folder": ".."}),
        ("submit", {"target": "linked/train.py", "folder": "linked"}),
        ("submit", {"target": "train.py", "requirements": "OUT/secret[dev]"}),
        ("submit", {"target": "train.py", "secret": ["TOKEN=OUT/secret"]}),
        ("submit", {"target": "train.py", "container": "OUT/secret"}),
        ("submit", {"target": "train.py", "sweep": ["OUT/table.csv"]}),
        ("submit", {"target": "train.py", "from_run": "OUT/run"}),
        ("submit", {"target": "eval", "run": "OUT/run"}),
        ("submit", {"target": "OUT/job.yaml"}),
        ("submit", {"target": "secret-file.yaml"}),
        ("submit", {"target": "variant.yaml"}),
        ("submit", {"target": "list.yaml"}),
        ("submit", {"target": "sub/sends.py"}),
        ("where", {"target": "OUT/secret"}),
        ("replay", {"run": "OUT/run"}),
        ("report", {"run": ["OUT/run"]}),
        ("runs show", {"run": "OUT/run"}),
        # Below the folder of runs.
        ("runs show", {"run": "../../outside/run"}),
        ("runs show", {"run": "linked-run"}),
        ("runs show", {"run": ".."}),
        ("collect", {"out": "OUT"}),
        ("collect", {"out": "linked"}),
        ("down", {"out": "OUT"}),
        ("get", {"paths": ["x", "OUT"]}),
        ("get", {"paths": ["x", "CONFIG"]}),
        ("get", {"paths": ["x", ".git/hooks"]}),
        ("get", {"paths": ["x", ".mcp.json"]}),
        ("get", {"paths": ["x", "sub/../.claude/settings.json"]}),
        ("get", {"paths": ["x", "cluster.yaml"]}),
        ("get", {"paths": [".envrc"]}),
        ("get", {"paths": ["folder"]}),
        ("collect", {"out": ".vscode"}),
        ("get", {"paths": ["x", "STATE/.agent"]}),
        ("put", {"paths": ["OUT/secret", "data"]}),
        ("put", {"paths": ["STATE"]}),
        ("up", {"file": "OUT/cluster.yaml"}),
        ("validate", {"file": "OUT/cluster.yaml"}),
        ("validate", {"file": "/etc/passwd"}),
    ],
)
def test_file_outside_is_neither_read_nor_written(
    project: Project, outside: Path, verb: str, arguments: dict[str, Any]
) -> None:
    folder = project.folder
    (folder / "link.py").symlink_to(outside / "secret")
    (folder / "linked").symlink_to(outside)
    (outside / "train.py").write_text("print('hello')\n")
    for name, text in {
        "secret-file.yaml": f"job: train\nsecret: [T={outside}/secret]\n",
        "variant.yaml": "job: train.py\nvariants: {a: {requirements: ../outside/secret}}\n",
        "list.yaml": "job: train\nsweep: {list: ../outside/table.csv}\n",
    }.items():
        (folder / name).write_text(text)
    (folder / "runs").mkdir()
    (folder / "runs" / "linked-run").symlink_to(outside / "run")
    (folder / "sub").mkdir()
    (folder / "sub" / "sends.py").write_text("open('data')\n")
    (folder / "sub" / "data").symlink_to(outside / "secret")
    home = project.cluster.home
    (home / "x").write_text("new")
    (home / ".envrc").write_text("new")
    (home / "folder" / ".vscode").mkdir(parents=True)
    (home / "folder" / ".vscode" / "settings.json").write_text("{}")
    before = _names(folder, outside)
    text = json.dumps(arguments).replace("OUT", str(outside))
    text = text.replace("CONFIG", str(project.config)).replace("STATE", str(project.state))
    assert call(project, verb, json.loads(text)) == "folders"
    assert _names(folder, outside) == before


def _names(*folders: Path) -> set[str]:
    walks = [walk for root in folders for walk in os.walk(root)]
    return {os.path.join(top, name) for top, _, names in walks for name in names}


@pytest.mark.parametrize(
    "line",
    [
        "-r ../outside/secret",
        "-cOUT/secret",
        "-r more.txt",
        "--find-links ../outside",
        "-e ../outside",
        "tool @ file://OUT/tool-1-py3-none-any.whl",
        "tool@file:OUT/%74ool.tar.gz",
        "../outside/tool-1.tar.gz",
    ],
)
@pytest.mark.parametrize("name", ["requirements.txt", "own.txt"])
def test_list_of_packages_that_names_files_outside_is_refused(
    project: Project, outside: Path, name: str, line: str
) -> None:
    """Also the list that is found beside the program."""
    (project.folder / name).write_text(line.replace("OUT", str(outside)) + "\n")
    (project.folder / "more.txt").write_text("numpy\n-r ../outside/secret\n")
    given = {"requirements": name} if name == "own.txt" else {}
    assert call(project, "submit", {"target": "train.py", **given}) == "folders"


@pytest.mark.parametrize("verb", ["validate", "plan", "up"])
@pytest.mark.parametrize("packages", ["../outside/secret", "inside.txt"])
def test_spec_whose_list_of_packages_is_outside_is_refused(
    project: Project, outside: Path, verb: str, packages: str
) -> None:
    text = f"{SPEC}software: {{python: {{requirements: {packages}}}}}\n"
    (project.folder / "other.yaml").write_text(text)
    (project.folder / "inside.txt").write_text("-r ../outside/secret\n")
    assert call(project, verb, {"file": "other.yaml"}) == "folders"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "pyproject.toml",
            "[project]\nname='a'\nversion='1'\ndependencies=['t @ file://OUT/t.whl']\n",
        ),
        (
            "pyproject.toml",
            "[project]\nname='a'\nversion='1'\ndependencies=['t']\n"
            "[tool.uv.sources]\nt={path='../outside'}\n",
        ),
        (
            "pyproject.toml",
            "[project]\nname='a'\nversion='1'\ndynamic=['dependencies']\n"
            "[tool.setuptools.dynamic]\ndependencies={file=['../outside/secret']}\n",
        ),
        (
            "uv.lock",
            "version=1\n[[package]]\nname='t'\nversion='1'\nsource={directory='../outside'}\n",
        ),
        ("pylock.toml", "[[packages]]\nname='t'\narchive={path='../outside/t.tar.gz'}\n"),
        ("train.py", "# /// script\n# dependencies = ['t @ file://OUT/t.whl']\n# ///\n"),
    ],
)
def test_project_file_that_names_files_outside_is_refused(
    project: Project, outside: Path, name: str, text: str
) -> None:
    (project.folder / name).write_text(text.replace("OUT", str(outside)))
    given = {"target": "train.py", "requirements": name}
    assert call(project, "submit", given) == "folders"


def test_list_of_packages_inside_the_project_is_used(project: Project, outside: Path) -> None:
    """What is wrong with it is pip's to say."""
    folder = project.folder
    (folder / "requirements.txt").write_text("-r more.txt\n--find-links wheels\n")
    (folder / "more.txt").write_text("-r requirements.txt\n--no-index\nno-such-package-there\n")
    given = {"target": "train.py", "time": "5m", "dry_run": True}
    assert call(project, "submit", given) not in {"ok", "folders"}


def test_files_are_looked_at_as_the_command_reads_the_job(project: Project, outside: Path) -> None:
    """The options of the call belong to the job: without them this job file could not be read."""
    (project.folder / "job.yaml").write_text(
        "job: train.py\nfolder: .\nscaling: {nodes: [1, 2], weak: true}\n"
        "sweep: {grid: {global_batch_size: [8, 16]}}\n"
    )
    (project.folder / "data").symlink_to(outside / "secret")
    assert call(project, "submit", {"target": "job.yaml", "sweep": ["lr=1,2"]}) == "folders"


def test_folder_that_the_user_adds_may_be_used(project: Project, outside: Path) -> None:
    project.limit(folders=[str(outside)])
    assert call(project, "put", {"paths": [f"{outside}/secret", "data"]}) == "ok"
    assert (project.cluster.home / "data" / "secret").read_text() == "hunter2\n"


def test_folder_that_the_user_adds_does_not_open_the_limits_and_the_journal(
    project: Project, outside: Path
) -> None:
    root = outside.parent
    project.limit(folders=[str(root)])
    (project.cluster.home / "x").write_text("new")
    for path in (project.config, project.config.parent, project.state / ".agent", root):
        assert call(project, "get", {"paths": ["x", str(path)]}) == "folders"


def test_collect_leaves_what_programs_obey_on_the_cluster(project: Project, answer: Verb) -> None:
    """The user gets it with a command of their own."""
    body = "mkdir -p sub/.vscode\necho x >sub/.vscode/settings.json; echo x >.envrc; echo x >result"
    given = {"target": project.script("job.sh", body), "time": "5m"}
    assert project.calls.call("submit", given).code == "ok"
    assert project.calls.call("wait", {"ids": ["1"]}).code == "ok"
    collected = project.calls.call("collect", {})
    assert collected.code == "ok"
    (run,) = (Path(row["dir"]) for row in collected.body["runs"])
    assert (run / "result").read_text() == "x\n"
    assert not [path for path in run.rglob("*") if path.name in {".envrc", ".vscode"}]
    reasons = {row["path"] for row in json.loads((run / "run.json").read_text())["skipped"]}
    assert {"files/.envrc", "files/sub/.vscode/settings.json"} <= reasons
    answer("collect", "1", "--all")
    assert (run / ".envrc").read_text() == "x\n"


@pytest.mark.parametrize("name", ["job.sh", "data.csv", "folder/data.csv"])
def test_file_that_becomes_a_link_after_the_check_is_not_sent(
    project: Project, outside: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """What is opened counts, not what was listed."""
    project.script("job.sh", "true")
    path = project.folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("#!/bin/bash\n")
    (outside / path.name).write_text("hunter2\n")
    submit = Submitter.submit

    def submit_late(*given: Any) -> Any:
        moved = path if path.parent == project.folder else path.parent
        moved.rename(project.folder / "before")
        moved.symlink_to(outside / path.name if moved == path else outside)
        return submit(*given)

    monkeypatch.setattr(Submitter, "submit", submit_late)
    confined = project.calls.confined(limits_of_user(), "call")
    monkeypatch.setenv(VARIABLE, confined.environ[VARIABLE])
    with refused("agent-limit", LimitError) as caught:
        submit_verb.submit(Screen(json=False, color=False), "job.sh", time="5m")
    assert caught.value.answer["limit"]["name"] == "folders"
    assert project.jobs() == {}


def test_list_that_the_user_has_applied_may_lie_outside(project: Project, outside: Path) -> None:
    """It is the user's choice, and an agent needs no right to it."""
    (outside / "own.txt").write_text("-r more.txt\n")
    (outside / "more.txt").write_text("")
    workspace = Workspace.of("demo")
    spec = workspace.spec.read_text()
    text = f"{spec}software: {{python: {{requirements: {outside}/own.txt}}}}\n"
    workspace.spec.write_text(text)
    (project.folder / "cluster.yaml").unlink()
    assert call(project, "plan", {"cluster": "demo"}) != "folders"
