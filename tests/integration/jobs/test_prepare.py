"""Staging and submitting: once, whatever becomes of the connection."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from clusterctl.errors import (
    AnswerLostError,
    DiskError,
    SlurmError,
    UnreachableError,
    UsageError,
)
from clusterctl.jobs.prepare import Preparer, Submission
from clusterctl.jobs.source import source_of
from clusterctl.jobs.submit import MAX_DIFF, client_facts, reject_local_files
from clusterctl.scheduler.request.request import Request
from clusterctl.scheduler.session import Session, resolve_submissions
from clusterctl.scheduler.slurm.client import SlurmClient
from clusterctl.spec.job import JobSpec
from clusterctl.spec.names import FOLDER
from clusterctl.state.ledger import JobEntry, Ledger
from clusterctl.transport.put import archives_of
from clusterctl.util.assets import payload_hash, tree_files, tree_hash
from clusterctl.util.process import Result
from clusterctl.util.progress import Clock
from tests.support.disks import small_disk
from tests.support.local_transport import LocalTransport
from tests.support.messages import refused as rejected
from tests.support.played.cluster import submit
from tests.support.scripted import ScriptedTransport, Step

QUICK = Clock(sleep=lambda _seconds: None)


@pytest.fixture
def job(tmp_path: Path) -> JobSpec:
    script = tmp_path / "my 'job.sh"
    script.write_text("#!/bin/bash\necho hello\n")
    return JobSpec(name="mine", script=script)


def test_submit_stages_script_spec_and_program(session, cluster, job):
    done = submit(session, job)
    folder = Path(done.remote_dir)
    assert folder == cluster.home / "clusterctl" / "jobs" / f"mine-{done.token}"
    names = {path.name for path in folder.iterdir()}
    assert names >= {"job.sbatch", "spec.yaml", "environment.client.json"}
    assert [path.name for path in (folder / "files").iterdir()] == ["my 'job.sh"]
    # What the dry run shows.
    assert (
        (folder / "job.sbatch").read_text() == done.script == session.site.render(Request.read(job))
    )
    assert folder.stat().st_mode & 0o777 == 0o700
    assert json.loads((folder / "environment.client.json").read_text())["job"]["name"] == "mine"
    known = cluster.job(done.job_id)
    assert (known["comment"], known["dir"]) == (f"clusterctl:{done.token}", done.remote_dir)
    (entry,) = cluster.ledger.entries()
    assert (entry.job_id, entry.token, entry.name) == (done.job_id, done.token, "mine")
    assert (entry.remote_dir, entry.refused) == (done.remote_dir, False)
    assert entry.program_dir == f"{done.remote_dir}/files"


def test_folder_of_the_script_is_what_the_job_runs_in(session, cluster, job):
    (job.script.parent / "conf").mkdir()
    (job.script.parent / "conf" / "a.txt").write_text("from the folder")
    job.script.write_text("#!/bin/bash\ncat conf/a.txt; echo changed >conf/a.txt\n")
    done = submit(session, job)
    cluster.wait_until_ended(done.job_id)
    folder = Path(done.remote_dir)
    assert (folder / "stdout.log").read_text() == "from the folder"
    listed = json.loads((folder / "source.json").read_text())
    assert {one["path"] for one in listed["files"]} == {"my 'job.sh", "conf/a.txt"}
    assert done.source is not None
    assert (done.source.files, done.source.hash) == (2, listed["hash"])
    assert done.source.sent_bytes == done.source.bytes > 0
    again = submit(session, job)
    assert again.source is not None
    assert (again.source.sent_bytes, again.source.hash) == (0, done.source.hash)
    cluster.wait_until_ended(again.job_id)
    assert (Path(again.remote_dir) / "stdout.log").read_text() == "from the folder"


def test_folder_whose_name_is_not_utf8(session, cluster, tmp_path):
    folder = tmp_path / os.fsdecode(b"\xffproject\nof mine")
    folder.mkdir()
    (folder / "a.sh").write_text("#!/bin/bash\necho fine\n")
    done = submit(session, JobSpec(name="x", script=folder / "a.sh"))
    cluster.wait_until_ended(done.job_id)
    assert (Path(done.remote_dir) / "stdout.log").read_text() == "fine\n"


def test_exclude_of_nodes_is_not_exclude_of_files(session, cluster, job):
    """sbatch's --exclude names nodes, that of clusterctl patterns of files."""
    preparer = Preparer(lambda _: None)
    for pattern in ("demo-train-2", "demo-train-[1-9]", "x,demo-train-1"):
        with rejected("option-invalid/exclude", UsageError, f"--slurm --exclude={pattern}"):
            preparer.prepare(
                session, Submission.of([job.model_copy(update={"exclude": (pattern,)})])
            )
    for pattern in ("/demo-train-2", "demo-train-3", "*.log", "demo-train-["):
        (prepared,) = preparer.prepare(
            session, Submission.of([job.model_copy(update={"exclude": (pattern,)})])
        )
        assert "--exclude" not in prepared.script


