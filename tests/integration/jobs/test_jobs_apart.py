"""Jobs on nodes that share no folder: what they need goes to each, what they wrote is read where
they ran.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from clusterctl.cluster.trial import prove_job_user
from clusterctl.errors import SlurmError, TransferError, UnreachableError, VerifyError
from clusterctl.jobs.shell import session_folder, shell_request
from clusterctl.jobs.submit import SubmittedJob, Submitter
from clusterctl.jobs.watch import follow
from clusterctl.runs.collect import collect
from clusterctl.scheduler.base import JobState
from clusterctl.scheduler.ends.judge import judge
from clusterctl.scheduler.request.job_secrets import remove_old_secrets
from clusterctl.scheduler.session import Session, site_of
from clusterctl.scheduler.sites.script import Environment
from clusterctl.spec.job import JobSpec
from clusterctl.spec.job_options import job_options
from clusterctl.state.inventory import PartitionFacts, SharedFolder
from clusterctl.transport.base import Transport, no_answer_error
from clusterctl.transport.put import Upload, UploadResult
from tests.support.inventories import inventory_with
from tests.support.local_transport import LocalTransport
from tests.support.messages import refused
from tests.support.played.cluster import PlayedCluster, submit

PARTITIONS = {"n1": "train", "n2": "train", "o1": "other"}


class ApartNode(LocalTransport):
    """A node that shares no folder with the controller: what that has in its home, it has in
    ``home``, at the same path.
    """

    def __init__(self, cluster: PlayedCluster, home: Path) -> None:
        self._controllers = str(cluster.home)
        self.home = home
        self.host = home.name
        self.is_down = False
        home.mkdir(parents=True)

    def _local_command(self, argv: Sequence[str]) -> Sequence[str]:
        if self.is_down:
            raise no_answer_error(self.host, argv, 0.0)
        moved = (word.replace(self._controllers, str(self.home)) for word in argv)
        return ["env", f"HOME={self.home}", *moved]

    def _local_request(self, data: bytes) -> bytes:
        return data.replace(self._controllers.encode(), bytes(self.home))

    def shown(self, path: str) -> str:
        """Return the path that the node itself would tell."""
        return path.replace(str(self.home), self._controllers)


class OtherHome(ApartNode):
    """A node where the job user has a home at another path."""

    def shown(self, path: str) -> str:
        return path


@pytest.fixture(autouse=True)
def tells_its_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    new_folder = Upload.new_folder

    def on_node(upload: Upload, *given: Any, **named: Any) -> UploadResult:
        sent = new_folder(upload, *given, **named)
        to = upload.transport
        return replace(sent, folder=to.shown(sent.folder)) if isinstance(to, ApartNode) else sent

    monkeypatch.setattr(Upload, "new_folder", on_node)


@pytest.fixture
def nodes(cluster: PlayedCluster, tmp_path: Path) -> dict[str, ApartNode]:
    return {name: ApartNode(cluster, tmp_path / "nodes" / name) for name in PARTITIONS}


@pytest.fixture
def apart(session: Session, nodes: dict[str, ApartNode]) -> Session:
    """The played cluster, with two nodes of its partition `train` and one of another."""
    of = {
        name: tuple(node for node in nodes if PARTITIONS[node] == name)
        for name in PARTITIONS.values()
    }
    partitions = tuple(PartitionFacts(name, members) for name, members in of.items())
    inventory = inventory_with(*partitions, shared_folder=SharedFolder(kind="none"))
    return replace(session, site=site_of(inventory), nodes=nodes)


@pytest.fixture
def job(tmp_path: Path) -> JobSpec:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "conf.txt").write_text("given")
    script = folder / "job.sh"
    script.write_text("#!/bin/bash\necho hello\n")
    return JobSpec(name="mine", script=script)


def given(node: Transport, done: SubmittedJob) -> set[str]:
    assert isinstance(node, ApartNode)
    folder = node.home / "clusterctl/jobs" / Path(done.remote_dir).name
    return {path.name for path in folder.rglob("*")}


def test_submit_without_shared_folder_sends_the_folder_to_each_node(
    apart: Session, nodes: dict[str, ApartNode], job: JobSpec
) -> None:
    done = submit(apart, job)
    for name in ("n1", "n2"):
        assert given(nodes[name], done) >= {"job.sbatch", "job.sh", "conf.txt", "spec.yaml"}
    assert given(nodes["o1"], done) == set()


def test_script_is_sent_to_the_nodes_of_its_partition_directive(
    apart: Session, nodes: dict[str, ApartNode], job: JobSpec
) -> None:
    assert job.script is not None
    for option, names in (
        ("--time=5", {"n1", "n2"}),
        ("-N1 -pother", {"o1"}),
        ("-pother,train", {"n1", "n2", "o1"}),
    ):
        job.script.write_text(f"#!/bin/bash\n#SBATCH {option}\necho hello\n")
        done = submit(apart, job)
        assert {name for name, node in nodes.items() if "job.sh" in given(node, done)} == names


def secret_files(cluster: PlayedCluster, nodes: dict[str, ApartNode]) -> list[str]:
    homes = {"controller": cluster.home, **{name: node.home for name, node in nodes.items()}}
    return [name for name, home in homes.items() if [*home.glob("clusterctl/secrets/*/environ")]]


def test_values_stay_recorded_until_all_nodes_have_answered(
    apart: Session, cluster: PlayedCluster, nodes: dict[str, ApartNode], job: JobSpec
) -> None:
    """The tasks of an array end on two nodes, and one of these does not answer then."""
    secret = {"TOKEN": SecretStr("canary-of-this-test")}
    done = submit(apart, job.model_copy(update={"secret": secret}))
    cluster.wait_until_ended(done.job_id)
    assert {"n1", "n2"} <= {*secret_files(cluster, nodes)}
    nodes["n2"].is_down = True
    for is_left in (True, False):
        remove_old_secrets(apart)
        assert secret_files(cluster, nodes) == (["n2"] if is_left else [])
        (entry,) = apart.ledger.entries()
        assert entry.has_secrets is is_left
        nodes["n2"].is_down = False


def test_refused_job_leaves_nothing_on_any_node(
    apart: Session, cluster: PlayedCluster, nodes: dict[str, ApartNode], job: JobSpec
) -> None:
    with cluster.state() as state:
        state["refuse"] = "Batch job submission failed: Invalid qos specification"
    with pytest.raises(SlurmError):
        submit(apart, job)
    left = [
        path for node in nodes.values() for path in (node.home / "clusterctl/jobs").glob("mine-*")
    ]
    assert left == []


@pytest.mark.parametrize("options", [{}, {"partition": "other"}])
def test_folder_of_a_shell_is_on_the_nodes_of_its_partition(
    apart: Session, nodes: dict[str, ApartNode], options: dict[str, str]
) -> None:
    """By default the first. Without new files it is removed from all of them."""
    names = {"o1"} if options else {"n1", "n2"}

    def remote_folders() -> set[str]:
        return {
            name
            for name, node in nodes.items()
            if [*(node.home / "clusterctl/jobs").glob("shell.*")]
        }

    job = shell_request(job_options(options), apart.site)
    with session_folder(Submitter(apart), job, Environment()) as folder:
        assert remote_folders() == names
    assert remote_folders() == set()
    with session_folder(Submitter(apart), job, Environment()) as folder:
        for name in names:
            (
                nodes[name].home / "clusterctl/jobs" / Path(folder.path).name / "files" / "new"
            ).touch()
        assert folder.changes == tuple((name, "new") for name in sorted(names))
    assert remote_folders() == names


def test_controller_that_runs_jobs_gets_their_files_once(apart: Session) -> None:
    nodes = {**apart.nodes, "n1": apart.transport}
    assert replace(apart, nodes=nodes).transports_of_partition("train") == (nodes["n2"],)


class Away(ApartNode):
    """A node that does not answer."""

    def run(self, *_: object, **__: object):  # type: ignore[no-untyped-def,override]
        raise UnreachableError("no connection", host="n2")

    converse = run


def without_n2(apart: Session, cluster: PlayedCluster, tmp_path: Path) -> Session:
    away = Away(cluster, tmp_path / "away")
    return replace(apart, nodes={**apart.nodes, "n2": away})


class Dying(ApartNode):
    """A node that goes off when the files are sent."""

    converse = Away.run


def test_node_that_dies_is_no_half_of_a_submission(
    apart: Session,
    cluster: PlayedCluster,
    nodes: dict[str, ApartNode],
    job: JobSpec,
    tmp_path: Path,
) -> None:
    dying = Dying(cluster, tmp_path / "dying")
    with refused("unreachable", UnreachableError, host="n2"):
        submit(replace(apart, nodes={**nodes, "n2": dying}), job)
    assert not list((cluster.home / "clusterctl/jobs").glob("mine-*"))
    assert not list((nodes["n1"].home / "clusterctl/jobs").glob("mine-*"))


@pytest.fixture
def off(apart: Session, cluster: PlayedCluster, tmp_path: Path) -> Session:
    return without_n2(apart, cluster, tmp_path)


@pytest.mark.parametrize(
    ("line", "flags", "excluded"),
    [("", (), "n2"), ("--exclude=n7", (), "n7,n2"), ("-x n7", ("--exclude=n8",), "n8,n2")],
)
def test_job_runs_without_a_node_that_is_off(
    off: Session, job: JobSpec, line: str, flags: tuple[str, ...], excluded: str
) -> None:
    assert job.script is not None
    job.script.write_text(f"#!/bin/bash\n{f'#SBATCH {line}' if line else ''}\necho hello\n")
    done = submit(off, job.model_copy(update={"slurm": flags}))
    lines = [one for one in done.script.splitlines() if "exclude" in one or " -x " in one]
    # Of several options, the last counts.
    assert lines[-1] == f"#SBATCH --exclude={excluded}"
    assert "job.sh" in given(off.nodes["n1"], done)


def test_job_is_refused_if_all_its_nodes_are_off(
    apart: Session, cluster: PlayedCluster, job: JobSpec, tmp_path: Path
) -> None:
    nodes = {name: Away(cluster, tmp_path / f"off-{name}") for name in apart.nodes}
    with refused("unreachable", UnreachableError):
        submit(replace(apart, nodes=nodes), job)


def left_on(*nodes: ApartNode) -> list[Path]:
    """The folders of jobs on nodes."""
    return [path for node in nodes for path in (node.home / "clusterctl/jobs").glob("*")]


def test_submit_names_the_node_where_the_folder_of_jobs_has_another_path(
    apart: Session,
    cluster: PlayedCluster,
    nodes: dict[str, ApartNode],
    job: JobSpec,
    tmp_path: Path,
) -> None:
    other = OtherHome(cluster, tmp_path / "srv/n2")
    session = replace(apart, nodes={**nodes, "n2": other})
    with refused("host-unfit/folder", TransferError, "on n2", str(other.home)):
        submit(session, job)
    assert left_on(nodes["n1"], other) == []
    assert not list((cluster.home / "clusterctl/jobs").glob("mine-*"))


class AsUser(ApartNode):
    """The admin account's way to a node: sudo is left out."""

    def _local_command(self, argv: Sequence[str]) -> Sequence[str]:
        if argv[:4] != ("sudo", "-n", "-H", "-u"):
            # It has no health program.
            return ["false"]
        return super()._local_command(argv[5:])


