"""A run on disk: whole or not at all, once, and checked."""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from clusterctl.errors import CollectError, SchedulerError, UnreachableError, UsageError
from clusterctl.runs import collect as collecting
from clusterctl.runs.collect import collect, collect_runs
from clusterctl.runs.fetch import ALL, Selection
from clusterctl.runs.find import Row
from clusterctl.runs.report import report_of
from clusterctl.runs.telemetry_files import NodeFile
from clusterctl.scheduler.base import comment_of
from clusterctl.scheduler.ends.judge import judge
from clusterctl.scheduler.session import Session
from clusterctl.scheduler.slurm.client import SlurmClient
from clusterctl.spec.job import JobSpec
from clusterctl.spec.load import dump_spec
from clusterctl.state.attempts import AttemptRecord
from clusterctl.state.ledger import UNCHANGED, Ledger
from clusterctl.state.run_record import RunRecord, TaskRecord
from tests.support.disks import FAULTS, small_disk
from tests.support.local_transport import LocalTransport
from tests.support.messages import condition, refused
from tests.support.played.cluster import PlayedCluster, finished, submit, submitted
from tests.unit.runs.fetched import Talk


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.mark.parametrize("fault", ["full", "read-only"])
def test_collect_after_a_full_disk_completes_the_run(session, cluster, tmp_path, fault):
    job_id = finished(session, cluster, tmp_path, "echo hello")
    with small_disk(mib=40) as disk:
        disk.suffer(fault)
        code, why = (
            ("disk-full/host", "0 MiB")
            if fault == "full"
            else ("file-unwritable/run", FAULTS[fault])
        )
        with refused(code, CollectError, why, "--out"):
            collect(session, out=disk.path / "runs")
        disk.recover()
        (run,) = collect(session, out=disk.path / "runs")
        assert [*(disk.path / "runs").iterdir()] == [run.directory]
        assert run.job_id == job_id


TELEMETRY = r"""mkdir -p telemetry
echo '{"kind": "host", "time": 1.5, "host": "n1", "versions": {"python": "3.11.2"}}' >telemetry/n1.jsonl
echo 'not json' >telemetry/n2.jsonl
"""


RESTARTED = """echo '{"time": 4e9, "event": "start", "restarts": 1}' >>job.events\n"""


def test_collected_run_has_all_files(session, cluster, tmp_path, out):
    script = tmp_path / "job.sh"
    metrics = "echo '{\"loss\": 0.5}' >metrics.jsonl"
    script.write_text(f"#!/bin/bash\necho hello\n{metrics}\ncd ..\n{TELEMETRY}{RESTARTED}")
    job_id = submit(session, JobSpec(name="mine", script=script, args=("--lr", "0.1"))).job_id
    cluster.wait_until_ended(job_id)
    (run,) = collect(session, [job_id], out=out)
    assert run.directory == out / f"demo-{job_id}-mine"
    sent = {"job.sh", "job.sbatch", "source.json", "spec.yaml"}
    written = {"stdout.log", "stderr.log", "job.events", "metrics.jsonl"}
    telemetry = {"telemetry/n1.jsonl", "telemetry/n2.jsonl"}
    ours = {
        "run.json",
        "sacct.json",
        "environment.json",
        "table.zip",
        "SHA256SUMS",
        "report.html",
    }
    files = {str(p.relative_to(run.directory)) for p in run.directory.rglob("*") if p.is_file()}
    assert files == sent | written | telemetry | ours
    assert (run.directory / "stdout.log").read_text() == "hello\n"
    assert (run.state, run.final, run.user, run.nodes) == ("COMPLETED", True, "hpc", ("n1",))
    assert run.elapsed_s is not None
    assert (run.args, run.config, run.metrics["loss"].last) == (("--lr", "0.1"), {"lr": 0.1}, 0.5)
    assert (run.price_per_hour, run.cost_usd) == (None, None)
    assert json.loads((run.directory / "sacct.json").read_text())["jobs"][0]["job_id"] == int(
        job_id
    )
    (restart,) = run.tasks[0].interruptions
    assert (restart["number"], restart["started"]) == (1, 4e9)
    environment = json.loads((run.directory / "environment.json").read_text())
    assert (environment["client"]["job"]["name"], environment["slurm"]) == ("mine", "22.05.8")
    assert environment["hosts"] == {"n1": {"host": "n1", "versions": {"python": "3.11.2"}}}
    path = run.directory / "run.json"
    # A later version may have more to tell.
    for more in ({}, {"something_new": 1}):
        path.write_text(json.dumps(json.loads(path.read_text()) | more))
        assert RunRecord.load(run.directory) == run