def test_mount_without_container_is_refused(session: Session, job: JobSpec) -> None:
    mounts = job.model_copy(update={"mount": ("/data:/data",)})
    with rejected("option-invalid/option-missing", UsageError):
        Preparer(lambda _: None).prepare(session, Submission.of([mounts]))


@pytest.mark.parametrize(
    "image", [("/shared/x.sif", "apptainer"), ("/shared/x", "apptainer *|| command -v ch-run")]
)
@pytest.mark.parametrize(
    "answers", [((), (), True), ((2,), (), False), ((), (1,), False), ((), (2,), False)]
)
def test_container_is_refused_if_no_node_can_run_it(
    session: Session,
    job: JobSpec,
    image: tuple[str, str],
    answers: tuple[tuple[int, ...], tuple[int, ...], bool],
) -> None:
    """image: path, and which programs are looked for. answers: the nodes that have one, those that
    do not answer, and whether the job is refused.
    """
    path, programs = image
    have, silent, is_refused = answers
    nodes = {}
    for number in (1, 2):
        away = UnreachableError("no answer", host="n") if number in silent else None
        asked = Step(
            ("sh", "-c", f"command -v {programs}*"), rc=int(number not in have), error=away
        )
        nodes[f"demo-train-{number}"] = ScriptedTransport([asked])
    preparer = Preparer(lambda _: None)
    submission = Submission.of([job.model_copy(update={"container": path})])
    with rejected("unsupported/container", UsageError) if is_refused else nullcontext():
        preparer.prepare(replace(session, nodes=nodes), submission)
    elsewhere = job.model_copy(update={"container": path, "module": ("apptainer",)})
    preparer.prepare(replace(session, nodes=nodes), Submission.of([elsewhere]))


@pytest.mark.parametrize(
    ("engine", "mount", "is_refused"),
    [
        ("/usr/bin/ch-run", "/data:/data:ro", True),
        ("/usr/bin/ch-run", "/data:/data", False),
        ("/usr/bin/apptainer", "/data:/data:ro", False),
    ],
)
def test_read_only_mount_is_refused_if_the_engine_of_the_nodes_has_none(
    session: Session, job: JobSpec, engine: str, mount: str, is_refused: bool
) -> None:
    asked = Step(("sh", "-c", "command -v *"), stdout=f"{engine}\n")
    nodes = {f"demo-train-{number}": ScriptedTransport([asked]) for number in (1, 2)}
    wanted = job.model_copy(update={"container": "/shared/x", "mount": (mount,)})
    with rejected("unsupported/mount", UsageError) if is_refused else nullcontext() as caught:
        Preparer(lambda _: None).prepare(replace(session, nodes=nodes), Submission.of([wanted]))
    if is_refused:
        assert "--mount /data:/data," in caught.value.fix


