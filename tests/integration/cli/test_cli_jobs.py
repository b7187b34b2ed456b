"""`jobs`: the table, one job in full, and what is shown again as it changes; `submit` by a script."""

from __future__ import annotations

import io
import json
import shlex
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from clusterctl.cli import cancel, jobs, logs, submit, waiting
from clusterctl.cli.output import Screen, Terminated
from clusterctl.cluster.status import Status
from clusterctl.errors import SchedulerError, SlurmAwayError, UsageError, WaitTimeoutError
from clusterctl.hosts.needs import REPORT, UnmetNeed
from clusterctl.jobs.watch import ChangeNotes, wait
from clusterctl.scheduler.base import JobInfo, JobState
from clusterctl.scheduler.history import Alarm
from clusterctl.scheduler.session import Session
from clusterctl.scheduler.slurm.client import SlurmClient
from clusterctl.util.progress import Clock
from tests.support.messages import condition, refused, shows
from tests.support.played.cluster import PlayedCluster, node_record, submitted
from tests.support.processes import eventually

TEXT = Screen(json=False, color=False)
JSON = Screen(json=True, color=False)


def ended(
    session: Session, cluster: PlayedCluster, folder: Path, body: str, name: str = "mine"
) -> str:
    job_id = submitted(session, folder, body, name)
    cluster.wait_until_ended(job_id)
    return job_id


def test_table_has_times_and_exit_codes(played_session, cluster, tmp_path, capsys) -> None:
    ended(played_session, cluster, tmp_path, "true", "first")
    ended(played_session, cluster, tmp_path, "exit 3", "second")
    jobs.jobs(TEXT)
    head, second, first = (line.split() for line in capsys.readouterr().out.splitlines())
    assert head == "JOB NAME STATE NODES SUBMITTED ELAPSED EXIT".split()
    assert second[:4] == ["2", "second", "FAILED", "n1"]
    # Slurm forgets the reasons of ended jobs after some minutes.
    assert (second[-1], first[-1]) == ("3", "0")