def priced(session: Session, usd_per_hour: float) -> Session:
    """The same session, with nodes that cost something."""
    partitions = tuple(
        p.model_copy(update={"price_per_hour": usd_per_hour}) for p in session.spec.partitions
    )
    spec = session.spec.model_copy(update={"partitions": partitions})
    session.workspace.spec.write_text(dump_spec(spec))
    return session


def test_cost_counts_all_nodes_of_all_tasks() -> None:
    attempts = [
        (AttemptRecord(start_time=1000, end_time=4600, nodes=("n1", "n2")),),
        (AttemptRecord(start_time=1000, end_time=2800, nodes=("n3",)),),
        (),
    ]
    tasks = [TaskRecord(id="7", state="COMPLETED", attempts=each) for each in attempts]
    assert sum(task.node_hours for task in tasks) == 2.5


def requeue(cluster: PlayedCluster, job_id: str, *, cancelled: bool) -> int:
    """Let a job of two nodes have an earlier attempt of 60 s on five nodes. Return the start of the
    second attempt, of 30 s.

    cancelled: the job was cancelled before its second attempt began.
    """
    job = cluster.job(job_id)
    start = int(job["start"])
    times = {"submit": start - 200, "start": start - 100, "end": start - 40}
    first = {**job, "state": "REQUEUED", **times, "nodes": "n[1-5]"}
    of_earlier_job = {**first, "dir": "/other", "start": 1, "end": 9}
    last = {"nodes": "n[2-3]", "end": start + 30}
    if cancelled:
        last = {"state": "CANCELLED", "nodes": "None assigned", "end": start}
    with cluster.state() as state:
        more = {"attempts": [of_earlier_job, first], "forgotten": True}
        state["jobs"][job_id] |= {**last, **more}
    return start


def write_energy(job_folder: str, start: int) -> None:
    """Write telemetry of two nodes with two GPUs, which use 1 and 2 W also between the attempts."""
    telemetry = Path(job_folder, "telemetry")
    telemetry.mkdir(exist_ok=True)
    samples = [
        {
            "kind": "sample",
            "time": start + at,
            "gpus": [{"index": i, "energy_mj": 1000 * at * (1 + i)} for i in range(2)],
        }
        for at in (-95, -45, 5, 25)
    ]
    for node in ("n2", "n3"):
        (telemetry / f"{node}.jsonl").write_text("\n".join(map(json.dumps, samples)))


@pytest.mark.parametrize(
    ("cancelled", "elapsed", "usd"),
    [(False, 90, 0.1), (True, 60, 0.0833333)],
    ids=["completed", "cancelled"],
)
def test_cost_counts_all_attempts_of_a_requeued_job(
    session, cluster, tmp_path, out, *, cancelled, elapsed, usd
):
    """The attempts of an earlier job with its id do not count. Nor does the energy that a GPU used
    between the attempts, because another job may have used it.
    """
    job_id = finished(session, cluster, tmp_path, "true")
    start = requeue(cluster, job_id, cancelled=cancelled)
    write_energy(cluster.job(job_id)["dir"], start)
    (run,) = collect(priced(session, 1.0), [job_id], out=out)
    assert [(a.start_time, a.end_time, len(a.nodes)) for a in run.attempts] == [
        (start - 100, start - 40, 5),
        *([] if cancelled else [(start, start + 30, 2)]),
    ]
    assert (run.submit_time, run.start_time, run.elapsed_s) == (
        start - 200,
        start - 100,
        elapsed,
    )
    assert Row(run).value("elapsed") == elapsed
    written = json.loads((run.directory / "run.json").read_text())
    assert {written[key] for key in ("node_hours", "gpu_energy_j")} == {
        run.node_hours,
        run.gpu_energy_j,
    }
    assert run.node_hours == pytest.approx(usd)
    # Of two nodes, each with a GPU and another one that uses twice as much.
    assert run.gpu_energy_j == 2 * (1 + 2) * (50 if cancelled else 70)
    assert run.cost_usd == pytest.approx(usd, abs=1e-4)
    assert run.nodes == ("n1", "n2", "n3", "n4", "n5")
    assert run.tasks[0].nodes == (run.nodes if cancelled else ("n2", "n3"))
    assert RunRecord.load(run.directory) == run