def test_lines_without_an_effect_are_noted_once_before_the_submission(session, job):
    script = job.script.with_name("own.sh")
    script.write_text(
        "#!/bin/bash\n#SBATCH --nodes=1 --output=logs/%x.out\ntrue\n#SBATCH --time=5\n"
    )
    notes = []
    jobs = [JobSpec(name=name, script=script) for name in "ab"]
    Preparer(notes.append).prepare(session, Submission.of(jobs))
    assert [note for note in notes if "own.sh, line 2" in note and "--output" in note] == notes[:1]
    assert [note for note in notes if "own.sh, line 4" in note] == notes[1:2]


def test_job_waits_only_for_jobs_that_have_not_ended(session, cluster, job):
    """Slurm forgets a job some minutes after its end, and then refuses it as a dependency."""
    preparer = Preparer(lambda _: None)

    def dependencies(*after: str) -> list[str]:
        (prepared,) = preparer.prepare(
            session, Submission.of([job.model_copy(update={"after": after})])
        )
        return re.findall("--dependency=(.*)", prepared.script)

    completed = submit(session, job).job_id
    failing = job.script.with_name("bad.sh")
    failing.write_text("#!/bin/bash\nexit 3\n")
    failed = submit(session, JobSpec(name="bad", script=failing)).job_id
    for job_id in (completed, failed):
        cluster.wait_until_ended(job_id)
    with cluster.state() as state:
        state["hold"] = True
    waiting = submit(session, job).job_id
    assert dependencies(completed, f"{failed}:notok", f"{failed}:any") == []
    assert dependencies(completed, waiting, f"{waiting}:notok") == [
        f"afterok:{waiting},afternotok:{waiting}"
    ]
    assert dependencies(completed, "singleton") == ["singleton"]
    for impossible in (failed, f"{failed}:ok", f"{completed}:notok"):
        with rejected("job-unfit/dependency", UsageError, impossible):
            dependencies(impossible)
    with rejected("not-found/job", UsageError, "999"):
        dependencies("999")


def test_folder_that_can_not_be_sent_leaves_nothing(session, cluster, job):
    (job.script.parent / "task-1").touch()
    with rejected("files-unfit/reserved", UsageError):
        submit(session, job.model_copy(update={"array": "0-1"}))
    assert cluster.ledger.entries() == ()
    assert list(cluster.home.iterdir()) == []


def test_job_that_can_not_be_written_down_is_not_submitted(session, cluster, job):
    with small_disk() as disk:
        (disk.path / "spec.yaml").touch()
        disk.suffer("full")
        full = replace(session, ledger=Ledger(disk.path / "jobs.jsonl"))
        with rejected("disk-full/state", DiskError):
            submit(full, job)
    assert cluster.calls("sbatch") == 0
    assert list((cluster.home / "clusterctl" / "jobs").iterdir()) == []


def test_record_without_a_spec_is_named_before_submitting(session, cluster, job):
    session.workspace.spec.unlink()
    with rejected("record-damaged/spec", UsageError):
        submit(session, job)
    assert cluster.calls("sbatch") == 0


def test_local_image_is_sent_once_and_named_by_its_hash(session, cluster, job, tmp_path):
    image = tmp_path / "my image.sif"
    image.write_bytes(b"image")
    with_image = job.model_copy(update={"container": str(image)})
    done = [submit(session, with_image)]
    sha = hashlib.sha256(b"image").hexdigest()
    store = (cluster.home / "clusterctl" / "store").rglob("*")
    (stored,) = (path for path in store if sha in str(path) and path.is_file())
    assert stored.read_bytes() == b"image"
    inode = stored.stat().st_ino
    done.append(submit(session, with_image))
    assert stored.stat().st_ino == inode
    assert all(str(stored) in one.script and str(image) not in one.script for one in done)
    # What can't be looked for here is the cluster's.
    too_long = f"/{'x' * 300}.sif"
    assert too_long in submit(session, job.model_copy(update={"container": too_long})).script


