"""Tests of SlurmClient with scripted commands and answers."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from clusterctl.errors import (
    AnswerLostError,
    NoAnswerError,
    SlurmError,
    UnreachableError,
    UsageError,
)
from clusterctl.scheduler.base import AccountingAwayError, JobInfo, JobState, unknown_or_task
from clusterctl.scheduler.request.directives import Directives
from clusterctl.scheduler.sites import advice
from clusterctl.scheduler.slurm import parse as slurm_parse
from clusterctl.scheduler.slurm.client import SlurmAwayError, SlurmClient
from clusterctl.scheduler.slurm.refusals import RequestedOptions
from clusterctl.spec.sbatch import directives_of
from clusterctl.util.progress import Clock
from tests.support.messages import condition
from tests.support.messages import refused as rejected
from tests.support.scripted import ScriptedTransport, Step, captured, records, slurm_output

CAPTURES = Path(__file__).parent / "captures"
SQUEUE = captured(CAPTURES / "squeue.txt", slurm_parse.SQUEUE.fields)
SACCT = captured(CAPTURES / "sacct.txt", slurm_parse.SACCT.fields)
AWAY = "squeue: error: Unable to contact slurm controller (connect failure)"


class Ticks:
    """Clock whose time passes only by sleeping."""

    def __init__(self) -> None:
        self.slept: list[float] = []
        self.clock = Clock(lambda: sum(self.slept), self.slept.append)


def client(*steps: Step, patience_s: float = 60.0) -> tuple[SlurmClient, ScriptedTransport, Ticks]:
    transport = ScriptedTransport(steps)
    ticks = Ticks()
    return SlurmClient(transport, clock=ticks.clock, patience_s=patience_s), transport, ticks


QUEUE = Step(("squeue", "..."), slurm_output(SQUEUE))
ACCOUNTS = Step(("sacct", "..."), slurm_output(SACCT))
NO_QUEUE = Step(("squeue", "..."), "")
GONE = Step(("squeue", "..."), stderr=AWAY, rc=1)
LOST = Step(("squeue", "..."), error=UnreachableError("gone"))


def test_jobs_queries_all_ids_at_once():
    slurm, transport, _ = client(QUEUE)
    assert slurm.jobs([]) == ()
    slurm.jobs(["11", "15"])
    assert [call.argv[-1] for call in transport.calls] == ["--jobs=11,15"]
    assert transport.calls[0].env["SLURM_TIME_FORMAT"] == "%s"


def test_history_leaves_out_verification_jobs() -> None:
    (partition,) = {job.partition for job in client(ACCOUNTS)[0].history(0) or ()}
    proof = SACCT.replace(f"\x1f{partition}\x1f".encode(), b"\x1fclusterctl-proof\x1f")
    assert client(Step(("sacct", "..."), slurm_output(proof)))[0].history(0) == ()


def test_jobs_asks_sacct_for_jobs_that_squeue_does_not_list():
    slurm, transport, _ = client(QUEUE, ACCOUNTS, NO_QUEUE, ACCOUNTS)
    found = slurm.jobs(["1", "15"])
    assert transport.calls[1].argv[-1] == "--jobs=1"
    assert {"1", "15"} <= {job.id for job in found}
    # Slurm may return more jobs than requested.
    assert [job.id for job in slurm.jobs(["1", "4_5"])] == ["1", "4_5"]


def test_jobs_finds_an_array_task_by_its_slurm_job_id() -> None:
    """The SLURM_JOB_ID of a task differs from the job id of its array. squeue or sacct knows it."""
    accounted = SACCT.replace(b"13_2\x1f13\x1f", b"13_2\x1f21\x1f")
    slurm, _, _ = client(NO_QUEUE, Step(("sacct", "..."), slurm_output(accounted)))
    jobs = slurm.jobs(["21"])
    assert [job.id for job in jobs] == ["13_2"]
    unknown = slurm.unknown(["21"])
    error = unknown_or_task("21", jobs, unknown)
    assert (condition(error), error.fix) == ("option-invalid/task-number", "use 13_2")
    assert unknown_or_task("13", jobs, unknown) is unknown
    assert unknown_or_task("99", jobs, unknown) is unknown


def test_jobs_adds_array_tasks_that_squeue_does_not_list():
    rest = b"".join(
        r for r in SQUEUE.splitlines(keepends=True) if b"\x1f13\x1f" in r and b"COMPLETED" not in r
    )
    rest = rest.replace(b"13\x1f0\x1f", b"13\x1f99\x1f")
    accounted = SACCT.replace(b"13_[", b"13_[0,")
    slurm, _, _ = client(
        Step(("squeue", "..."), slurm_output(rest)), Step(("sacct", "..."), slurm_output(accounted))
    )
    ids = [job.id for job in slurm.jobs(["13"])]
    assert "13_0" in ids
    assert "13_99" in ids
    assert len(ids) == len(set(ids))


def test_jobs_counts_the_last_array_task_once():
    task = next(r for r in SACCT.splitlines(keepends=True) if b"4_5\x1f" in r)
    record = slurm_output(SACCT.replace(task, task + task.replace(b"4_5\x1f", b"4\x1f")))
    slurm, _, _ = client(NO_QUEUE, Step(("sacct", "..."), record))
    assert "4" not in [job.id for job in slurm.jobs(["4"])]


def test_jobs_leaves_out_unknown_jobs():
    unknown = (CAPTURES / "squeue-unknown.txt").read_text()
    slurm, _, _ = client(Step(("squeue", "..."), stderr=unknown, rc=1), Step(("sacct", "..."), ""))
    assert slurm.jobs(["99999"]) == ()


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "x",
        "0",
        "1;rm",
        "-1",
        "1_",
        "1_2_3",
        "1_[2-3]",
        "1 2",
        "--all",
        "9" * 20,
        f"1_{'9' * 20}",
    ],
)
def test_malformed_job_id_is_refused_before_slurm_is_called(bad):
    slurm, transport, _ = client()
    with rejected("option-invalid/job-id", UsageError):
        slurm.jobs([bad])
    with pytest.raises(UsageError):
        slurm.cancel([bad])
    assert not transport.calls


UPDATE = ("scontrol", "update", "jobid=7,12_3", "requeue=0")


@pytest.mark.parametrize(
    "error", ["", "Job has already finished for job 7", "Invalid job id specified"]
)
def test_cancel_disables_requeue_first(error):
    each = [
        Step(("scontrol", "update", f"jobid={job_id}", "requeue=0"), "") for job_id in ("7", "12_3")
    ]
    slurm, transport, _ = client(
        Step(UPDATE, stderr=f"slurm_update error: {error}\n", rc=bool(error)),
        *(each if error else ()),
        Step(("scancel", "7", "12_3")),
    )
    slurm.cancel(["7", "12_3"])
    assert not transport.left


STUCK = (
    "Requested partition configuration not available now for job 7\nslurm_update error: the same"
)


def test_cancel_job_that_slurm_can_not_change_ends():
    """Slurm rejects every change of a job that asks for more nodes than its partition has, but
    cancels it.
    """
    each = [("scontrol", "update", f"jobid={job_id}", "requeue=0") for job_id in ("7", "12_3")]
    slurm, transport, _ = client(
        Step(UPDATE, stderr=STUCK, rc=1),
        Step(each[0], stderr=STUCK, rc=1),
        Step(each[1], ""),
        Step(("scancel", "7", "12_3")),
    )
    assert slurm.cancel(["7", "12_3"]) == {}
    assert not transport.left


def test_cancel_refused_is_no_success():
    refusal = "scancel: error: Kill job error on job id 7: Access/permission denied\n"
    ended = "scancel: error: Kill job error on job id 12_3: Invalid job id specified\n"
    slurm, transport, _ = client(
        Step(UPDATE, ""), Step(("scancel", "7", "12_3"), stderr=refusal + ended, rc=1)
    )
    errors = slurm.cancel(["7", "12_3"])
    assert {job_id: (condition(error), error.why) for job_id, error in errors.items()} == {
        "7": ("slurm-refused/job-cancel", "Access/permission denied")
    }
    assert not transport.left


def test_cancel_names_tasks_of_an_array_to_slurm_as_one():
    """An argument for each of thousands would be too long. Slurm's refusal is of them all."""
    refusal = "scancel: error: Kill job error on job id 12_[1-3,7]: Access/permission denied\n"
    words = ("12_?1-3,7?", "13_2", "14")
    slurm, transport, _ = client(
        Step(("scontrol", "update", f"jobid={','.join(words)}", "requeue=0"), ""),
        Step(("scancel", *words), stderr=refusal, rc=1),
    )
    errors = slurm.cancel(["12_3", "12_1", "13_2", "12_2", "12_7", "14"])
    assert [*errors] == ["12_3", "12_1", "12_2", "12_7"]
    assert not transport.left