def test_cost_excludes_time_between_end_and_requeue(session, cluster, tmp_path, out):
    """A person requeued the job 40 s after its end, and the accounting ends the attempt only
    then.
    """
    job_id = finished(session, cluster, tmp_path, "true")
    job = cluster.job(job_id)
    start = job["start"]
    first = {**job, "state": "REQUEUED", "start": start - 50, "end": start - 8}
    cluster.change(job_id, attempts=[first], end=start + 5, restarts=1)
    events = [
        {"time": start - 50, "event": "start", "nodes": ["n1"]},
        {"time": start - 48, "event": "end", "status": 3},
        {"time": start, "event": "start", "restarts": 1, "nodes": ["n1"]},
    ]
    Path(job["dir"], "job.events").write_text("\n".join(map(json.dumps, events)))
    (run,) = collect(priced(session, 3600), [job_id], out=out)
    assert [attempt.seconds for attempt in run.attempts] == [2, 5]
    assert (run.elapsed_s, run.cost_usd) == (7, 7)
    assert [restart["ended"] for restart in run.tasks[0].interruptions] == [start - 48]


def test_energy_of_an_array_is_the_sum_of_its_tasks(session, cluster, tmp_path, out):
    (run,) = collect(session, [finished(session, cluster, tmp_path, "true")], out=out)
    tasks = [
        run.tasks[0].model_copy(update={"gpu_energy_j": joules}) for joules in (3.0, None, 4.0)
    ]
    energies = [run.model_copy(update={"tasks": part}).gpu_energy_j for part in (tasks, tasks[1:2])]
    assert energies == [7, None]


def test_attempts_without_accounting_are_those_of_the_job_itself(session, cluster, tmp_path, out):
    events = (
        {"time": 1000.0, "event": "start", "nodes": ["n1", "n2"]},
        {"time": 1060.5, "event": "end", "status": 3},
        {"time": 1061.0, "event": "requeue", "reason": "failed"},
        {"time": 2000.0, "event": "start", "restarts": 1, "nodes": ["n1"]},
        {"time": 2030.0, "event": "end", "status": 0},
    )
    lines = "\n".join(map(json.dumps, events))
    job_id = finished(session, cluster, tmp_path, f"cat >../job.events <<'END'\n{lines}\nEND")
    cluster.change(job_id, forgotten=True)
    quick = cluster.session(patience_s=0.0)
    quick.scheduler.no_accounting = "closed"
    quick.scheduler.ledger = session.ledger
    (run,) = collect(quick, [job_id], out=out)
    assert [(a.start_time, a.end_time, a.nodes) for a in run.attempts] == [
        (1000, 1061, ("n1", "n2")),
        (2000, run.end_time, ("n1",)),
    ]


@pytest.mark.parametrize("wrote_its_start", [True, False])
def test_killed_attempts_without_accounting_count(
    session, cluster, tmp_path, out, monkeypatch, *, wrote_its_start
):
    """The first attempt recorded no end, and the second may not even have recorded its start. What
    shows it is parsed once, although metrics are added to the table in between.
    """
    parsed = []
    blocks = NodeFile.blocks
    monkeypatch.setattr(NodeFile, "blocks", lambda own: parsed.append(own.member) or blocks(own))
    job_id = finished(session, cluster, tmp_path, "true")
    job = cluster.job(job_id)
    start = job["start"]
    events = [{"time": start - 1000, "event": "start", "nodes": ["n1"]}]
    if wrote_its_start:
        events += [{"time": start + 1, "event": "start", "restarts": 1, "nodes": ["n1"]}]
    samples = [{"kind": "sample", "time": start + at} for at in (-1700, -995, -940, 20)]
    folder = Path(job["dir"])
    (folder / "job.events").write_text("\n".join(map(json.dumps, events)))
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}')
    (folder / "telemetry").mkdir(exist_ok=True)
    lines = [sample for sample in samples if wrote_its_start or sample["time"] < start]
    (folder / "telemetry" / "n1.jsonl").write_text("\n".join([*map(json.dumps, lines), "torn"]))
    cluster.change(job_id, end=start + 30)
    quick = cluster.session(patience_s=0.0)
    quick.scheduler.no_accounting = "closed"
    quick.scheduler.ledger = session.ledger
    (run,) = collect(quick, [job_id], out=out)
    assert [(a.start_time, a.end_time, a.nodes) for a in run.attempts] == [
        (start - 1000, start - 940, ("n1",)),
        (start + wrote_its_start, start + 30, ("n1",)),
    ]
    assert run.elapsed_s == 90 - wrote_its_start
    assert run.left_out == ()
    assert parsed == ["telemetry/n1"]
    assert any("telemetry/n1.jsonl" in text for text in report_of([Row(run)]).missing)