def test_outputs_are_staged_beside_the_job(session, cluster, job):
    done = submit(session, job.model_copy(update={"outputs": ("results/**",)}))
    written = json.loads((Path(done.remote_dir) / "outputs.json").read_text())
    assert written["patterns"] == ["results/**", "/my 'job.sh"]  # and the script
    with rejected("option-invalid/pattern", UsageError, "outputs="):
        source_of(Request.read(job.model_copy(update={"outputs": ("!",)})))


def test_submit_brings_the_payload_once(session, cluster, job):
    submit(session, job)
    archive = cluster.home / archives_of(FOLDER) / payload_hash()
    assert tree_hash(archive / "payload") == payload_hash()
    assert {path.stat().st_mode & 0o777 for path in tree_files(archive)} == {0o400}
    (archive / "mark").touch()
    os.utime(archive, (1, 1))
    submit(session, job)
    assert (archive / "mark").exists()
    # So a sweep of the store knows when it was last used.
    assert archive.stat().st_mtime > 1


@pytest.mark.parametrize(
    ("answer", "fix"),
    [
        ("Invalid account or account/partition combination specified", "name your Slurm account"),
        ("Invalid generic resource (gres) specification", "leave out --gpus"),
        ("Requested node configuration is not available", "ask for less"),
    ],
)
def test_refusal_names_the_flag_and_the_choices(cluster, job, answer, fix):
    with cluster.state() as state:
        state["refuse"] = f"sbatch: error: {answer}"
    where = "sbatch --nodes=1 --ntasks-per-node=1 --time=00:01:00"
    with rejected("slurm-refused/job", SlurmError, fix, why=answer, where=where):
        submit(cluster.session(), job.model_copy(update={"time": 60}))
    assert [entry.refused for entry in cluster.ledger.entries()] == [True]
    assert list((cluster.home / "clusterctl" / "jobs").iterdir()) == []


def test_all_options_that_slurm_refuses_are_told_at_once(cluster, job):
    """Slurm itself names one at a time."""
    messages = {
        "account": "Invalid account or account/partition combination specified",
        "qos": "Invalid qos specification",
        "constraint": "Invalid feature specification",
    }
    with cluster.state() as state:
        state["refuse_options"] = messages
    job.script.write_text("#!/bin/bash\n#SBATCH --account=a --qos=q\n#SBATCH --constraint=c\n")
    with rejected(
        "slurm-refused/job", SlurmError, "--account=a` in line 2", *messages.values()
    ) as caught:
        submit(cluster.session(), job)
    assert len(caught.value.fix.splitlines()) == len(messages)
    assert "`#SBATCH --constraint=c` in line 3" in caught.value.fix
    assert cluster.calls("sbatch") == 1 + len(messages)


@pytest.mark.parametrize("trouble", [{"lose_answer": True}, {"away": 3}])
def test_submit_with_a_lost_answer_or_request_makes_one_job(cluster, job, trouble):
    with cluster.state() as state:
        state.update(trouble)
    assert submit(cluster.session(clock=QUICK), job).job_id == "1"
    assert cluster.calls("sbatch") == 1


def test_submit_to_an_unreachable_controller_submits_no_job(cluster, job):
    now = [0.0]
    quick = Clock(lambda: now[0], lambda seconds: now.__setitem__(0, now[0] + seconds))
    session = cluster.session(clock=quick, patience_s=60)
    with cluster.state() as state:
        state["away"] = 1000
    with rejected("unreachable", UnreachableError, "clusterctl up"):
        submit(session, job)
    assert now[0] < 10
    # They try for a MessageTimeout.
    assert cluster.calls("sbatch") == cluster.calls("squeue") == 0
    assert [entry.refused for entry in cluster.ledger.entries()] == [True]
    assert list((cluster.home / "clusterctl" / "jobs").iterdir()) == []