def test_jobs_fit_a_terminal_of_80_columns(played_session, capsys, monkeypatch) -> None:
    """With names of usual lengths; a time of another year is a date."""
    now = int(time.time())
    known = {"name": "train_resnet", "user": "ada", "nodes": ("demo-train-1", "demo-train-2")}
    run = JobInfo(
        number=1234, state=JobState.RUNNING, reason="", start_time=now - 9, **known, submit_time=now
    )
    old = replace(
        run, number=12, state=JobState.COMPLETED, submit_time=now - 2 * 366 * 86400, exit_code=0
    )
    monkeypatch.setattr(SlurmClient, "jobs", lambda _, _ids: (run, old))
    jobs.jobs(TEXT, ["12", "1234"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    submitted_at = [line[lines[0].index("SUBMITTED") :].split("  ")[0] for line in lines[1:]]
    assert [len(text) for text in submitted_at] == [len("11-27 22:13"), len("2024-11-27")]


def test_jobs_omits_and_counts_older_jobs(
    played_session, cluster, tmp_path, capsys, monkeypatch
) -> None:
    monkeypatch.setattr(jobs, "_RECENT", 1)
    for _ in range(3):
        ended(played_session, cluster, tmp_path, "true")
    jobs.jobs(TEXT)
    output = capsys.readouterr()
    assert [line.split()[0] for line in output.out.splitlines()] == ["JOB", "3"]
    assert shows(output.err, "older-jobs")
    assert output.err.startswith("2 ")
    jobs.jobs(JSON)
    answer = json.loads(capsys.readouterr().out)
    assert ([one["job_id"] for one in answer["jobs"]], answer["older"]) == (["3"], 2)
    jobs.jobs(JSON, everything=True)
    output = capsys.readouterr()
    answer = json.loads(output.out)
    assert ([one["job_id"] for one in answer["jobs"]], answer["older"]) == (["3", "2", "1"], 0)
    assert output.err == ""


def test_jobs_with_one_id_shows_the_whole_job(played_session, cluster, tmp_path, capsys) -> None:
    job_id = ended(
        played_session, cluster, tmp_path, "echo said; mkdir deep; echo 1 >deep/rank-0.log; exit 3"
    )
    jobs.jobs(TEXT, [job_id])
    facts, _, cause = capsys.readouterr().out.partition("\n\n")
    output = dict(line.split(maxsplit=1) for line in facts.splitlines())
    assert (output["state"], output["exit"], output["resources"]) == (
        "FAILED",
        "3",
        "cpu=1,mem=1G,node=1",
    )
    assert output["folder"] == str(next(cluster.home.glob("clusterctl/jobs/mine-*")))
    assert output["script"] == f"{output['folder']}/job.sbatch"
    assert "deep/rank-0.log (2 B), stderr.log (0 B), stdout.log (5 B), " in output["files"]
    assert "clusterctl collect 1" in output["collected"]
    summary, *details = cause.splitlines()
    assert shows(summary, "exit-code")
    assert (summary.startswith("job 1 (mine)"), " on n1" in summary) == (True, True)
    assert "| said" in details
    entry = played_session.ledger.find(job_id)
    assert entry is not None
    played_session.ledger.update(entry, run_dir="/home/ada/runs/demo-1-mine")
    jobs.jobs(JSON, [job_id])
    (one,) = json.loads(capsys.readouterr().out)["jobs"]
    assert one["run_dir"] == "/home/ada/runs/demo-1-mine"
    assert (one["diagnosis"]["code"], one["diagnosis"]["exit_code"]) == ("exit-code", 3)
    assert {"path": "stdout.log", "bytes": 5, "host": played_session.transport.host} in one["files"]


def test_jobs_tells_a_run_that_was_collected_before_the_end(
    played_session, cluster, tmp_path, capsys
) -> None:
    job_id = ended(played_session, cluster, tmp_path, "true")
    line = _collected_line(played_session, capsys, job_id, tmp_path, "RUNNING")
    assert f"`clusterctl collect {job_id}`" in line
    assert "RUNNING" in line
    line = _collected_line(played_session, capsys, job_id, tmp_path, "COMPLETED")
    assert line.split() == ["collected", str(tmp_path)]


def _collected_line(session, capsys, job_id: str, folder: Path, state: str) -> str:
    """The line about a run that was collected in a state of the job."""
    entry = session.ledger.find(job_id)
    assert entry is not None
    session.ledger.update(entry, run_dir=str(folder), run_state=state)
    jobs.jobs(TEXT, [job_id])
    lines = capsys.readouterr().out.splitlines()
    return next(line for line in lines if line.startswith("collected"))


def test_jobs_shows_restarts_of_a_job(played_session, cluster, tmp_path, capsys) -> None:
    """After `submit --wait`, and in the job's full view."""
    start = '{"time": 4e9, "event": "start", "restarts": 1}'
    job_id = ended(played_session, cluster, tmp_path, f"echo '{start}' >>../job.events")
    jobs.jobs(JSON, [job_id])
    assert json.loads(capsys.readouterr().out)["jobs"][0]["restarts"] == []
    cluster.change(job_id, restarts=1)
    jobs.jobs(JSON, [job_id])
    (restart,) = json.loads(capsys.readouterr().out)["jobs"][0]["restarts"]
    assert (restart["number"], restart["started"]) == (1, 4e9)
    jobs.jobs(TEXT, [job_id])
    assert restart["cause"] in capsys.readouterr().out
    wait(played_session, [job_id], on_change=ChangeNotes(played_session, TEXT.note))
    assert restart["cause"] in capsys.readouterr().err


def test_status_notes_missing_accounting(played_session, cluster, capsys) -> None:
    jobs.status(TEXT)
    assert not shows(capsys.readouterr().out, "no-accounting")
    path = cluster.root / "bin" / "sacctmgr"
    path.write_text("#!/bin/sh\necho 'sacctmgr: error: Connection refused' >&2\nexit 1\n")
    jobs.status(TEXT)
    assert shows(capsys.readouterr().out, "no-accounting")
    jobs.status(JSON)
    assert "Connection refused" in json.loads(capsys.readouterr().out)["accounting_failure"]


def lacking_controller(cluster: PlayedCluster) -> UnmetNeed:
    """Let the controller's health check report a lack, and return it."""
    lack = UnmetNeed("disk-full", "too little disk space", "/var has 3 MiB free", "remove some")
    path = cluster.root / "bin" / "sudo"
    report = shlex.quote(json.dumps([asdict(lack)]))
    path.write_text(f'#!/bin/sh\n[ "$*" = "{" ".join(REPORT[1:])}" ] && echo {report}\n')
    path.chmod(0o755)
    return lack


def test_status_names_what_the_controller_lacks(played_session, cluster, capsys) -> None:
    """The cluster has no nodes, which could not be ready either."""
    inventory = played_session.workspace.inventory
    facts = json.loads(inventory.read_text())
    inventory.write_text(json.dumps({**facts, "hosts": facts["hosts"][:1]}))
    jobs.status(JSON)
    answer = json.loads(capsys.readouterr().out)
    assert (answer["ready"], answer["controller_lacks"]) == (True, [])
    lack = lacking_controller(cluster)
    jobs.status(JSON)
    answer = json.loads(capsys.readouterr().out)
    assert (answer["ready"], answer["controller_lacks"]) == (False, [asdict(lack)])
    jobs.status(TEXT)
    output = capsys.readouterr().out
    assert "NOT ready" in output
    assert lack.why in output
    assert lack.fix in output


def test_status_without_slurmctld_names_what_the_controller_lacks(
    played_session, cluster, set_clock
) -> None:
    played_session.workspace.configured.write_text("inputs")
    with cluster.state() as state:
        state["away"] = 1000
    slept: list[float] = []
    set_clock(Clock(lambda: sum(slept), slept.append))
    with pytest.raises(SlurmAwayError) as caught:
        jobs.status(JSON)
    assert condition(caught.value) == "slurm-away"
    lack = lacking_controller(cluster)
    with pytest.raises(SlurmAwayError) as caught:
        jobs.status(JSON)
    assert condition(caught.value) == "slurm-away/controller"
    (failure,) = caught.value.failures
    assert (failure.about, failure.cause, failure.fix) == (lack.code, lack.why, lack.fix)


def test_status_of_a_foreign_cluster_has_partitions(
    played_session, cluster, tmp_path, capsys
) -> None:
    """It lists the user's own jobs, and of the nodes, which may be thousands, those out of
    service.
    """
    inventory = played_session.workspace.inventory
    inventory.write_text(json.dumps({**json.loads(inventory.read_text()), "is_foreign": True}))
    job_id = submitted(played_session, tmp_path, "sleep 60")
    with cluster.state() as state:
        state["partitions"] = [
            ["short*", "up", "30:00", "1/1/0/2"],
            ["gpuq", "down", "1:00:00", "0/0/1/1"],
        ]
        state["nodes"] = [
            node_record("n1", "short"),
            node_record("n7", "gpuq", "drained", Reason="bad DIMM, ticket 12"),
        ]
    jobs.status(JSON)
    answer = json.loads(capsys.readouterr().out)
    assert (answer["ready"], answer["nodes"], [job["job_id"] for job in answer["jobs"]]) == (
        True,
        [],
        [job_id],
    )
    short, gpus = answer["partitions"]
    assert (short["name"], short["is_default"], short["idle"], short["nodes"]) == (
        "short",
        True,
        1,
        2,
    )
    assert (gpus["name"], gpus["is_up"], gpus["other"]) == ("gpuq", False, 1)
    (out,) = answer["out_of_service"]
    assert (out["name"], out["state"], out["reason"]) == ("n7", "drained", "bad DIMM, ticket 12")
    jobs.status(TEXT)
    shown = capsys.readouterr().out
    assert "gpuq" in shown
    assert "bad DIMM, ticket 12" in shown


HUNG = {
    "time": 200,
    "event": "hang",
    "seconds": 90,
    "summary": "rank 1 at x.py:3",
    "action": "warn",
}


@pytest.mark.parametrize(("log_is_shown", "shown"), [(False, ["idle", "full"]), (True, [])])
def test_alarm_is_reported_once_and_not_beside_the_log_that_has_it(
    played_session, log_is_shown: bool, shown: list[str]
) -> None:
    lines: list[str] = []
    report = ChangeNotes(played_session, lines.append, log_is_shown=log_is_shown)
    job = JobInfo(number=1, name="x", user="hpc", state=JobState.RUNNING, reason="")
    idle, full = (Alarm(kind=kind, summary=kind, since=0, until=90) for kind in ("idle", "full"))
    for alarms in ((idle,), (idle._replace(until=99), full), (full,)):
        jobs = (replace(job, alarms=alarms),)
        report(jobs, jobs)
    assert [line.split(": ")[1].partition(",")[0] for line in lines] == shown


def test_end_is_not_reported_if_the_caller_shows_it(played_session) -> None:
    lines: list[str] = []
    report = ChangeNotes(played_session, lines.append, end_is_shown=True)
    one, other = (
        JobInfo(number=n, name="x", user="hpc", state=JobState.COMPLETED, reason="") for n in (1, 2)
    )
    report((one,), (one, replace(other, state=JobState.RUNNING)))
    report((other,), (one, other))
    assert [line.split(" (")[0] for line in lines] == ["job 1"]


def test_hang_of_a_job_is_shown_until_its_next_progress(
    played_session, cluster, tmp_path, capsys
) -> None:
    """In the lists, in the job's full view, and while a user waits for the job; until its next
    progress.
    """
    job_id = submitted(
        played_session, tmp_path, "touch ../ready; until [ -e ../go ]; do sleep 0.1; done"
    )
    folder = Path(cluster.job(job_id)["dir"])
    eventually((folder / "ready").exists)
    events = folder / "job.events"
    events.write_text(f'{{"time": 9, "event": "start"}}\n{json.dumps(HUNG)}\n')
    cluster.change(job_id, start=int(time.time()) - 3600)
    for show in (jobs.jobs, jobs.status, lambda screen: jobs.jobs(screen, [job_id])):
        show(JSON)
        (job,) = json.loads(capsys.readouterr().out)["jobs"]
        assert (job["hang"]["summary"], job["hang"]["since"]) == (HUNG["summary"], 110)
        show(TEXT)
        assert str(HUNG["summary"]) in capsys.readouterr().out
    with pytest.raises(WaitTimeoutError):
        wait(
            played_session, [job_id], on_change=ChangeNotes(played_session, TEXT.note), timeout_s=0
        )
    assert shows(capsys.readouterr().err, "job-hangs")
    with events.open("a") as file:
        file.write('{"time": 300, "event": "progress"}\n')
    jobs.jobs(JSON)
    assert json.loads(capsys.readouterr().out)["jobs"][0]["hang"] is None
    (folder / "go").touch()
    cluster.wait_until_ended(job_id)


def test_jobs_shows_a_job_with_a_removed_folder(played_session, cluster, tmp_path, capsys) -> None:
    ended(played_session, cluster, tmp_path, 'rm -rf -- "${PWD%/*}"')
    jobs.jobs(TEXT, ["1"])
    assert shows(capsys.readouterr().out, "job-folder-empty")


@pytest.mark.parametrize("ending", [KeyboardInterrupt(), Terminated(143)], ids=repr)
def test_detaching_from_logs_is_no_error(played_session, capfd, monkeypatch, ending) -> None:
    def ends(*_: object, **__: object) -> None:
        raise ending

    monkeypatch.setattr(logs.watch, "follow", ends)
    logs.logs(TEXT, "1", follow=True)
    details = capfd.readouterr().err
    assert shows(details, "detached")
    assert "logs 1 -f`" in details


def test_detaching_from_a_wait_lets_the_job_go_on(
    played_session, cluster, capfd, monkeypatch
) -> None:
    job_id = submitted(played_session, cluster.root, "sleep 60")

    def ends(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(waiting.watch, "wait", ends)
    with pytest.raises(KeyboardInterrupt):
        waiting.wait(TEXT, [job_id])
    details = capfd.readouterr().err
    assert shows(details, "detached")
    assert "not cancelled" in details


def test_wait_for_array_shows_counts_and_failures(played_session, capsys, monkeypatch) -> None:
    """Three lines a task would be 600 of a sweep of 200."""
    looks = iter(["PPP", "CRP", "CFR", "CFR", "CFC"])
    states = {
        one.value[0]: one
        for one in (JobState.PENDING, JobState.RUNNING, JobState.COMPLETED, JobState.FAILED)
    }

    def look(_ids: object) -> tuple[JobInfo, ...]:
        tasks = enumerate(next(looks))
        known = {"number": 7, "name": "grid", "user": "ada", "reason": "", "nodes": ()}
        return tuple(JobInfo(**known, task=task, state=states[state]) for task, state in tasks)

    monkeypatch.setattr(played_session.scheduler, "jobs", look)
    monkeypatch.setattr(played_session.scheduler, "clock", Clock(sleep=lambda _: None))
    wait(played_session, ["7"], on_change=ChangeNotes(played_session, TEXT.note))
    assert capsys.readouterr().err.splitlines() == [
        "job 7: 3 PENDING",
        "job 7: 1 COMPLETED, 1 RUNNING, 1 PENDING",
        "job 7: 1 COMPLETED, 1 FAILED, 1 RUNNING",
        "job 7_1 (grid) FAILED",
        "job 7: 2 COMPLETED, 1 FAILED",
    ]


def array(states: Mapping[JobState, Iterable[int]], **more: Any) -> tuple[JobInfo, ...]:
    """The tasks of array 7, by their indices in each state."""
    known = {"number": 7, "name": "grid", "user": "ada", "reason": "", **more}
    tasks = [
        JobInfo(**known, task=i, state=state) for state, indices in states.items() for i in indices
    ]
    return tuple(sorted(tasks, key=lambda task: task.task or 0))


def test_jobs_long_array_is_shown_by_state(played_session, capsys, monkeypatch) -> None:
    failed = range(7, 3000, 100)
    tasks = array({JobState.COMPLETED: {*range(3000)} - {*failed}, JobState.FAILED: failed})
    tasks = tuple(
        replace(task, nodes=("n1",), exit_code=3 if task.task == 107 else task.exit_code)
        for task in tasks
    )
    monkeypatch.setattr(SlurmClient, "jobs", lambda _, _ids: tasks)
    jobs.jobs(TEXT, ["7"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 20
    line, other = sorted(line for line in lines if " FAILED: " in line)[::-1]
    assert line.startswith("7_7, 7_207, ")
    assert " more FAILED: " in line
    assert other.startswith("7_107 FAILED: exit code 3")
    assert "2970 COMPLETED, 30 FAILED" in lines[1]
    jobs.jobs(TEXT, ["7"], everything=True)
    assert sum(line.startswith("7_") for line in capsys.readouterr().out.splitlines()) == 3000


def test_cancel_array_has_a_line_for_each_state(played_session, capsys, monkeypatch) -> None:
    states = {JobState.COMPLETED: range(8), JobState.FAILED: [8], JobState.PENDING: range(9, 5000)}
    monkeypatch.setattr(SlurmClient, "jobs", lambda _, _ids: array(states))
    monkeypatch.setattr(SlurmClient, "cancel", lambda _, _ids: {})
    cancel.cancel(TEXT, ["7"])
    cancelled, already = capsys.readouterr().out.splitlines()
    assert cancelled == "cancelled 4991 tasks of job 7 (grid)"
    assert already.startswith("9 tasks of job 7 (grid)")
    assert already.endswith("8 COMPLETED, 1 FAILED")


def test_tasks_of_an_array_that_slurm_does_not_cancel_are_not_listed_as_cancelled(
    played_session, monkeypatch
) -> None:
    user = played_session.inventory.job_user
    tasks = array({JobState.RUNNING: range(2)}, user=user)
    error = SchedulerError("the job can't be cancelled", code="cancel-refused")
    monkeypatch.setattr(SlurmClient, "jobs", lambda _, _ids: tasks)
    monkeypatch.setattr(SlurmClient, "cancel", lambda _, _ids: {"7": error})
    screen = Screen(json=True, color=False)
    with refused("cancel-refused", SchedulerError):
        cancel.cancel(screen, ["7"])
    assert screen.partial_answer["cancelled"] == []


@pytest.mark.parametrize("dry_run", [True, False])
def test_cancel_by_slurms_number_of_a_task_tells_that_nothing_was_cancelled(
    played_session, monkeypatch, dry_run: bool
) -> None:
    tasks = tuple(
        replace(task, slurm_id=8 + (task.task or 0)) for task in array({JobState.RUNNING: range(2)})
    )
    monkeypatch.setattr(SlurmClient, "jobs", lambda _, _ids: tasks[:1])
    screen = Screen(json=True, color=False)
    with refused("option-invalid/task-number"):
        cancel.cancel(screen, ["8"], dry_run=dry_run)
    assert (screen.partial_answer["cancelled"], screen.partial_answer["already_ended"]) == ([], [])


def test_status_array_waits_in_a_single_line(played_session, capsys, monkeypatch) -> None:
    tasks = array({JobState.PENDING: range(1000)}, submit_time=1)
    waiting = [
        replace(task, reason="Priority" if (task.task or 0) < 999 else "BeginTime")
        for task in tasks
    ]
    other = replace(tasks[0], number=8, task=None, reason="Priority")
    monkeypatch.setattr(
        jobs, "status_of", lambda _: Status("demo", "local", True, (), (other, *waiting))
    )
    jobs.status(TEXT)
    lines = capsys.readouterr().out.splitlines()
    names = [line.split(" (grid)")[0] for line in lines if " is waiting: " in line]
    assert names == ["job 8", "job 7", "job 7_999"]


def test_wait_for_an_array_without_nodes_says_so_once(played_session, capsys) -> None:
    reason = "ReqNodeNotAvail, UnavailableNodes:n1"
    known = {
        "number": 7,
        "name": "grid",
        "user": "ada",
        "reason": reason,
        "state": JobState.PENDING,
    }
    tasks = [JobInfo(**known, task=task) for task in range(200)]
    ChangeNotes(played_session, TEXT.note)(tasks, tasks)
    counts, output = capsys.readouterr().err.splitlines()
    assert (counts, output.startswith("job 7 is waiting for nodes")) == ("job 7: 200 PENDING", True)


def test_script_on_stdin_is_submitted_and_parsable_prints_only_the_id(
    played_session, cluster, tmp_path, capsys, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").write_text("beside")
    text = b"#!/bin/bash\n#SBATCH --job-name=piped\ncat data\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text)))
    submit.submit(TEXT, "-", parsable=True)
    assert capsys.readouterr().out == "1\n"
    cluster.wait_until_ended("1")
    job = cluster.job("1")
    assert job["name"] == "piped"
    assert (Path(job["dir"]) / "stdout.log").read_text() == "beside"


def test_empty_stdin_is_no_script(played_session, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\n")))
    with refused("file-invalid/stdin", UsageError):
        submit.submit(TEXT, "-")
    assert [*tmp_path.glob("stdin-*")] == []


@pytest.mark.parametrize("flag", ["wait", "follow", "dry_run", "local"])
def test_parsable_answer_is_only_an_id(flag: str) -> None:
    with refused("options-exclusive", UsageError, "--parsable"):
        submit.submit(TEXT, "probe", parsable=True, **{flag: True})
