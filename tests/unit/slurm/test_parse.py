"""Parsers on what Slurm 22.05.8 really said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from clusterctl.errors import SlurmError
from clusterctl.scheduler.models import JobState, NodeInfo, Outcome, worst
from clusterctl.slurm import parse
from clusterctl.slurm.hostlist import expand_nodes

CAPTURES = Path(__file__).parent / "captures"


def capture(name: str) -> str:
    return (CAPTURES / f"{name}.txt").read_bytes().decode()  # no newline translation


QUEUED = {job.id: job for job in parse.parse_squeue(capture("squeue"))}
ACCOUNTED = {job.id: job for job in parse.parse_sacct(capture("sacct"))}


def test_a_running_job_of_two_nodes():
    job = QUEUED["15"]
    assert (job.state, job.ended, job.nodes) == (JobState.RUNNING, False, ("jr-train-1", "jr-train-2"))
    assert (job.exit_code, job.signal, job.end_time) == (None, None, None)
    assert (job.user, job.partition, job.account, job.qos) == ("hpc", "train", "default", "normal")
    assert (job.comment, job.work_dir, job.restarts) == ("clusterctl:abc", "/shared/home/hpc/t", 0)


def test_a_job_that_was_killed_by_a_signal():
    job = QUEUED["11"]
    assert (job.state, job.exit_code, job.signal) == (JobState.FAILED, 0, 9)


def test_a_hostile_name_survives():
    assert QUEUED["11"].name == 'hostile | \x1b[31m, é "q"'
    assert ACCOUNTED["1"].name == "we|ird na,me"


def test_a_waiting_job_has_a_reason_and_no_times_that_slurm_only_guesses():
    job = QUEUED["16"]
    assert (job.state, job.reason) == (JobState.PENDING, "JobHeldUser")
    assert (job.nodes, job.start_time, job.end_time) == ((), None, None)
    assert job.submit_time == 1795157362


def test_tasks_of_an_array_are_told_apart():
    tasks = [job for job in QUEUED.values() if job.job_id == 13]
    assert sorted(job.task for job in tasks if job.task is not None) == [0, 2, 4, 6, 8]
    assert QUEUED["13_0"].exit_code == 1


def test_an_exit_code():
    assert (ACCOUNTED["1"].exit_code, ACCOUNTED["1"].signal) == (3, 0)
    assert (ACCOUNTED["1"].state, ACCOUNTED["1"].outcome) == (JobState.FAILED, Outcome.FAILED)


def test_who_cancelled_a_job_is_no_part_of_its_state():
    assert ACCOUNTED["2"].state is JobState.CANCELLED


def test_tasks_that_never_started_are_one_line_in_the_accounting():
    assert [ACCOUNTED[f"3_{task}"].state for task in (0, 1, 2)] == [JobState.CANCELLED] * 3


def test_strides_of_an_array_are_expanded():
    line = capture("sacct").splitlines()[0]
    cells = line.split(parse.FIELD)
    cells[0] = "7_[0-8:4,11%2]"
    assert [job.id for job in parse.parse_sacct(parse.FIELD.join(cells))] == ["7_0", "7_4", "7_8", "7_11"]


def test_a_name_may_hold_what_python_takes_for_a_line_end():
    cells = capture("sacct").splitlines()[0].split(parse.FIELD)
    cells[1] = "a\x0bb\u2028c"
    assert [job.name for job in parse.parse_sacct(parse.FIELD.join(cells))] == ["a\x0bb\u2028c"]


def test_nothing_at_all():
    assert parse.parse_squeue("") == parse.parse_sacct("") == parse.parse_sinfo("") == ()


@pytest.mark.parametrize(
    "text",
    [
        "what",
        "a\x1fb\x1e",
        capture("squeue").replace("RUNNING", "DANCING"),
        capture("squeue").replace("N/A", "x"),
    ],
)
def test_what_is_not_understood_is_said(text):
    with pytest.raises(SlurmError, match="does not understand") as caught:
        parse.parse_squeue(text)
    assert caught.value.why.isprintable()


@pytest.mark.parametrize("text", ["what", capture("sacct").replace("3:0", "three")])
def test_odd_accounting_is_said(text):
    with pytest.raises(SlurmError):
        parse.parse_sacct(text)


def test_nodes():
    idle, drained = parse.parse_sinfo(capture("sinfo"))
    assert (idle.name, idle.state, idle.flags, idle.usable, idle.reason) == (
        "jr-train-1",
        "IDLE",
        (),
        True,
        "",
    )
    assert (idle.cpus, idle.memory_mib, idle.gres, idle.partitions) == (2, 2000, "", ("train",))
    assert (drained.state, drained.flags, drained.usable) == ("IDLE", ("DRAIN",), False)
    assert (drained.reason, drained.reason_by) == ('bad disk | "x', "root")


def test_a_node_of_two_partitions_is_one_node():
    text = capture("sinfo") + capture("sinfo").replace("\x1ftrain*\x1f", "\x1fother\x1f")
    nodes = parse.parse_sinfo(text)
    assert [node.partitions for node in nodes] == [("train", "other")] * 2


@pytest.mark.parametrize(
    ("shown", "state", "flags", "usable"),
    [
        ("idle", "IDLE", (), True),
        ("allocated+drain", "ALLOCATED", ("DRAIN",), False),
        ("down*", "DOWN", ("NOT_RESPONDING",), False),
        ("idle*", "IDLE", ("NOT_RESPONDING",), False),
        ("idle+cloud+powering_up", "IDLE", ("CLOUD", "POWERING_UP"), True),
        ("down+not_responding", "DOWN", ("NOT_RESPONDING",), False),
        ("unknown", "UNKNOWN", (), False),
        ("mixed+completing", "MIXED", ("COMPLETING",), True),
    ],
)
def test_states_of_nodes(shown, state, flags, usable):
    node = NodeInfo("n", shown, "", 1, 1, "", ("train",))
    assert (node.state, node.flags, node.usable) == (state, flags, usable)


def test_the_star_that_only_the_short_state_has():
    cells = capture("sinfo").split(parse.FIELD)
    cells[parse.SINFO_FIELDS.index("StateLong")] += "*"
    assert parse.parse_sinfo(parse.FIELD.join(cells))[0].flags == ("NOT_RESPONDING",)


def test_version():
    assert parse.parse_version(capture("version")) == "22.05.8"
    with pytest.raises(SlurmError):
        parse.parse_version("slurm")


@pytest.mark.parametrize(
    ("nodelist", "nodes"),
    [
        ("a-[1-3,7]", ("a-1", "a-2", "a-3", "a-7")),
        ("a-1", ("a-1",)),
        ("None assigned", ()),
        ("", ()),
    ],
)
def test_hostlists(nodelist, nodes):
    assert expand_nodes(nodelist) == nodes


@pytest.mark.parametrize("state", list(JobState))
def test_every_state_has_an_outcome(state):
    cancelled = {"CANCELLED", "TIMEOUT", "PREEMPTED", "REVOKED"}
    failed = {"FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"}
    expected = Outcome.GOES_ON
    if state == "COMPLETED":
        expected = Outcome.COMPLETED
    elif state in cancelled:
        expected = Outcome.CANCELLED
    elif state in failed:
        expected = Outcome.FAILED
    assert state.outcome is expected


def test_the_worst_job_stands_for_all():
    job = QUEUED["11"]
    states = (JobState.COMPLETED, JobState.TIMEOUT, JobState.FAILED, JobState.RUNNING)
    assert worst([replace(job, state=state) for state in states]).state is JobState.FAILED
