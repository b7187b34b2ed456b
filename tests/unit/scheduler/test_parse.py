"""Tests of parsers with recorded output of Slurm 22.05.8."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import UnionType
from typing import Union, get_args, get_origin, get_type_hints

import pytest

from clusterctl.errors import SlurmError
from clusterctl.scheduler.base import (
    JobInfo,
    JobState,
    NodeInfo,
    Outcome,
    StepInfo,
    worst_job,
)
from clusterctl.scheduler.slurm import parse as slurm_parse
from clusterctl.scheduler.slurm.values import expand_nodes, fold_nodes, gpu_count, gpus_by_type
from tests.support.messages import refused
from tests.support.scripted import CAPTURED, captured, separator_in

CAPTURES = Path(__file__).parent / "captures"


QUERIES = {"squeue": slurm_parse.SQUEUE, "sacct": slurm_parse.SACCT, "sinfo": slurm_parse.SINFO}


def capture(name: str) -> str:
    """Return a capture as a transport returns it."""
    command, _, kind = name.partition("-")
    separator = "|captured|" if kind else CAPTURED
    fields = QUERIES[command].fields
    return captured(CAPTURES / f"{name}.txt", fields, separator).decode(errors="replace")


def squeue(text: str) -> tuple[JobInfo, ...]:
    return slurm_parse.SQUEUE.parse(text, CAPTURED)


def sacct(text: str) -> tuple[JobInfo, ...]:
    return slurm_parse.SACCT.parse(text, CAPTURED)


def sinfo(text: str) -> tuple[NodeInfo, ...]:
    return slurm_parse.SINFO.parse(text, CAPTURED)


def with_field(command: str, name: str, value: str) -> str:
    """Return the first record of a capture, with another value in a field."""
    names = QUERIES[command].fields
    fields = capture(command).split(CAPTURED)[: len(names)]
    fields[names.index(name)] = value
    return CAPTURED.join([*fields, "\n"])


QUEUED = {job.id: job for job in squeue(capture("squeue"))}
ACCOUNTED = {job.id: job for job in sacct(capture("sacct"))}


# clusterctl finds these out.
DERIVED = {"prefix", "attempts", "hang", "alarms", "steps"}


@pytest.mark.parametrize("value", sorted({each.name for each in fields(JobInfo)} - DERIVED))
def test_each_value_of_a_job_has_a_source(value):
    """squeue or sacct prints it; otherwise it would always be empty."""
    tables = (slurm_parse.SQUEUE_VALUES, slurm_parse.SACCT_VALUES)
    parsers = [table[value][1] for table in tables if value in table]
    assert parsers
    for parse in parsers:
        # A text that is not converted, for example, is no number in JSON.
        made = get_type_hints(parse).get("return", parse)
        assert members(made) <= members(get_type_hints(JobInfo)[value]), f"parse of {value}"


def members(hint):
    return {*get_args(hint)} if get_origin(hint) in (Union, UnionType) else {hint}


def test_squeue_running_job_has_its_nodes_and_times():
    job = QUEUED["15"]
    assert (job.state, job.ended, job.nodes) == (
        JobState.RUNNING,
        False,
        ("jr-train-1", "jr-train-2"),
    )
    assert (job.exit_code, job.signal, job.end_time) == (None, None, None)
    assert (job.user, job.partition, job.account, job.qos) == ("hpc", "train", "default", "normal")
    assert (job.comment, job.work_dir, job.restarts) == ("clusterctl:abc", "/shared/home/hpc/t", 0)


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        *(("1-00:00:00", 86400), ("5:00", 300)),
        # sacct always prints the last form; squeue of 24.11 prints it, or UNLIMITED.
        *((word, None) for word in ("UNLIMITED", "Partition_Limit", "NOT_SET", "365-00:00:00")),
    ],
)
def test_time_limit_is_parsed_to_seconds(limit, seconds):
    queued = with_field("squeue", "TimeLimit", limit)
    accounted = with_field("sacct", "Timelimit", limit)
    for (job,) in (squeue(queued), sacct(accounted)):
        assert (job.time_limit_s, job.reason) == (seconds, "")


def test_sacct_tres_falls_back_to_the_request():
    assert sacct(with_field("sacct", "AllocTRES", "cpu=9"))[0].tres == "cpu=9"
    assert sacct(with_field("sacct", "Suspended", "00:01:10"))[0].suspended_s == 70
    assert sacct(with_field("sacct", "Suspended", "00:00:00"))[0].suspended_s == 0
    assert sacct(with_field("sacct", "AllocTRES", ""))[0].tres == "cpu=1,mem=1G,node=1,billing=1"


def test_exit_signal_has_its_name():
    job = QUEUED["11"]
    assert (job.state, job.exit_code, job.signal, job.exit) == (JobState.FAILED, None, 9, "SIGKILL")
    assert replace(job, signal=0, exit_code=3).exit == "3"
    assert replace(job, signal=63).exit == "signal 63"
    assert replace(job, signal=None, exit_code=None).exit == ""


def test_waiting_job_has_a_reason_and_no_guessed_times():
    job = QUEUED["16"]
    assert (job.state, job.reason) == (JobState.PENDING, "JobHeldUser")
    assert (job.nodes, job.start_time, job.end_time) == ((), None, None)
    assert job.submit_time == 1795157362


def test_squeue_array_tasks_have_their_own_rows():
    tasks = [job for job in QUEUED.values() if job.number == 13]
    assert sorted(job.task for job in tasks if job.task is not None) == [0, 2, 4, 6, 8]
    assert QUEUED["13_0"].exit_code == 1


@pytest.mark.parametrize(
    ("value", "exit_code", "signal"),
    [("256", 1, 0), ("9", None, 9), ("3:0", 3, 0), ("0:9", None, 9)],  # 22.05; 24.11
)
def test_squeue_exit_code_of_each_slurm_version_is_parsed(value, exit_code, signal):
    record = with_field("squeue", "exit_code", value).split(CAPTURED)
    record[slurm_parse.SQUEUE.fields.index("State")] = "FAILED"
    (job,) = squeue(CAPTURED.join(record))
    assert (job.exit_code, job.signal, job.reason) == (exit_code, signal, "")


STEPS_OF_12 = (
    StepInfo("12", "10000"),
    StepInfo("12.0", "", 4091904 << 10, "n2", 3),
    StepInfo("12.batch"),
    StepInfo("12.1", "", int(3.5 * (1 << 30)), "n1", 0),
)


def with_steps(rows: Sequence[Mapping[str, str]]) -> tuple[JobInfo, ...]:
    """Return jobs in records of sacct with those of their steps. Other fields have usual values."""
    names = slurm_parse.SACCT_STEPS.fields
    usual = dict(zip(names, with_field("sacct", "Reason", "None").split(CAPTURED), strict=False))
    usual |= {"MaxRSS": "", "MaxRSSNode": "", "MaxRSSTask": ""}
    values = ({**usual, "JobIDRaw": row["JobID"], **row} for row in rows)
    lines = ("".join(each[name] + CAPTURED for name in names) + "\n" for each in values)
    return slurm_parse.SACCT_STEPS.parse("".join(lines), CAPTURED)


def peak(size: str, node: str, task: str) -> dict[str, str]:
    return {"MaxRSS": size, "MaxRSSNode": node, "MaxRSSTask": task}


def test_steps_have_peak_memory_and_canceller():
    rows = [
        {"JobID": "7", "State": "FAILED"},
        {"JobID": "7.batch", "State": "FAILED"},
        {"JobID": "12", "State": "CANCELLED by 10000"},
        {"JobID": "12.0", "State": "RUNNING", **peak("4091904K", "n2", "3")},
        {"JobID": "12.batch", "State": "COMPLETED", "MaxRSS": "0"},
        {"JobID": "12.1", "State": "FAILED", **peak("3.5G", "n1", "0")},
    ]
    assert [job.steps for job in with_steps(rows)] == [
        (StepInfo("7"), StepInfo("7.batch")),
        STEPS_OF_12,
    ]


def test_steps_of_a_requeued_job_are_those_of_its_last_attempt():
    rows = [
        {"JobID": "7", "State": "NODE_FAIL"},
        {"JobID": "7.0", "State": "NODE_FAIL"},
        {"JobID": "7", "State": "FAILED"},
        {"JobID": "7.batch", "State": "FAILED"},
    ]
    (job,) = slurm_parse.with_attempts(with_steps(rows))
    assert job.steps == (StepInfo("7"), StepInfo("7.batch"))


def test_first_part_of_a_heterogeneous_job_has_the_steps_of_all():
    rows = [
        {"JobID": "7+0", "JobIDRaw": "7", "State": "FAILED"},
        {"JobID": "7+0.0", "State": "FAILED"},
        {"JobID": "7+1", "JobIDRaw": "8", "State": "FAILED"},
        {"JobID": "7+1.0", "State": "OUT_OF_MEMORY"},
    ]
    first, second = slurm_parse.with_attempts(with_steps(rows))
    assert [step.id for step in first.steps or ()] == ["7+0", "7+0.0", "7+1", "7+1.0"]
    assert [step.id for step in second.steps or ()] == ["7+1", "7+1.0"]


def test_waiting_job_has_slurms_estimate_of_its_start():
    said = with_field("squeue", "State", "PENDING").split(CAPTURED)
    said[slurm_parse.SQUEUE.fields.index("StartTime")] = "1795160000"
    (job,) = squeue(CAPTURED.join(said))
    assert (job.start_time, job.expected_start) == (None, 1795160000)


def test_jobs_that_ended_in_the_accounting():
    """The canceller is not part of the state; tasks that never started share a line."""
    failed = ACCOUNTED["1"]
    assert (failed.exit_code, failed.signal, failed.outcome) == (3, 0, Outcome.FAILED)
    assert [ACCOUNTED[job_id].state for job_id in ("2", "3_0", "3_1", "3_2")] == [
        JobState.CANCELLED
    ] * 4


@pytest.mark.parametrize(
    ("state", "of_slurmctld", "of_accounting", "known"),
    [
        ("TIMEOUT", ("143:0", "TimeLimit"), ("0:0", "None"), (None, None, "")),
        ("CANCELLED", ("143:0", "None"), ("0:0", "None"), (None, None, "")),
        ("NODE_FAIL", ("0:1", "None"), ("1:0", "None"), (None, None, "")),
        ("FAILED", ("0:0", "None"), ("0:0", "None"), (None, None, "")),
        (
            "FAILED",
            ("3:0", "NonZeroExitCode"),
            ("3:0", "NonZeroExitCode"),
            (3, 0, "NonZeroExitCode"),
        ),
        ("COMPLETED", ("0:0", "None"), ("0:0", "None"), (0, 0, "")),
        (
            "OUT_OF_MEMORY",
            ("0:125", "OutOfMemory"),
            ("0:125", "OutOfMemory"),
            (None, 9, "OutOfMemory"),
        ),
    ],
)
def test_end_is_the_same_by_slurmctld_and_by_the_accounting(
    state, of_slurmctld, of_accounting, known
):
    """Only the first has the code of a batch script that Slurm stopped."""
    for command, exit_field, parse, told in (
        ("squeue", "exit_code", squeue, of_slurmctld),
        ("sacct", "ExitCode", sacct, of_accounting),
    ):
        names = QUERIES[command].fields
        record = dict(zip(names, capture(command).split(CAPTURED), strict=False))
        record |= {"State": state, exit_field: told[0], "Reason": told[1]}
        (job,) = parse(CAPTURED.join([*(record[name] for name in names), "\n"]))
        assert (job.exit_code, job.signal, job.reason) == known, command


def test_strides_of_an_array_are_expanded():
    jobs = sacct(with_field("sacct", "JobID", "7_[0-8:4,11%2]"))
    assert [job.id for job in jobs] == ["7_0", "7_4", "7_8", "7_11"]


def test_component_of_a_heterogeneous_job_has_its_number():
    jobs = {job.id: job for job in slurm_parse.SACCT.parse(capture("sacct-hostile"), "|captured|")}
    assert (jobs["35"].name, jobs["36"].name, jobs["35"].reason) == ("het.sh", "het.sh", "")


@pytest.mark.parametrize("has_ended", [False, True])
@pytest.mark.parametrize("ran_s", [0, 30])
def test_suspended_time_of_a_job_does_not_count(*, ran_s, has_ended):
    """It started an hour ago, and may have been suspended in its first second."""
    names = slurm_parse.SQUEUE.fields
    fields = capture("squeue").split(CAPTURED)[: len(names)]
    more = {
        "State": "FAILED" if has_ended else "RUNNING",
        "StartTime": str(int(time.time()) - 3600),
        "EndTime": str(int(time.time())) if has_ended else "N/A",
        "TimeUsed": f"0:{ran_s:02}",
    }
    fields = [more.get(name, field) for name, field in zip(names, fields, strict=True)]
    (job,) = squeue(CAPTURED.join([*fields, "\n"]))
    assert ran_s <= job.elapsed_s < 3600
    assert job.suspended_s > 3000


@pytest.mark.parametrize("command", ["squeue", "sacct"])
def test_every_byte_in_name_comment_and_folder_is_parsed(command):
    """Slurm's answers about jobs whose name, comment and folder hold every byte from 1 to 255."""
    parser = {"squeue": slurm_parse.SQUEUE.parse, "sacct": slurm_parse.SACCT.parse}[command]
    jobs = {job.id: job for job in parser(capture(f"{command}-hostile"), "|captured|")}
    assert {"28", "29", "30", "31_1", "31_2", "35", "36"} <= jobs.keys()
    assert "99" not in jobs  # which the name of job 30 pretends to be
    ascii_ = "".join(map(chr, range(1, 128)))
    # So the accounting keeps a name.
    ascii_name = ascii_ if command == "squeue" else ascii_.replace('"', "`")
    unreadable = "\N{REPLACEMENT CHARACTER}" if command == "squeue" else "?"
    assert jobs["29"].name == ascii_name + unreadable * 128
    assert jobs["29"].comment == ascii_ + unreadable * 128
    assert jobs["29"].work_dir == "/shared/home/hpc/" + ascii_name.replace("/", "")
    assert jobs["30"].name == jobs["30"].comment
    assert jobs["30"].work_dir == f"/shared/home/hpc/\n|{unreadable}"
    assert jobs["31_1"].name == "a\nb|y"
    assert (QUEUED["11"].name, ACCOUNTED["1"].name) == ('hostile | \x1b[31m, é "q"', "we|ird na,me")
    ended = [jobs[job_id] for job_id in ("28", "29", "30", "31_1", "31_2")]
    assert {(job.state, job.reason, job.nodes) for job in ended} == {
        (JobState.COMPLETED, "", ("hslurm-train-1",))
    }


