"""What salloc says over the connection that holds an allocation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clusterctl.errors import SlurmError, TransportError, UsageError
from clusterctl.jobs.shell import (
    Allocation,
    Lease,
    kept_notice,
    session_folder,
    shell_request,
    shell_script,
)
from clusterctl.jobs.submit import Submitter
from clusterctl.scheduler.request import job_secrets
from clusterctl.scheduler.request.remote_secrets import FILE
from clusterctl.scheduler.session import Session, site_of
from clusterctl.scheduler.sites.script import Environment
from clusterctl.scheduler.slurm.refusals import RequestedOptions
from clusterctl.spec.job_options import job_options
from clusterctl.state.inventory import PartitionFacts
from clusterctl.transport.base import MARK
from clusterctl.transport.copies import read_copies
from clusterctl.transport.openssh import OpenSSH
from clusterctl.transport.remote_copies import OF_SESSION, digest
from clusterctl.util.assets import payload_hash
from tests.support.inventories import inventory_with
from tests.support.messages import refused
from tests.support.played.batch import HASH, Batch

INVENTORY = inventory_with(PartitionFacts("train", ("n1",)), cluster="grid", job_user="ada")
PENDING = "salloc: Pending job allocation 7"


@pytest.fixture
def lease(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """The connection to a salloc that says these lines, after a login shell with a line of its
    own.
    """
    answer = tmp_path / "said"
    answer.write_bytes(
        b"granted\nWelcome" + MARK + "".join(f"{one}\n" for one in request.param).encode()
    )
    session: Any = SimpleNamespace(transport=SimpleNamespace(host="ctl"))
    made = Lease(
        session,
        OpenSSH(tmp_path / "config"),
        ["sh", "-c", f"cat {answer}; cat >/dev/null"],
        b"",
        RequestedOptions(),
    )
    yield made
    made.release()


@pytest.mark.parametrize(
    "lease", [[PENDING, "", "salloc: error: Invalid qos", "ended"]], indirect=True
)
def test_empty_line_of_salloc_does_not_end_the_connection(lease: Lease) -> None:
    """Such as those of a job submit plugin, which the site has written."""
    assert lease.allocation() == "7"
    with refused("slurm-refused/allocation", SlurmError, "Invalid qos"):
        lease.allocation()


GRANTED = ["granted", "SLURM_JOB_ID=7", "SLURM_JOB_NODELIST=n[1-2]", "SLURM_JOB_NAME=a=b", ""]


@pytest.mark.parametrize("lease", [[PENDING, *GRANTED]], indirect=True)
def test_nodes_that_were_waited_for(lease: Lease) -> None:
    assert lease.allocation() == "7"
    held = lease.allocation()
    assert isinstance(held, Allocation)
    assert (held.job_id, held.nodes) == ("7", ("n1", "n2"))
    argv = held.argv([], "/jobs/shell-1", terminal=False)
    assert "SLURM_JOB_NAME=a=b" in " ".join(argv)
    assert "SLURM_SUBMIT_DIR=/jobs/shell-1" in " ".join(argv)
    assert not lease.was_revoked()


class Node:
    """The first node of an allocation: it runs the script of a session in a folder of the job
    user.
    """

    def __init__(self, batch: Batch, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.batch = batch
        self.in_container = "container" in options
        # A login shell begins with the PATH of the system.
        (batch.folder.parent / ".bash_profile").write_text(f"PATH={batch.environment['PATH']}")
        job = shell_request(job_options(options), site_of(INVENTORY))
        text = shell_script(job.job, Environment())
        text = text.replace(
            f"$HOME/clusterctl/store/archives/{payload_hash()}", str(batch.payload / HASH)
        )
        text = text.replace("/opt/clusterctl/env/bin/python", sys.executable)
        (batch.folder / "job.sbatch").write_text(text)
        self.files = batch.folder / "files"
        self.files.mkdir()
        monkeypatch.setattr(OpenSSH, "argv", lambda _self, _host, words, _flag: [*words])

    def run(self, *command: str) -> tuple[int, str]:
        """Run a command as `clusterctl shell -- COMMAND`. Return its exit status and output."""
        allocation = Allocation("7", ("n1",), {}, OpenSSH(Path("config")), "ctl")
        argv = allocation.argv(
            command, str(self.batch.folder), terminal=False, in_container=self.in_container
        )
        environment = {**self.batch.environment, "SLURM_JOB_ID": "7"}
        done = subprocess.run(
            argv, capture_output=True, text=True, check=False, env=environment, timeout=60
        )
        return done.returncode, done.stdout + done.stderr * bool(done.returncode)


@pytest.mark.parametrize(
    ("command", "output"),
    [
        (["echo a b; echo $((1 + 1)) | cat"], "a b\n2\n"),
        (["printf"], ""),
        (["printf", "%s,", "a b", "$HOME;"], "a b,$HOME;,"),
    ],
)
def test_shell_command_is_read_as_ssh_reads_it(
    batch: Batch, monkeypatch: pytest.MonkeyPatch, command: list[str], output: str
) -> None:
    """A single string is a line for the shell, and several words arrive verbatim."""
    assert Node(batch, monkeypatch).run(*command)[1].partition("bash: ")[0].endswith(output)


def test_shell_starts_in_its_folder_on_a_node_without_homes(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(batch, monkeypatch)
    home = batch.environment["HOME"]
    assert node.run("pwd") == (0, f"{home}\n")
    batch.environment["HOME"] = f"{home}/none"
    assert node.run("pwd") == (0, f"{node.files}\n")


def test_shell_has_the_variables_of_a_job(
    batch: Batch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (project := tmp_path / "project" / "sub").mkdir(parents=True)
    (tmp_path / "project" / "src").mkdir()
    monkeypatch.chdir(project)
    node = Node(batch, monkeypatch, folder=Path(".."), env=["A=b c"], cpus=3)
    (node.files / "sub").mkdir()
    show = "import json, os; print(json.dumps({'cwd': os.getcwd(), **os.environ}))"
    batch.environment["SLURM_CPUS_PER_TASK"] = "3"
    code, output = node.run("python3", "-c", show)
    assert code == 0, output
    seen = json.loads(output)
    expected = {
        "A": "b c",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "OMP_NUM_THREADS": "3",
        "SRUN_CPUS_PER_TASK": "3",
        "MASTER_ADDR": "node-1",
        "CLUSTERCTL_HEARTBEAT": f"{batch.folder}/heartbeat",
        "PYTHONPATH": f"{node.files}:{node.files}/src",
        "SLURM_SUBMIT_DIR": str(node.files),
        "cwd": f"{node.files}/sub",
    }
    assert {name: seen[name] for name in expected} == expected
    assert int(seen["MASTER_PORT"]) > 0


def test_launch_starts_ranks_as_submit_does(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the folder in which it is called; the logs of ranks lie in the session's folder."""
    batch.environment |= {
        "SLURM_PROCID": "1",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
    }
    node = Node(batch, monkeypatch, nodes=2)
    (node.files / "sub").mkdir()
    (node.files / "sub" / "show.py").write_text(
        "import json, os, sys\n"
        "print(json.dumps([os.environ['RANK'], os.getcwd(), *sys.argv]))\n"
        "sys.exit(5)\n"
    )
    code, output = node.run('cd "$SLURM_SUBMIT_DIR/sub" && launch python3 show.py "a b"')
    assert code == 5
    rank = json.loads(output.splitlines()[0])
    assert rank == ["1", f"{node.files}/sub", "show.py", "a b"]
    assert "--mpi=pmix" in batch.calls.read_text()
    assert "node/rank.py show.py" in batch.calls.read_text()
    assert (batch.folder / "rank-logs" / "1.log").exists()
    batch.calls.write_text("")
    assert node.run("launch")[0] == 2
    assert node.run("launch", "python3", "-c", "print(1)") == (0, "1\n")
    for number, program in enumerate(("python3", "python3 -")):
        line = f"echo 'print({number})' | launch {program}"
        assert node.run(line) == (0, f"{number}\n")
    assert node.run("launch", "python3", "-mplatform")[0] == 0
    assert "rank.py" not in batch.calls.read_text()