def test_cancel_unknown_failure_is_raised():
    slurm, _, _ = client(
        Step(UPDATE, ""), Step(("scancel", "7", "12_3"), stderr="scancel: fatal: x", rc=1)
    )
    with rejected("slurm-refused/command", SlurmError):
        slurm.cancel(["7", "12_3"])


NO_DATABASE = (
    "sacct: error: Sending PersistInit msg: Connection refused\n"
    "sacct: error: Problem talking to the database"
)


@pytest.mark.parametrize(("stderr", "rc"), [("", 0), (NO_DATABASE, 1), ("", 124)])
def test_accounting_failure_has_the_reason(stderr, rc):
    slurm, _, _ = client(Step(("timeout", "..."), stderr=stderr, rc=rc))
    failure = slurm.accounting_failure()
    assert bool(failure) is bool(rc)
    assert stderr in failure


def test_accounting_away_names_the_daemon_and_waits_once():
    """The error has the jobs that the queue knows. Later queries of the accounting are tried
    once.
    """
    away = Step(("sacct", "..."), stderr=NO_DATABASE, rc=1)
    slurm, transport, ticks = client(QUEUE, *[away] * 40)
    with rejected("accounting-away", AccountingAwayError, "slurmdbd") as caught:
        slurm.jobs(["15", "99999"])
    assert "15" in [job.id for job in caught.value.queued]
    left = len(transport.left)
    slept = len(ticks.slept)
    assert slept > 1
    with rejected("accounting-away", AccountingAwayError, "slurmdbd"):
        slurm.accounted(["15"])
    assert (left - len(transport.left), len(ticks.slept)) == (1, slept)