@pytest.mark.parametrize("query", [slurm_parse.SQUEUE, slurm_parse.SACCT, slurm_parse.SINFO])
def test_separators_are_unique(query):
    first, second = (separator_in(query.command(slurm_parse.new_separator())) for _ in range(2))
    assert not first[0].isdigit()  # squeue would take it for a width
    assert first != second


def test_output_before_the_answer_is_ignored():
    assert squeue("") == sacct("") == sinfo("") == ()
    assert len(squeue("module: loaded slurm\n" + capture("squeue"))) == len(QUEUED)


@pytest.mark.parametrize("text", ["what", capture("squeue")[:-20], "a\x1fb\x1f"])
def test_truncated_answer_is_an_error(text):
    with refused("internal/slurm-answer", SlurmError) as caught:
        squeue(text)
    assert caught.value.why.isprintable()


@pytest.mark.parametrize(
    ("command", "field", "value", "job_id"),
    [
        ("squeue", "State", "DANC\x1b\nING", "2"),
        ("squeue", "ArrayTaskID", "x", "2"),
        ("squeue", "ArrayJobID", "x", "0"),
        ("squeue", "NodeList", "a[1-", "2"),
        ("squeue", "State", "9" * 120, "2"),
        ("sacct", "State", "", "1"),
        ("sacct", "JobID", "3_[0-x]", "3"),
        ("sacct", "JobID", "3_[1,4,9,1...]", "3"),
    ],
)
def test_garbled_job_row_is_skipped_alone(command, field, value, job_id):
    parser = {"squeue": squeue, "sacct": sacct}[command]
    text = with_field(command, field, value)
    spoilt, *others = parser(text + capture(command))
    assert spoilt.id == job_id
    assert f" of {command}: {field} {value[:100]!r}" in spoilt.reason
    assert spoilt.state is JobState.UNKNOWN
    assert spoilt.reason.isprintable()
    assert others == list(parser(capture(command)))