@pytest.fixture
def image(tmp_path: Path) -> str:
    path = tmp_path / "own.sif"
    path.touch()
    return str(path)


def test_shell_runs_in_a_container(
    batch: Batch, monkeypatch: pytest.MonkeyPatch, image: str, tmp_path: Path
) -> None:
    """In the session's folder. An image may have no bash."""
    batch.has_apptainer()
    (tmp_path / "data").mkdir()
    mount = f"{tmp_path}/data:/data"
    node = Node(batch, monkeypatch, container=image, mount=[mount], env=["A=b c"])
    show = "import json, os; print(json.dumps({'cwd': os.getcwd(), **os.environ}))"
    code, output = node.run("python3", "-c", show)
    assert code == 0, output
    seen = json.loads(output)
    expected = {"APPTAINER_CONTAINER": image, "A": "b c", "WORLD_SIZE": "1", "cwd": str(node.files)}
    assert {name: seen[name] for name in expected} == expected
    assert {str(batch.folder), mount} <= {*seen["APPTAINER_BIND"].split(",")}
    assert "BASH_FUNC_launch%%" not in seen
    line = 'echo "$APPTAINER_CONTAINER $0"'
    assert node.run(line) == (0, f"{image} sh\n")
    assert node.run() == (0, "")


def test_launch_starts_ranks_in_the_container(
    batch: Batch, monkeypatch: pytest.MonkeyPatch, image: str
) -> None:
    batch.has_apptainer()
    batch.environment |= {
        "SLURM_PROCID": "1",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
    }
    node = Node(batch, monkeypatch, container=image, nodes=2)
    show = "import os; print(os.environ['RANK'], os.environ['APPTAINER_CONTAINER'], os.getcwd())"
    code, output = node.run("launch", "python3", "-c", show)
    assert (code, output) == (0, f"1 {image} {node.files}\n")
    assert "--mpi=pmix" in batch.calls.read_text()