# sinfo of Slurm 24.11 on a controller without munged.
NO_MUNGE = """\
sinfo: error: If munged is up, restart with --num-threads=10
sinfo: error: Munge encode failed: Failed to access "/run/munge/munge.socket.2": \
No such file or directory (Did you start munged?)
sinfo: error: slurm_buffers_pack_msg: auth_g_create: REQUEST_PARTITION_INFO has authentication error
slurm_load_partitions: Protocol authentication error
"""


def test_command_without_munge_names_it_and_not_slurms_advice():
    slurm, _, _ = client(Step(("sinfo", "..."), stderr=NO_MUNGE, rc=1))
    with rejected("slurm-away/munge", SlurmError, "munge.socket.2") as caught:
        slurm.nodes()
    assert "num-threads" not in str(caught.value)


def test_command_that_can_not_read_slurm_conf_advises_the_clusters_repair():
    said = "sinfo: fatal: Unable to process configuration file"
    slurm, _, _ = client(Step(("sinfo", "..."), stderr=said, rc=1))
    with rejected("slurm-refused/command", SlurmError, said) as caught:
        slurm.nodes()
    assert caught.value.fix == slurm.advice.repair


@pytest.mark.parametrize(
    "step",
    [
        Step(("sacct", "..."), stderr="Slurm accounting storage is disabled", rc=1),
        Step(("sacct", "..."), stderr="sh: 1: sacct: not found", rc=127),
        Step(("sacct", "..."), "99999|1234|cut in the mid"),
    ],
    ids=["disabled", "missing", "truncated"],
)
def test_accounting_without_a_usable_answer_is_away(step):
    slurm, transport, ticks = client(QUEUE, step)
    with rejected("accounting-away", AccountingAwayError) as caught:
        slurm.jobs(["15", "99999"])
    assert "15" in [job.id for job in caught.value.queued]
    assert not transport.left
    assert not ticks.slept


def test_closed_accounting_is_not_asked():
    slurm, transport, _ = client(QUEUE)
    slurm.no_accounting = "Slurm accounting storage is disabled"
    with rejected("accounting-away", AccountingAwayError, "storage is disabled"):
        slurm.jobs(["15", "99999"])
    assert (slurm.accounted(["15"]), slurm.accounting(["15"])) == ((), None)
    assert slurm.accounting_failure() == ""
    assert not transport.left


def test_account_of_the_proof_is_none_of_a_users_jobs():
    slurm, _, _ = client(Step(("sacctmgr", "..."), "clusterctl\ndefault\ndefault\n"))
    assert slurm.accounts("ada") == ("default",)