HOSTILE = """cd ..
rm environment.client.json source.json
mkfifo source.json outputs.json
mkdir -p run.json sacct.json environment.client.json telemetry/n3.jsonl
touch run.json/x sacct.json/x environment.client.json/x telemetry/n3.jsonl/x
python3 -c "print('[' * 60_000)" >telemetry/n4.jsonl
"""


def test_collect_works_whatever_the_job_did_to_its_folder(session, cluster, tmp_path, out):
    job_id = finished(session, cluster, tmp_path, HOSTILE)
    (run,) = collect(session, [job_id], out=out)
    assert RunRecord.load(run.directory) == run
    environment = json.loads((run.directory / "environment.json").read_text())
    assert (environment["client"]["job"]["name"], environment["hosts"]) == ("mine", {})
    assert {
        one.path: one.reason for one in run.skipped if one.path != "telemetry.log"
    } == dict.fromkeys(("outputs.json", "source.json"), "a named pipe")
    kept = [f"{name}.json.from-job/x" for name in ("run", "sacct", "environment.client")]
    assert all((run.directory / name).is_file() for name in (*kept, "telemetry/n3.jsonl/x"))


def test_failed_run_has_its_diagnosis_and_its_cost(session, cluster, tmp_path, out):
    job_id = finished(session, cluster, tmp_path, "nosuchprogram || exit 3")
    with cluster.state() as state:
        state["jobs"][job_id]["end"] = state["jobs"][job_id]["start"] + 5400
    (run,) = collect(priced(session, 2.5), [job_id], out=out)
    assert (run.state, run.tasks[0].exit_code) == ("FAILED", 3)
    assert run.diagnosis is not None
    assert (run.diagnosis["code"], run.diagnosis["exit_code"]) == ("exit-code", 3)
    assert [hint["name"] for hint in run.diagnosis["hints"]] == ["command-not-found"]
    assert (run.price_per_hour, run.cost_usd) == (2.5, 3.75)
    assert RunRecord.load(run.directory) == run


@pytest.mark.parametrize("text", [None, "", "[]", "{}", '{"version": 1'])
def test_load_of_a_folder_without_a_run_is_refused(tmp_path, text):
    if text is not None:
        (tmp_path / "run.json").write_text(text)
    with refused("file-invalid/run", CollectError):
        RunRecord.load(tmp_path)


CHECK = ("sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS")


def test_collect_twice_changes_nothing_and_checksums_match(session, cluster, tmp_path, out):
    job_id = finished(
        session, cluster, tmp_path, r"touch $'new\nline' 'back\slash' $'\xff'; echo x >'a b'"
    )
    (run,) = collect(session, [job_id], out=out)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert collect(session, [job_id], out=out) == (run,)
    assert collect(session, out=out) == ()
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
    subprocess.run(CHECK, cwd=run.directory, check=True)
    listed = len((run.directory / "SHA256SUMS").read_bytes().splitlines())
    # Itself, and report.html.
    assert listed == sum(1 for p in run.directory.rglob("*") if p.is_file()) - 2
    (run.directory / "a b").write_text("y\n")
    assert (
        subprocess.run(CHECK, cwd=run.directory, check=False, capture_output=True).returncode == 1
    )


CHECKPOINTS = """mkdir -p checkpoints/step_1 checkpoints/step_2; echo 1 >checkpoints/step_1/w
echo 2 >checkpoints/step_2/w; echo result >result; touch $'new\\nline'"""