@pytest.mark.parametrize("fault", ["", "home", "path", "python", "mpirun"])
def test_proof_of_the_job_user_names_what_its_jobs_would_lack(
    apart: Session,
    cluster: PlayedCluster,
    nodes: dict[str, ApartNode],
    tmp_path: Path,
    fault: str,
) -> None:
    def to(host: str) -> Transport:
        node = object.__new__(AsUser)
        node.__dict__.update(nodes[host].__dict__)
        return node

    root = tmp_path / "root"
    (root / "env/bin").mkdir(parents=True)
    for program in (root / "env/bin/python", root / "env/bin/mpirun"):
        program.write_text("#!/bin/sh\n")
        program.chmod(0o644 if program.name == fault else 0o755)
    (root / "job-profile.sh").write_text(f"PATH={root}/env/bin\n")
    inventory = replace(apart.inventory, root=str(root))
    session = apart = replace(apart, site=site_of(inventory))
    if fault == "home":
        (nodes["n2"].home / "clusterctl").write_text("no folder")
    if fault == "path":
        other = OtherHome(cluster, tmp_path / "srv/n2")
        session = replace(apart, nodes={**nodes, "n2": other})
    if not fault:
        prove_job_user(session, to, ["n1", "n2"])
    else:
        with refused("host-unfit/job-user", VerifyError) as caught:
            prove_job_user(session, to, ["n1", "n2"])
        assert "n2" in str(caught.value)
        assert caught.value.fix
    assert left_on(nodes["n1"]) == []