def test_shell_converts_the_image_that_it_needs(
    batch: Batch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A job does that before its ranks start."""
    archive = tmp_path / "damaged.tar"
    archive.write_bytes(bytes(257) + b"ustar" + bytes(800))
    batch.has_apptainer()
    code, output = Node(batch, monkeypatch, container=str(archive)).run("true")
    assert code == 127
    assert "apptainer" in output
    assert "damaged.tar" in output


def test_launch_does_not_pass_on_variables_of_a_job(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To jobs that the program submits: a batch script unsets the variables that CLUSTERCTL_SET
    lists.
    """
    show = "import os; print(os.environ['CLUSTERCTL_SET'])"
    code, output = Node(batch, monkeypatch, nodes=2).run("launch", "python3", "-c", show)
    assert code == 0
    assert {"OMP_NUM_THREADS", "MASTER_ADDR"} <= {word.partition("=")[0] for word in output.split()}


def test_values_on_a_host_that_did_not_answer_are_removed_later(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOKEN", "canary")
    job = shell_request(job_options({"secret": ["TOKEN"]}), site_of(INVENTORY))
    with (
        monkeypatch.context() as away,
        session_folder(Submitter(session), job, Environment()) as folder,
    ):
        values = Path(job_secrets.secrets_folder(folder.path))
        assert (values / FILE).read_text() == "TOKEN=canary\0"
        away.setattr(job_secrets, "remove_folders", lambda *_, **__: False)
    assert values.exists()
    job_secrets.remove_old_secrets(session)
    assert not values.exists()
    assert [entry.has_secrets for entry in session.ledger.entries()] == [False]


def test_new_and_changed_files_of_a_session_are_listed_and_kept(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("same.txt", "changed.txt", "gone.txt"):
        (tmp_path / name).write_text(name)
    for name in ("link", "turned"):
        (tmp_path / name).symlink_to("same.txt")
    job = shell_request(job_options({"folder": "."}), site_of(INVENTORY))
    with session_folder(Submitter(session), job, Environment()) as folder:
        there = Path(folder.program_dir)
        assert {path.name for path in there.iterdir()} == {
            "same.txt",
            "changed.txt",
            "gone.txt",
            "link",
            "turned",
        }
        # clusterctl's own files do not count. The logs of ranks were also shown.
        (Path(folder.path) / "stdout.log").write_text("shown\n")
        (there / "gone.txt").unlink()
        (there / "turned").unlink()
        (there / "turned").write_text("a file in place of a link")
        (there / "changed.txt").write_text("else")
        (there / "out").mkdir()
        (there / "out" / "new\n.txt").write_text("")
        files = folder.changes
        assert not isinstance(files, TransportError)
        assert [path for _, path in files] == ["changed.txt", "out/new\\n.txt", "turned"]
        assert kept_notice(session, folder.path, files).code == "shell-files-kept"
    assert (there / "changed.txt").exists()
    known = {number for copies in read_copies(session.workspace) for number in copies.numbers()}
    for name, is_copy in (("same.txt", True), ("changed.txt", False)):
        status = (there / name).stat()
        number = digest(b"", os.fsencode(there / name), status.st_size, status.st_mtime_ns)
        assert (number in known) is is_copy


@pytest.mark.parametrize("options", [{}, {"folder": "."}])
def test_folder_of_a_session_without_new_files_is_removed(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("a")
    job = shell_request(job_options(options), site_of(INVENTORY))
    with session_folder(Submitter(session), job, Environment()) as folder:
        assert (Path(folder.program_dir) / "a.txt").exists() is bool(options)
        # `down` looks for its folders by this name.
        assert OF_SESSION.fullmatch(f"clusterctl/jobs/{Path(folder.path).name}/rank-logs".encode())
    assert not Path(folder.path).exists()


def test_unlistable_folder_is_listed_once(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session has removed it, or the connection is lost. The command's answer is not lost."""
    monkeypatch.chdir(tmp_path)
    listed: list[Any] = []
    stream = type(session.transport).stream
    monkeypatch.setattr(
        type(session.transport), "stream", lambda *args: listed.append(args) or stream(*args)
    )
    with session_folder(
        Submitter(session), shell_request(job_options({}), site_of(INVENTORY)), Environment()
    ) as folder:
        Path(folder.program_dir).rmdir()
        assert isinstance(folder.changes, TransportError)
    assert len(listed) == 1
    assert Path(folder.path).exists()


def test_options_that_a_shell_can_not_have_are_refused(tmp_path: Path) -> None:
    for options, code in (
        ({"slurm": ["--export=ALL"]}, "option-invalid/salloc"),
        ({"slurm": ["--mem-per-cpu=1G"], "mem": "1G"}, "options-exclusive"),
        ({"folder": str(tmp_path / "missing")}, "files-unfit/folder"),
        ({"include": ["*.bin"]}, "option-invalid/option-missing"),
        ({"exclude": ["*.bin"]}, "option-invalid/option-missing"),
    ):
        with refused(code, UsageError):
            shell_request(job_options(options), site_of(INVENTORY))
    job = shell_request(
        job_options({"slurm": ["--exclude=n1"]}), site_of(replace(INVENTORY, pmix=False))
    )
    assert job.job.launcher == "mpirun"


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({}, ["proj1", "short", "train"]),
        ({"account": "mine", "partition": "other"}, ["mine", "short", "other"]),
    ],
)
def test_shell_on_an_attached_cluster_names_its_account(
    options: dict[str, Any], asked: list[str]
) -> None:
    attached = site_of(replace(INVENTORY, is_foreign=True, account="proj1", qos="short"))
    words = [*map(str, shell_request(job_options(options), attached).options)]
    named = dict(word.removeprefix("--").split("=") for word in words)
    assert [named.get(name) for name in ("account", "qos", "partition")] == asked
    assert not {"account", "qos", "partition"} & {
        word[2:].partition("=")[0]
        for word in [*map(str, shell_request(job_options({}), site_of(INVENTORY)).options)]
    }