@pytest.mark.parametrize(
    ("command", "field", "values"),
    [
        ("squeue", "JobID", ["slurm_id"]),
        ("squeue", "exit_code", ["exit_code", "signal"]),
        ("squeue", "RestartCnt", ["restarts"]),
        ("sacct", "ExitCode", ["exit_code", "signal"]),
    ],
)
def test_odd_text_in_an_optional_field_leaves_only_its_values_empty(command, field, values):
    parser = {"squeue": squeue, "sacct": sacct}[command]
    (sound,), (odd,) = (
        parser(with_field(command, name, "\N{SUPERSCRIPT TWO}")) for name in ("Comment", field)
    )
    odd = replace(odd, comment=sound.comment)
    assert odd == replace(sound, **dict.fromkeys(values))
    assert [getattr(odd, name) for name in values] == [None] * len(values)


@pytest.mark.parametrize("command", ["squeue", "sacct"])
def test_garbled_job_row_keeps_its_nodes_and_user(command):
    """A node with such a job is not idle, so it is not rebooted or removed without a warning."""
    parser = {"squeue": squeue, "sacct": sacct}[command]
    (sound,), (spoilt,) = (
        parser(with_field(command, name, value))
        for name, value in (("QOS", "any"), ("State", "DANCING"))
    )
    assert spoilt.state is JobState.UNKNOWN
    assert sound.nodes
    for key in ("id", "user", "partition", "nodes", "token"):
        assert getattr(spoilt, key) == getattr(sound, key)