def test_logs_and_files_come_from_the_nodes_it_ran_on(
    apart: Session,
    cluster: PlayedCluster,
    nodes: dict[str, ApartNode],
    job: JobSpec,
    tmp_path: Path,
) -> None:
    done = submit(apart, job)
    cluster.wait_until_ended(done.job_id)
    (info,) = apart.scheduler.jobs([done.job_id])
    first = info.nodes[0]
    remote_folders = nodes[first].home / "clusterctl/jobs" / Path(done.remote_dir).name
    # It ran here, but stands for that node.
    Path(done.remote_dir, "stdout.log").rename(remote_folders / "stdout.log")
    (remote_folders / "made.txt").write_text("made there")
    output: list[bytes] = []
    follow(apart, done.job_id, on_output=lambda chunk: output.append(chunk.data))
    assert b"".join(output) == b"hello\n"
    (run,) = collect(apart, [done.job_id], out=tmp_path / "runs")
    assert run.directory is not None
    assert (run.directory / "stdout.log").read_text() == "hello\n"
    assert (run.directory / "made.txt").read_text() == "made there"


def test_follow_without_shared_folder_reads_until_the_end(
    apart: Session, job: JobSpec, tmp_path: Path
) -> None:
    assert isinstance(job.script, Path)
    seen = tmp_path / "seen"
    job.script.write_text(f"#!/bin/bash\nuntil [ -e {seen} ]; do sleep 0.02; done\n")
    done = submit(apart, job)
    (ended,) = follow(apart, done.job_id, on_output=print, on_change=lambda *_: seen.touch())
    assert ended.state is JobState.COMPLETED


def test_logs_are_read_beside_an_unreachable_node(
    apart: Session,
    cluster: PlayedCluster,
    nodes: dict[str, ApartNode],
    job: JobSpec,
    tmp_path: Path,
) -> None:
    done = submit(apart, job)
    cluster.wait_until_ended(done.job_id)
    (ended,) = apart.scheduler.jobs([done.job_id])
    ended = replace(ended, state=JobState.FAILED, exit_code=1, nodes=("n1", "n2"))
    (nodes["n1"].home / "clusterctl/jobs" / Path(done.remote_dir).name / "stderr.log").write_text(
        "of n1\n"
    )
    broken = without_n2(apart, cluster, tmp_path)
    assert judge(broken, [ended])[ended.id].lines == ("of n1",)
    for names in (("n2",), ("n2", "o1")):  # the first has the job's own
        found = judge(broken, [replace(ended, nodes=names)])[ended.id]
        assert found.note == "the job's log can't be read: no connection"