def test_accounting_json_that_is_cut_is_refused():
    slurm, _, _ = client(Step(("sacct", "..."), '{"jobs": [{"job_id": 15, "st'))
    with rejected("internal/slurm-answer", SlurmError):
        slurm.accounting(["15"])


def test_unreachable_slurmctld_is_waited_for():
    slurm, transport, ticks = client(GONE, LOST, GONE, QUEUE)
    assert slurm.jobs(["15"])
    assert not transport.left
    assert ticks.slept == sorted(ticks.slept)


MUTE = Step(("squeue", "..."), error=NoAnswerError("no answer"))


def ping(*, up: bool) -> Step:
    return Step(
        ("scontrol", "ping"), f"Slurmctld(primary) at d is {'UP' if up else 'DOWN'}\n", rc=not up
    )


def test_stopped_slurmctld_is_found_by_scontrol_ping():
    slurm, transport, _ = client(MUTE, ping(up=False), ping(up=False), patience_s=0)
    for _ in range(2):
        with rejected("slurm-away", SlurmAwayError):
            slurm.own_jobs()
    # The second time, a ping was enough.
    assert not transport.left


def test_slow_slurmctld_is_queried_with_a_longer_timeout():
    steps = (MUTE, ping(up=True), QUEUE)
    slurm, transport, _ = client(*steps, QUEUE)
    assert slurm.jobs(["15"]) == slurm.jobs(["15"])
    assert not transport.left
    assert transport.calls[0].timeout_s < 15 <= transport.calls[2].timeout_s, (
        "Slurm's MessageTimeout"
    )


@pytest.mark.parametrize(
    ("step", "code", "error"),
    [(GONE, "slurm-away", SlurmAwayError), (LOST, "unreachable", UnreachableError)],
)
def test_wait_for_slurmctld_has_a_limit(step: Step, code: str, error: type[UnreachableError]):
    slurm, _, ticks = client(*[step] * 50, patience_s=20)
    with rejected(code, error) as caught:
        slurm.jobs(["15"])
    assert sum(ticks.slept) <= 20
    assert caught.value.failures[0].retryable
    assert step is LOST or "20" in str(caught.value)
    # Other failures are not tried again.
    slurm, _, _ = client(Step(("squeue", "..."), stderr="squeue: error: Invalid user", rc=1))
    with rejected("slurm-refused/command", SlurmError):
        slurm.own_jobs()


def test_sbatch_runs_in_the_folder():
    slurm, transport, _ = client(
        Step(("sh", "-c", "*", "sh", "/f o", "--parsable", "..."), "42;demo\n")
    )
    assert slurm.sbatch("/f o", "job.sbatch", "--comment=x") == "42"
    assert transport.calls[0].argv[-3:] == ("--comment=x", "--", "job.sbatch")


def test_sbatch_without_a_job_id_is_not_repeated():
    slurm, _, _ = client(Step(("sh", "..."), "thanks\n"))
    with rejected("answer-lost", AnswerLostError):
        slurm.sbatch("/f", "job.sbatch")
    # It is never repeated by itself.
    slurm, transport, _ = client(Step(("sh", "..."), stderr=AWAY, rc=1))
    with pytest.raises(SlurmAwayError):
        slurm.sbatch("/f", "job.sbatch")
    assert len(transport.calls) == 1


@pytest.mark.parametrize(
    ("steps", "token", "job_id"), [([QUEUE], "abc", "15"), ([NO_QUEUE, ACCOUNTS], "tok1", "1")]
)
def test_job_is_found_by_its_comment(steps: list[Step], token: str, job_id: str):
    """The job is in the queue or in the accounting."""
    found = client(*steps)[0].by_token(token, time.time())
    assert found is not None
    assert found.id == job_id


def test_find_by_comment_searches_sacct_from_the_submission():
    slurm, transport, _ = client(*[NO_QUEUE, Step(("sacct", "..."), "")] * 2)
    for days_ago in (0, 9):
        assert slurm.by_token("x", time.time() - days_ago * 86400 - 60) is None
    queries = [call.argv[-1] for call in transport.calls if call.argv[0] == "sacct"]
    assert queries == ["--starttime=now-2days", "--starttime=now-11days"]