def test_later_collect_adds_skipped_files_and_changes_no_other(session, cluster, tmp_path, out):
    job_id = finished(session, cluster, tmp_path, CHECKPOINTS)
    (run,) = collect(session, out=out)
    (left,) = run.skipped
    assert (left.path, left.files, left.bytes) == ("files/checkpoints/step_1", 1, 2)
    assert f"collect {job_id} --checkpoints all`" in left.reason
    assert collect(session, [job_id], out=out)[0].skipped == run.skipped
    assert collect(session, out=out) == ()
    (run.directory / "result").write_text("looked at")
    (run.directory / "NOTES").write_text("mine")
    (Path(run.remote_dir) / "stdout.log").unlink()  # to make room there
    (again,) = collect(session, out=out, selection=Selection("all"))
    assert (again.skipped, again.directory, again.files) == ((), run.directory, run.files + 1)
    content = {
        name: (again.directory / name).read_text() for name in ("result", "NOTES", "stdout.log")
    }
    assert content == {"result": "looked at", "NOTES": "mine", "stdout.log": ""}
    assert (again.directory / "checkpoints" / "step_1" / "w").read_text() == "1\n"
    (run.directory / "result").write_text("result\n")
    subprocess.run(CHECK, cwd=run.directory, check=True)
    assert collect(session, out=out, selection=ALL) == ()
    assert [path.name for path in out.iterdir()] == [run.directory.name]


def test_removed_run_is_collected_again_only_by_its_id(session, cluster, tmp_path, out):
    job_id = finished(session, cluster, tmp_path, "true")
    collect(session, [job_id], out=out)
    shutil.rmtree(out)
    for selection in (Selection(), Selection("all")):
        assert collect(session, out=out, selection=selection) == ()
    for asked in ({"ids": [job_id]}, {"selection": ALL}):
        (again,) = collect(session, out=out, **asked)
        assert RunRecord.load(again.directory) == again
        shutil.rmtree(out)


@pytest.mark.parametrize("what", ["run", "folder", "file"])
def test_collect_leaves_a_folder_in_the_place_of_a_run(session, cluster, tmp_path, out, what):
    job_id = finished(session, cluster, tmp_path, "echo mine")
    place = out / f"demo-{job_id}-mine"
    if what == "file":
        out.mkdir()
        place.write_text("theirs")
    else:
        place.mkdir(parents=True)
        (place / "stdout.log").write_text("theirs")
    if what == "run":  # of a cluster that had this name before
        (run,) = collect(session, [job_id], out=tmp_path / "elsewhere")
        (place / "run.json").write_text(run.model_copy(update={"token": "another"}).as_json())
        (tmp_path / "elsewhere" / place.name).rename(tmp_path / "moved")
    (run,) = collect(session, [job_id], out=out)
    assert run.directory == out / f"demo-{job_id}-mine-2"
    assert (run.directory / "stdout.log").read_text() == "mine\n"
    assert (place if what == "file" else place / "stdout.log").read_text() == "theirs"


def test_snapshot_is_replaced_when_the_job_is_over(session, cluster, tmp_path, out):
    job_id = submitted(
        session, tmp_path, "echo early; until [[ -e go ]]; do sleep 0.05; done; echo late"
    )
    log = Path(cluster.job(job_id)["dir"]) / "stdout.log"
    while not log.exists() or not log.stat().st_size:
        time.sleep(0.05)
    (snapshot,) = collect(priced(session, 2.0), [job_id], out=out)
    assert (snapshot.state, snapshot.final) == ("RUNNING", False)
    assert (snapshot.end_time, snapshot.elapsed_s, snapshot.cost_usd) == (None, None, None)
    assert snapshot.price_per_hour == 2.0
    assert (snapshot.directory / "stdout.log").read_text() == "early\n"
    (snapshot.directory / "NOTES").write_text("mine")
    (snapshot.directory / "telemetry").mkdir(exist_ok=True)
    (snapshot.directory / "telemetry" / "my\nplot.png").write_text("mine too")
    (snapshot.directory / "data").symlink_to(tmp_path)
    (Path(snapshot.remote_dir) / "files" / "go").touch()
    cluster.wait_until_ended(job_id)
    (run,) = collect(session, out=out)
    assert (run.state, run.final, run.directory) == ("COMPLETED", True, snapshot.directory)
    assert (run.directory / "NOTES").read_text() == "mine"
    assert (run.directory / "telemetry" / "my\nplot.png").read_text() == "mine too"
    assert (run.directory / "data").readlink() == tmp_path
    assert (run.directory / "stdout.log").read_text() == "early\nlate\n"
    assert [path.name for path in out.iterdir()] == [run.directory.name]