def test_garbled_task_is_not_taken_for_its_array():
    (spoilt,) = squeue(with_field("squeue", "ArrayTaskID", "3").replace("CANCELLED", "DANCING"))
    assert (spoilt.state, spoilt.id) == (JobState.UNKNOWN, "2_3")


def test_garbled_node_row_is_skipped_alone():
    spoilt = sinfo(
        with_field("sinfo", "CPUs", "many") + capture("sinfo").replace("-1\x1f", "-9\x1f")
    )[0]
    assert (spoilt.name, spoilt.cpus, spoilt.memory_mib) == ("jr-train-1", 0, 0)
    assert " of sinfo: CPUs 'many'" in spoilt.reason


def test_use_of_nodes_is_parsed():
    used, silent = sinfo(capture("sinfo"))
    assert (used.allocated_cpus, used.load, used.gres_used) == (0, 0.35, "gpu:0")
    assert (silent.allocated_cpus, silent.load, silent.gres_used) == (0, None, "")
    busy = sinfo(with_field("sinfo", "CPUsState", "3/1/0/4"))[0]
    assert busy.allocated_cpus == 3


@pytest.mark.parametrize(
    ("gres", "count"),
    [
        ("", 0),
        ("gpu:8", 8),
        ("gpu:h100:8(S:0-1)", 8),
        ("gpu:a:2(IDX:0-1),gpu:b:1(IDX:2),shard:16", 3),
        ("nvgpu:4", 0),
    ],
)
def test_gpus_in_a_gres_are_counted(gres, count):
    assert gpu_count(gres) == count