@pytest.mark.parametrize(
    ("away", "answer"),
    [
        (1, "Batch job submission failed: Socket timed out on send/recv operation"),
        (1000, "Socket timed out on send/recv operation"),
        (1000, "Unable to contact slurm controller: Socket timed out on send/recv operation"),
        (1000, "Batch job submission failed: Unable to contact slurm controller (receive failure)"),
    ],
)
def test_submit_request_that_may_have_arrived_is_not_repeated(cluster, job, away, answer):
    session = cluster.session(clock=QUICK, patience_s=0.5)
    with cluster.state() as state:
        state["away"], state["away_words"] = away, answer
    with rejected("answer-lost", AnswerLostError):
        submit(session, job)
    assert cluster.calls("sbatch") == 1
    assert [entry.refused for entry in cluster.ledger.entries()] == [False]


class Cutting(LocalTransport):
    """The connection breaks while sbatch runs: ``taken`` says whether Slurm had the job by then.

    With ``then`` that is what whoever asks afterwards what became of it gets.
    """

    def __init__(self, *, taken: bool, then: Exception | None = None) -> None:
        self._taken = taken
        self._then = then
        self._cut = False

    def run(self, argv, **options) -> Result:
        if "--parsable" in argv:
            if self._taken:
                super().run(argv, **options)
            self._cut = True
            raise UnreachableError("the connection broke")
        if self._cut and self._then is not None:
            raise self._then
        return super().run(argv, **options)


@pytest.mark.parametrize("then", [UnreachableError("still broken"), SlurmError("what is this?")])
def test_submit_keeps_a_job_while_slurm_does_not_answer(cluster, job, then):
    session = cluster.session(clock=QUICK)
    transport = Cutting(taken=True, then=then)
    cut = replace(session, scheduler=SlurmClient(transport, clock=QUICK, patience_s=0))
    with pytest.raises(AnswerLostError) as caught:
        submit(cut, job)
    (failure,) = caught.value.failures
    assert not failure.retryable
    assert cluster.calls("sbatch") == 1
    (entry,) = cluster.ledger.entries()
    assert (entry.job_id, entry.refused) == (None, False)
    assert Path(str(entry.remote_dir)).is_dir()
    resolve_submissions(session.scheduler, cluster.ledger)
    assert [entry.job_id for entry in cluster.ledger.entries()] == ["1"]


def test_connection_that_broke_before_sbatch_is_not_retried(session, cluster, job):
    away = SlurmClient(Cutting(taken=False), patience_s=1)
    cut = replace(session, scheduler=away)
    with rejected("answer-lost", AnswerLostError):
        submit(cut, job)
    assert cluster.calls("sbatch") == 0
    (entry,) = cluster.ledger.entries()
    assert (entry.job_id, entry.refused) == (None, False)


@pytest.mark.parametrize(("submitted_at", "refused"), [(0.0, True), (1e12, False)])
def test_lost_submission_is_given_up_after_sbatch_has_ended(
    session, cluster, submitted_at, refused
):
    entry = JobEntry(token="feed", name="x", user="u", submitted_at=submitted_at, remote_dir="/x")  # noqa: S106
    cluster.ledger.add(entry)
    resolve_submissions(session.scheduler, cluster.ledger)
    assert cluster.ledger.entries()[0].refused is refused


def git(folder: Path, *argv: str) -> None:
    settings = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", *settings, *argv], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repo"
    folder.mkdir()
    (folder / "a.py").write_text("one\n")
    git(folder, "init", "-q")
    git(folder, "add", "a.py")
    git(folder, "commit", "-qm", "one")
    return folder


def without_files(session: Session) -> Session:
    """The session of a cluster that has none of the files that it is asked for."""
    return replace(session, scheduler=SlurmClient(ScriptedTransport([Step(("test", "..."), rc=1)])))


def facts(folder: Path) -> dict:
    return client_facts(JobSpec(name="x", bundled="train"), folder=folder)