class Dropping(LocalTransport):
    """Loses the connection at the n-th command, or piece of an answer."""

    def __init__(self, at: int) -> None:
        self._left = at

    def _count(self) -> None:
        self._left -= 1
        if self._left == 0:
            raise UnreachableError("the connection broke")

    def run(self, argv, **options):
        self._count()
        return super().run(argv, **options)

    @contextmanager
    def converse(self, argv, **options):
        self._count()
        with super().converse(argv, **options) as talk:
            yield Talk(talk, self._receive)

    def _receive(self, talk):
        self._count()
        return talk.receive()


def test_interrupted_collect_leaves_no_partial_run(session, cluster, tmp_path, out):
    job_id = finished(session, cluster, tmp_path, TELEMETRY)
    for at in range(1, 50):
        transport = Dropping(at)
        shaky = replace(session, scheduler=SlurmClient(transport, patience_s=0))
        try:
            collect(shaky, [job_id], out=out)
        except UnreachableError:
            assert not (out / f"demo-{job_id}-mine").exists()
            assert cluster.ledger.find(job_id).run_dir is None
        else:
            break
    assert at > 4  # it was interrupted at each in turn
    assert RunRecord.load(out / f"demo-{job_id}-mine").final
    assert [path.name for path in out.iterdir()] == [f"demo-{job_id}-mine"]


def test_job_that_slurm_forgot_is_collected(session, cluster, tmp_path, out):
    purged, known = (
        finished(session, cluster, tmp_path, f"echo {name}", name) for name in ("a", "b")
    )
    assert [run.state for run in collect(session, [known], out=out)] == ["COMPLETED"]
    with cluster.state() as state:
        del state["jobs"][purged]
    (run,) = collect(session, out=out)
    assert (run.job_id, run.state, run.final) == (purged, "PURGED", True)
    # The job has recorded its start itself.
    assert (run.nodes, len(run.attempts)) == (("n1",), 1)
    assert (run.directory / "stdout.log").read_text() == "a\n"
    assert collect(session, out=out) == ()
    assert sorted(path.name for path in out.iterdir()) == ["demo-1-a", "demo-2-b"]


@pytest.mark.parametrize("is_known", [True, False])
def test_destroyed_job_is_not_recorded_with_a_later_job_of_its_id(
    session, cluster, tmp_path, out, is_known
):
    """`down` was killed, and `up` created the cluster again, whose Slurm numbers jobs from 1.

    is_known: whether the later job was submitted from this machine. Otherwise only its comment
        tells.
    """
    job_id = finished(session, cluster, tmp_path, "echo old", "a")
    (old,) = cluster.ledger.entries()
    shutil.rmtree(old.remote_dir)
    later = "0123abcd"
    comment = "" if is_known else comment_of(later)
    cluster.change(job_id, state="FAILED", exit_code=3, comment=comment, dir=str(tmp_path / later))
    if is_known:
        cluster.ledger.add(
            replace(old, token=later, remote_dir=str(tmp_path / later), run_dir="/r")
        )
    (run,) = collect(session, out=out)
    assert (run.token, run.state, run.final) == (old.token, "PURGED", True)
    assert not (run.directory / "sacct.json").exists()
    assert [skipped.path for skipped in run.skipped] == [".", "sacct.json"]


def test_state_that_only_a_later_slurm_has_makes_a_snapshot(session, cluster, tmp_path, out):
    job_id = finished(session, cluster, tmp_path, "echo a")
    cluster.change(job_id, state="DANCING")
    (run,) = collect(session, out=out)
    assert (run.state, run.final) == ("UNKNOWN", False)
    assert "'DANCING'" in run.tasks[0].reason
    cluster.change(job_id, state="COMPLETED")
    assert [run.state for run in collect(session, out=out)] == ["COMPLETED"]


def test_run_is_collected_without_accounting(session, cluster, tmp_path, out):
    job_id = finished(session, cluster, tmp_path, "true")
    cluster.change(job_id, odd="sacct: fatal: no \x1b serializer")
    (run,) = collect(session, out=out)
    (skipped,) = run.skipped
    assert skipped.path == "sacct.json"
    assert r"no \x1b serializer" in skipped.reason
    assert not (run.directory / "sacct.json").exists()