def test_gpus_in_a_gres_are_counted_by_type():
    assert gpus_by_type("gpu:a:2(IDX:0-1),gpu:b:1(IDX:2),gpu:3,gpu:a:1") == {"a": 3, "b": 1, "": 3}


def test_use_of_nodes_that_slurm_does_not_tell_is_unknown():
    unknown = sinfo(with_field("sinfo", "CPUsState", "N/A"))[0]
    assert (unknown.allocated_cpus, unknown.allocated_mib) == (None, 0)
    assert sinfo(with_field("sinfo", "AllocMem", "N/A"))[0].allocated_mib is None


def test_sinfo_nodes_are_parsed():
    idle, drained = sinfo(capture("sinfo"))
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


def test_node_of_two_partitions_is_listed_once():
    text = capture("sinfo") + capture("sinfo").replace("\x1ftrain*\x1f", "\x1fother\x1f")
    nodes = sinfo(text)
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
def test_node_states_are_parsed(shown, state, flags, usable):
    node = NodeInfo("n", shown, "", 1, 1, "", ("train",))
    assert (node.state, node.flags, node.usable) == (state, flags, usable)


def test_version_of_slurm_is_parsed():
    assert slurm_parse.parse_version((CAPTURES / "version.txt").read_text()) == "22.05.8"
    with pytest.raises(SlurmError):
        slurm_parse.parse_version("slurm")