def test_submit_records_the_commit_and_uncommitted_changes(repository, tmp_path):
    """The diff runs no program of the repository's, and a huge one is cut."""
    git(repository, "config", "diff.external", f"touch {tmp_path}/was-here; false")
    (repository / "a.py").write_text("two\n")
    (repository / "new.py").write_text("")
    git_facts = facts(repository)["git"]
    assert len(git_facts["commit"]) == 40
    assert "-one\n+two\n" in git_facts["diff"]
    assert git_facts["diff_truncated"] is False
    assert "?? new.py" in git_facts["status"]
    assert not (tmp_path / "was-here").exists()
    (repository / "a.py").write_text("x" * 3 * MAX_DIFF)
    git_facts = facts(repository)["git"]
    assert (len(git_facts["diff"]), git_facts["diff_truncated"]) == (MAX_DIFF, True)
    assert facts(tmp_path)["git"] is None


SLOW_GIT = """#!/bin/sh
[ "$1" = --no-optional-locks ] || exit 1
case "$*" in
    *status*) touch %s/asked; exec sleep 1000 ;;
esac
exec %s "$@"
"""


def test_repository_that_takes_too_long_is_left_out(repository, tmp_path, monkeypatch):
    """git does not come to an end, and takes no lock that others may wait for."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "git").write_text(SLOW_GIT % (tmp_path, shutil.which("git")))
    (tmp_path / "bin" / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    job = JobSpec(name="x", bundled="train")
    assert client_facts(job, folder=repository, patience_s=2)["git"] is None
    assert (tmp_path / "asked").exists()


@pytest.mark.parametrize(
    ("bundled", "args", "put", "then"),
    [
        ("train", ["--lr", "1", "--config", "a.toml"], "a.toml", "--config '~/a.toml'"),
        ("train", ["--config={home}/a.toml"], "{home}/a.toml", "--config '~/a.toml'"),
        ("train", ["--nesterov", "--resume", "run/saved"], "run/saved", "--resume '~/saved'"),
        ("train", ["--data", "text:run/book.txt"], "run/book.txt", "--data 'text:~/book.txt'"),
        ("predict", ["--weights", "run", "a b.csv"], "'a b.csv'", "then use '~/a b.csv'"),
    ],
)
def test_argument_that_is_a_local_file_only_is_refused(
    session, tmp_path, monkeypatch, *, bundled, args, put, then
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("a.toml", "a b.csv", "run/saved/manifest.json", "run/book.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    job = JobSpec(name="j", bundled=bundled, args=tuple(arg.format(home=tmp_path) for arg in args))
    with rejected(
        "not-found/file-on-cluster", UsageError, f"`clusterctl put {put.format(home=tmp_path)}`"
    ) as caught:
        reject_local_files(without_files(session), [job])
    assert caught.value.fix.endswith(then)


def test_argument_that_may_be_a_file_on_the_cluster_is_passed(session, tmp_path, monkeypatch):
    """Nodes may have what lies outside of the home folder on a disk of their own.

    A relative path is also one in the home folder on the cluster, where `put` copies files.
    """
    monkeypatch.chdir(tmp_path)
    for name in ("auto", "digits", "cnn", "out"):
        (tmp_path / name).touch()
    args = ("--resume", "auto", "--data", "digits", "--model", "cnn", "--out", "out", "--config")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    job = JobSpec(name="j", bundled="train", args=(*args, str(tmp_path / "out")))
    reject_local_files(without_files(session), [job])
    monkeypatch.setenv("HOME", str(tmp_path))
    # The played cluster is this machine.
    for there in (
        str(tmp_path / "out"),
        "~/out",
        "out",
        "nowhere",
    ):
        reject_local_files(session, [JobSpec(name="j", bundled="train", args=(*args, there))])
    script = JobSpec(name="j", script=tmp_path / "out", args=("--config", "out"))
    reject_local_files(session, [script])