@pytest.mark.parametrize(("has_records", "state"), [(True, "COMPLETED"), (False, "UNKNOWN")])
def test_collect_without_accounting_completes_later(session, cluster, tmp_path, has_records, state):
    """Jobs that have left the queue have the state of their records, if hosts share a folder."""
    ids = [finished(session, cluster, tmp_path, "echo x >result.txt") for _ in range(2)]
    cluster.change(ids[0], forgotten=True)
    with cluster.state() as played:
        played["accounting_away"] = True
    quick = cluster.session(patience_s=0.0)
    quick.scheduler.ledger = session.ledger if has_records else None
    runs = collect(quick, out=tmp_path / "runs")
    assert {run.job_id: (run.state, run.final) for run in runs} == {
        ids[0]: (state, has_records),
        ids[1]: ("COMPLETED", True),
    }
    for run in runs:
        assert (run.directory / "result.txt").exists()
        assert [skipped.path for skipped in run.skipped] == ["sacct.json"]
    with cluster.state() as played:
        played["accounting_away"] = False
    runs = collect(session, out=tmp_path / "runs")
    assert [(run.job_id, run.state, run.skipped) for run in runs] == [
        (i, "COMPLETED", ()) for i in ids
    ]
    assert all((run.directory / "sacct.json").exists() for run in runs)


def test_runs_that_cannot_be_collected_are_named_and_discarded(session, cluster, tmp_path, out):
    for name in ("a", "b", "c"):
        finished(session, cluster, tmp_path, "true", name)
    out.mkdir()
    for name in ("1-a", "2-b"):
        (out / f".demo-{name}.incomplete").write_text("in the way")
    environment: list[RunRecord] = []
    with refused("transfer-failed/runs", CollectError, "job 1: ") as caught:
        environment.extend(collect_runs(session, out=out))
    assert caught.value.jobs == ("1", "2")
    assert "job 2" in caught.value.failures[1].cause
    assert [run.job_id for run in environment] == ["3"]
    assert [path.name for path in out.iterdir() if path.name[0] != "."] == ["demo-3-c"]
    with pytest.raises(CollectError) as caught:
        collect(session, out=out, discard=["1"])
    assert caught.value.jobs == ("2",)
    (out / ".demo-2-b.incomplete").unlink()
    assert [run.job_id for run in collect(session, out=out, discard=["1"])] == ["2"]


class FullDisk(LocalTransport):
    """A host on which the file system of a job's folder is full."""

    def run(self, argv, **options):
        result = super().run(argv, **options)
        return replace(result, stdout=result.stdout.replace('"full": false', '"full": true'))


@pytest.mark.parametrize(
    ("body", "is_full", "code"),
    [
        ("exit 3", True, "disk-full"),
        ("exit 3", False, "exit-code"),
        ("echo step 1; exit 3", True, "exit-code"),
    ],
)
def test_run_has_the_cause_of_a_full_disk_that_logs_shows(
    session, cluster, tmp_path, out, *, body, is_full, code
):
    job_id = finished(session, cluster, tmp_path, body)
    transport = FullDisk() if is_full else LocalTransport()
    session = replace(session, scheduler=SlurmClient(transport, patience_s=0))
    shown = judge(session, session.scheduler.jobs([job_id]))[job_id]
    (run,) = collect(session, [job_id], out=out)
    assert (run.diagnosis["code"], condition(shown)) == (code, code)


class LostLogs(LocalTransport):
    """A host that is lost once the job's files were fetched."""

    def run(self, argv, **options):
        if argv[-1].startswith('["ends"'):
            raise UnreachableError("lost", host=self.host)
        return super().run(argv, **options)


def test_run_is_diagnosed_by_its_collected_logs(session, cluster, tmp_path, out):
    job_id = finished(session, cluster, tmp_path, "echo no such data; exit 3")
    session = replace(session, scheduler=SlurmClient(LostLogs(), patience_s=0))
    shown = judge(session, session.scheduler.jobs([job_id]))[job_id]
    assert not shown.lines
    (run,) = collect(session, [job_id], out=out)
    assert run.diagnosis["lines"] == ["no such data"]


