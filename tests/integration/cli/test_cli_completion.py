"""What TAB gives: in a real bash, and in the words that each shell asks for."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace

import pytest

from tests.support.terminal import on_terminal
from tests.support.verbs import SCRIPT, Clusterctl

BUNDLED = "train eval sample predict export bench gemm allreduce probe".split()
HOSTS = [
    {"name": "demo-ctl", "partition": None},
    {"name": "demo-train-1", "partition": "train"},
    {"name": "demo-big-1", "partition": "big"},
]
JOBS = [
    {"token": "a", "name": "train"},
    {"token": "a", "job_id": "12"},
    {"token": "b", "name": "probe", "job_id": "130"},
    {"token": "c", "name": "lost"},
]


@pytest.fixture
def cluster(cli: Clusterctl) -> Clusterctl:
    """A folder with a spec and scripts, and what is noted of its cluster."""
    folder = cli.home / "demo"
    folder.mkdir(parents=True)
    (folder / "hosts.json").write_text(json.dumps({"hosts": HOSTS}))
    (folder / "jobs.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in JOBS) + '{"token": "torn'
    )
    (cli.cwd / "cluster.yaml").write_text("version: 1\nname: demo\n")
    (cli.cwd / "latin-1.yaml").write_bytes(b"# \xe9t\xe9\nname: demo\n")
    for name in ("mine.py", "two words.py", "notes.txt"):
        (cli.cwd / name).touch()
    return cli


def asked_by_bash(*typed: str) -> dict[str, str]:
    """The variables by which bash asks what to offer for the last of the words typed."""
    return {
        "_CLUSTERCTL_COMPLETE": "bash_complete",
        "COMP_WORDS": "\n".join(typed),
        "COMP_CWORD": str(len(typed) - 1),
    }


def words(cli: Clusterctl, *typed: str) -> list[str]:
    """What bash is told to offer for the last of the words typed."""
    done = replace(cli, environ=asked_by_bash(*typed))()
    assert done.stderr == ""
    return offered_by(done.stdout)


def offered_by(answer: str) -> list[str]:
    """Return the words of an answer for bash. "FILE": the shell completes files itself."""
    pairs = (line.split(",", 1) for line in answer.split())
    return [word if kind == "plain" else "FILE" for kind, word in pairs]


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("sub", ["submit"]),
        ("cache ", ["list", "prune"]),
        ("submit ", [*BUNDLED, "cluster.yaml", "latin-1.yaml", "mine.py"]),
        ("submit train --partition ", ["train", "big"]),
        ("submit train --launcher ", ["srun", "mpirun", "torchrun"]),
        ("shell --partition b", ["big"]),
        ("logs ", ["130", "12"]),
        ("ssh demo-t", ["demo-train-1"]),
        ("-f elsewhere.yaml ssh ", []),
        ("--cluster demo ssh demo-b", ["demo-big-1"]),
        ("up --output ", ["text", "json"]),
        ("completion ", ["bash", "zsh", "fish"]),
        ("validate -f ", ["FILE"]),
        ("submit ./mi", []),
        ("--cluster d", ["demo"]),
        ("--cluster /", []),
        ("--cluster [d", []),
        ("-f latin-1.yaml ssh ", []),
    ],
)
def test_completion_offers_matching_words(
    cluster: Clusterctl, typed: str, offered: list[str]
) -> None:
    assert words(cluster, "clusterctl", *typed.split(" ")) == offered


def test_completion_without_clusters_offers_nothing(cli: Clusterctl) -> None:
    for typed in ("logs ", "ssh ", "--cluster "):
        assert words(cli, "clusterctl", *typed.split(" ")) == []
    assert not cli.home.exists()


def test_completion_in_an_unlistable_folder_offers_bundled_jobs(cluster: Clusterctl) -> None:
    # The folder of a process that has ended.
    in_removed_folder = "sleep 60 & cd /proc/$! && kill $!; wait"
    done = subprocess.run(
        ["sh", "-c", f'{in_removed_folder}\nexec "$0"', SCRIPT],
        cwd=cluster.cwd,
        env={
            **os.environ,
            "CLUSTERCTL_HOME": str(cluster.home),
            **asked_by_bash("clusterctl", "submit", ""),
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert (offered_by(done.stdout), done.stderr) == (BUNDLED, "")


def test_tab_in_bash(cluster: Clusterctl) -> None:
    env = {
        **os.environ,
        "PATH": f"{SCRIPT.parent}{os.pathsep}{os.environ['PATH']}",
        "CLUSTERCTL_HOME": str(cluster.home),
        "PS1": "ready> ",
        "TERM": "dumb",
    }
    with on_terminal(["bash", "--norc", "--noprofile", "-i"], env, cluster.cwd) as window:
        window.read_until("ready> ")
        window.type('eval "$(clusterctl completion bash)"; echo "do""ne"\r')
        # What is typed before the prompt, the terminal shows as it is.
        window.read_until("done\r\nready> ")
        window.type("clusterctl val\t")
        window.read_until("clusterctl validate ")
        window.type("-f clus\t")
        window.read_until("clusterctl validate -f cluster.yaml ")
        window.type("\x15exit\r")
        window.end()


def jobs_offered(cluster: Clusterctl, shell: str) -> str:
    """Return what a shell's script is told to offer after `clusterctl logs 1`."""
    env = {
        "_CLUSTERCTL_COMPLETE": f"{shell}_complete",
        "COMP_WORDS": "clusterctl logs 1",
        # fish gives the word, the others its index.
        "COMP_CWORD": "1" if shell == "fish" else "2",
    }
    return replace(cluster, environ=env)().stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_works_in_each_shell(cluster: Clusterctl, shell: str) -> None:
    script = cluster("completion", shell).stdout
    assert "_CLUSTERCTL_COMPLETE" in script
    assert cluster("completion", shell, "-o", "json").json["script"] == script.rstrip("\n")
    offered = jobs_offered(cluster, shell)
    assert "130" in offered
    assert "12" in offered


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_never_runs_a_name_as_shell_code(cluster: Clusterctl, shell: str) -> None:
    """A shell may evaluate names of jobs, so that only plain characters of them are offered."""
    hostile = [
        {"token": "a", "job_id": "12", "name": "\\$(touch pwned)`id`'\"\n13\t\x1b]0;x\x07"},
        {"token": "b", "job_id": "1$(touch pwned)", "name": "x"},
        {"token": "c", "job_id": "1\n13", "name": "x"},
        {"token": "d", "job_id": 14, "name": None},
    ]
    (cluster.home / "demo" / "jobs.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in hostile)
    )
    name = "___touch_pwned__id____13___0_x_"
    offered = {
        "bash": ["plain,14", "plain,12"],
        "zsh": ["plain", "14", "_", "plain", "12", name],
        "fish": ["plain,14", f"plain,12\t{name}"],
    }
    assert jobs_offered(cluster, shell).splitlines() == offered[shell]


def test_unknown_shell_is_refused(cli: Clusterctl) -> None:
    assert "'csh'" in cli("completion", "csh", rc=2).stderr