@pytest.mark.parametrize(
    ("nodelist", "nodes"),
    [
        ("a-[1-3,7]", ("a-1", "a-2", "a-3", "a-7")),
        ("a-1", ("a-1",)),
        ("None assigned", ()),
        ("", ()),
    ],
)
def test_hostlists_are_expanded(nodelist, nodes):
    assert expand_nodes(nodelist) == nodes


@pytest.mark.parametrize("name", [*(f"n{sign}1" for sign in ",&!^@%*? ²"), "n[1-3]"])
def test_names_of_no_host_are_not_folded(name):
    assert fold_nodes(("n1", "n2")) == "n[1-2]"
    assert fold_nodes(("n1", "n2", name)) == f"n1,n2,{name}"


@pytest.mark.parametrize("state", list(JobState))
def test_every_state_has_an_outcome(state):
    outcomes = {
        Outcome.COMPLETED: {"COMPLETED"},
        Outcome.CANCELLED: {"CANCELLED", "TIMEOUT", "PREEMPTED", "REVOKED"},
        Outcome.FAILED: {"FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "PURGED"},
    }
    expected = [outcome for outcome, states in outcomes.items() if state in states]
    assert [state.outcome] == (expected or [Outcome.GOES_ON])


def test_worst_job_decides_the_state_of_an_array():
    job = QUEUED["11"]
    states = (JobState.COMPLETED, JobState.TIMEOUT, JobState.FAILED, JobState.RUNNING)
    assert worst_job([replace(job, state=state) for state in states]).state is JobState.FAILED


def test_partitions_shown_without_nodes_have_unknown_counts() -> None:
    text = (
        "PartitionName=std AllowGroups=ALL Default=YES QoS=N/A MaxTime=01:00:00 State=UP TotalNodes=2\n"
        "PartitionName=old Default=NO MaxTime=UNLIMITED State=DOWN TotalNodes=1 Nodes=c[1-2]\n\n"
    )
    std, old = slurm_parse.parse_shown_partitions(text)
    assert (std.name, std.is_default, std.max_time, std.nodes) == ("std", True, "01:00:00", 2)
    assert (std.idle, std.in_service, std.usable, old.usable) == (None, None, True, False)