def test_folder_that_can_not_be_written(session, cluster, tmp_path, out, monkeypatch):
    """Or that another collect is still writing when the wait for it ends."""
    monkeypatch.setattr(collecting, "WAIT_S", 0.0)
    job_id = finished(session, cluster, tmp_path, "true")
    (tmp_path / "file").write_text("")
    with refused("file-unwritable/run", CollectError, "--out"):
        collect(session, [job_id], out=tmp_path / "file" / "runs")
    work = out / f".demo-{job_id}-mine.incomplete"
    work.mkdir(parents=True)
    with (work / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with refused("in-use/run", CollectError):
            collect(session, [job_id], out=out)
    assert collect(session, [job_id], out=out)


def test_jobs_of_other_users_are_not_collected(session, cluster, tmp_path, out):
    with refused("not-found/job", SchedulerError, "77") as caught:
        collect(session, ["77"], out=out)
    assert not caught.value.failures[0].retryable
    with pytest.raises(UsageError):
        collect(session, ["../x"], out=out)
    job_id = finished(session, cluster, tmp_path, "true")
    # The second has copied the comment of a job of ours.
    eves = {"user": "eve", "comment": "clusterctl:another"}
    not_ours = "not-yours/job"
    for forged, code in (
        ({"comment": "mine"}, not_ours),
        ({}, not_ours),
        (eves, "not-yours/user"),
    ):
        with cluster.state() as state:
            state["jobs"]["500"] = state["jobs"][job_id] | {"dir": str(tmp_path)} | forged
        with refused(code, SchedulerError):
            collect(session, ["500"], out=out)
    assert [entry.job_id for entry in cluster.ledger.entries()] == [job_id]


def test_job_of_another_workspace_is_collected_by_its_id(session, cluster, tmp_path, out):
    job_id = finished(session, cluster, tmp_path, "true")
    cluster.change(job_id, name="../../hostile\x1b name")
    elsewhere = replace(session, ledger=Ledger(tmp_path / "other.jsonl"))
    elsewhere.workspace.spec.write_bytes(session.workspace.spec.read_bytes())
    (run,) = collect(elsewhere, [job_id], out=out)
    assert run.directory.parent == out
    assert run.directory.name == f"demo-{job_id}-.._.._hostile__name"
    # What was sent with it is not known here: what its folder has under our names is not taken for
    # ours.
    assert (run.directory / "job.sbatch.from-job").is_file()
    assert not (run.directory / "job.sbatch").exists()
    assert (run.directory / "spec.yaml").is_file()
    assert run.source is None


def test_collect_of_a_task_collects_its_array(session, cluster, tmp_path, out):
    job_id = finished(session, cluster, tmp_path, "true")
    (run,) = collect(session, [f"{job_id}_3"], out=out)
    assert run.job_id == job_id


def test_collect_skips_data_that_was_sent_unchanged(session, cluster, tmp_path, out):
    folder = tmp_path / "project"
    folder.mkdir()
    for name in ("large", "changed", "grown"):
        (folder / name).write_bytes(bytes(2 << 20))
    (folder / "small").write_text("small")
    (folder / "long").write_text("long\n" * (1 << 18))
    (folder / "image").write_bytes(b"\x89PNG\0")
    (folder / "image2").write_bytes(b"\x89PNG\0")
    (folder / "link").symlink_to("large")
    (folder / "turned").symlink_to("large")
    body = "printf x | dd of=changed conv=notrunc; echo >>grown; printf '\\211PNX\\0' >image2; "
    body += "ln -sf small turned; cp large made; "
    body += "mkdir task-1; ln -s ../small task-1/small; ln -s ../made task-1/x; "
    body += "ln -s nowhere gone; ln -s /etc etc"
    job_id = finished(session, cluster, folder, body)
    (run,) = collect(session, [job_id], out=out)
    skipped = {one.path: one.reason for one in run.skipped}
    link = "a symbolic link"
    data = dict.fromkeys(("large", "long", "image", "link"), UNCHANGED)
    reasons = {**data, "gone": link, "etc": link}
    assert skipped == {f"files/{name}": reason for name, reason in reasons.items()}
    targets = {one.path: one.target for one in run.skipped if one.target}
    assert targets == {"files/gone": "nowhere", "files/etc": "/etc"}
    turned = run.directory / "turned"
    assert (str(turned.readlink()), turned.read_text()) == ("small", "small")
    assert str((run.directory / "task-1/x").readlink()) == "../made"
    for name in ("changed", "grown", "small", "made", "image2"):
        assert (run.directory / name).is_file()
    assert run.source == json.loads((run.directory / "source.json").read_text())["hash"]
    assert [one.down for one in run.not_here] == ["deletes", "deletes"]