def test_accounting_json_is_returned_unchanged():
    slurm, transport, _ = client(Step(("sacct", "--json", "--jobs=7"), '{"jobs": []}'))
    assert slurm.accounting(["7"]) == {"7": '{"jobs": []}'}
    # sacct --json of 22.05 fails under a time format
    assert "SLURM_TIME_FORMAT" not in transport.calls[0].env


def test_accounting_json_of_several_jobs_is_split():
    """An array and a heterogeneous job have several records each."""
    jobs = [
        {"job_id": 7, "array": {"job_id": 0, "task_id": {"set": False}}, "het": {"job_id": 0}},
        {"job_id": 9, "array": {"job_id": 8, "task_id": {"set": True, "number": 0}}},
        {"job_id": 8, "array": {"job_id": 8, "task_id": {"set": True, "number": 1}}},
        {"job_id": 20, "het": {"job_id": {"set": True, "number": 20}}},
        {"job_id": 21, "het": {"job_id": {"set": True, "number": 20}}},
    ]
    said = json.dumps({"meta": {"Slurm": "x"}, "jobs": jobs})
    slurm, transport, _ = client(Step(("sacct", "--json", "--jobs=7,8,20,30"), said))
    found = {
        key: json.loads(text)
        for key, text in (slurm.accounting(["7", "8", "20", "30"]) or {}).items()
    }
    assert {key: [job["job_id"] for job in each["jobs"]] for key, each in found.items()} == {
        "7": [7],
        "8": [9, 8],
        "20": [20, 21],
    }
    assert all(each["meta"] == {"Slurm": "x"} for each in found.values())
    assert not transport.left


def test_jobs_in_full_take_one_query_of_the_queue_and_one_of_the_accounting():
    """Job 15 is in the queue, and job 1 only in the accounting."""
    steps = captured(CAPTURES / "sacct.txt", slurm_parse.SACCT_STEPS.fields)
    slurm, transport, _ = client(QUEUE, Step(("sacct", "..."), slurm_output(steps)))
    found = {job.id: job for job in slurm.jobs_in_full(["15", "1"])}
    assert [call.argv[0] for call in transport.calls] == ["squeue", "sacct"]
    assert found["1"].attempts
    assert [step.id for step in found["1"].steps or ()] == ["1"]
    assert "--allocations" not in transport.calls[1].argv


def test_jobs_in_full_are_those_of_the_queue_without_the_accounting():
    away = Step(("sacct", "..."), stderr=NO_DATABASE, rc=1)
    slurm, _, _ = client(QUEUE, away, patience_s=0)
    assert "15" in [job.id for job in slurm.jobs_in_full(["15"])]


def test_slow_accounting_is_asked_once():
    """Only slurmctld is in doubt after a few seconds."""
    slurm, transport, _ = client(Step(("sacct", "..."), '{"jobs": []}'))
    slurm.accounting(["7"])
    assert transport.calls[0].timeout_s > 30


def test_job_without_a_readable_number_is_listed_as_itself():
    spoilt = SQUEUE.replace(b"\x1f16\x1fN/A\x1f", b"\x1fx\x1fN/A\x1f")
    assert spoilt != SQUEUE
    slurm, _, _ = client(
        Step(("squeue", "..."), slurm_output(spoilt)), Step(("squeue", "..."), slurm_output(spoilt))
    )
    listed = slurm.own_jobs()
    assert (listed[0].id, len(listed)) == ("0", 15)
    assert "ArrayJobID 'x'" in listed[0].reason
    assert next(job.id for job in slurm.jobs(["15"])) != "0"


def test_lost_nodes_are_nodes_that_failed_during_the_job() -> None:
    """The events are of Slurm 24.11. A node that went down a moment after the job's end was the
    cause.
    """
    down = (
        "d-1|900|DOWN*|earlier\n"
        "d-2|1061|DOWN*|Not responding\n"
        "d-1|1300|DOWN|later\n"
        "d-1|1010|IDLE+DRAIN|a|b\n"
    )
    job = JobInfo(
        number=7,
        name="x",
        user="ada",
        state=JobState.FAILED,
        reason="",
        start_time=1000,
        end_time=1035,
    )
    job = replace(job, nodes=("d-1", "d-2"))
    step = Step(("sacctmgr", *["*"] * 4, "nodes=d-[[]1-2[]]", "start=uts1000", "..."), down)
    slurm, transport, _ = client(step)
    assert slurm.lost_nodes([job]) == {"7": {"d-2": "Not responding"}}
    assert transport.left == ()
    now = int(time.time())
    rows = [
        (f"d-{n}", "p", state, state, "none", "2", "9", "", "", "0", "0/2/0/2", "0.10", "")
        for n, state in ((1, "idle"), (2, "idle*"))
    ]
    step = Step(("sinfo", *["*"] * 3, "--nodes=d-[[]1-2[]]"), records(rows))
    slurm, transport, _ = client(Step(("sacctmgr", "..."), ""), step)
    assert slurm.lost_nodes([replace(job, end_time=now)])["7"].keys() == {"d-2"}
    assert transport.left == ()
    assert client()[0].lost_nodes([replace(job, start_time=None)]) == {}


@pytest.mark.parametrize(
    ("refusal", "line", "at_fault", "not_at_fault"),
    [
        (
            "--mem, --mem-per-cpu, and --mem-per-gpu are mutually exclusive.",
            "--mem-per-cpu=300M",
            "line 2",
            "--gpus",
        ),
        ("--mem, --mem-per-cpu, and --mem-per-gpu are mutually exclusive.", "", "--mem", "--gpus"),
        ("Invalid generic resource (gres) specification", "--gres=gpu:1", "line 2", "--gpus"),
        ("Invalid generic resource (gres) specification", "-G 1", "line 2", "--gpus,"),
        ("Invalid generic resource (gres) specification", "", "--gpus", "line 2"),
        ("Requested reservation is invalid", "--reservation=none", "line 2", "cores"),
        ("Invalid qos specification", "--qos=fast", "line 2", "--qos,"),
        ("Invalid partition name specified", "-p gpu", "line 2", "--partition,"),
        ("Invalid partition name specified", "--time=1", "--partition", "line 2"),
        ("Invalid feature specification", "-C a100", "line 2", "--gpus"),
        ("Invalid job array specification", "--array=1-1500%4", "line 2", "--array:"),
        ("Invalid job array specification", "", "--array", "line 2"),
        (
            "Requested time limit is invalid (missing or exceeds some limit)",
            "-t 9-0",
            "line 2",
            "cores",
        ),
        ("Job dependency problem", "--dependency=afterok:1", "line 2", "--after,"),
        ("Invalid node name specified", "-w nosuch", "line 2", "--nodelist,"),
        (
            "Invalid node name specified",
            "-N 2 --nodelist nosuch # comment",
            "line 2",
            "--nodelist,",
        ),
    ],
)
def test_fix_for_refusal_names_the_option_or_line(refusal, line, at_fault, not_at_fault):
    """The fix names the line of the script, or the flag if the script has no such line."""
    directives = Directives.read(
        Path("x.sh"), ["#SBATCH --nodes=1", *([f"#SBATCH {line}"] if line else [])]
    )
    fix = RequestedOptions(directives.options).fix(f"Batch job submission failed: {refusal}")
    assert at_fault in fix
    assert not_at_fault not in fix


@pytest.mark.parametrize(
    ("refusal", "option", "not_at_fault"),
    [
        (
            "Requested time limit is invalid (missing or exceeds some limit)",
            "--deadline=now+1minute",
            "sinfo",
        ),
        ("Invalid feature specification", "--prefer=a100", "--constraint"),
    ],
)
def test_fix_for_refusal_names_an_option_of_slurm(
    refusal: str, option: str, not_at_fault: str
) -> None:
    fix = RequestedOptions(directives_of([option])).fix(refusal)
    assert f"`--slurm {option}`" in fix
    assert not_at_fault not in fix


OWN = "`clusterctl up`"
GUEST = "administrators"


@pytest.mark.parametrize(
    ("operated", "helps", "absent"), [(advice.OWN, OWN, GUEST), (advice.FOREIGN, GUEST, OWN)]
)
def test_fix_for_unreachable_slurm_depends_on_the_operator(operated, helps, absent):
    silent = Step(
        ("sacct", "..."), stderr="sacct: error: Sending PersistInit msg: Connection refused", rc=1
    )
    slurm, _, _ = client(GONE, silent, patience_s=0)
    slurm.advice = operated
    with rejected("slurm-away", SlurmError, helps) as caught:
        slurm.own_jobs()
    assert absent not in caught.value.fix
    with rejected("accounting-away", AccountingAwayError, helps) as caught:
        slurm.accounted(["7"])
    assert absent not in caught.value.fix
