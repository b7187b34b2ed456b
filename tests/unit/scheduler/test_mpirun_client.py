"""Tests of jobs without a scheduler: states, ids and refusals, with scripted answers of hosts."""

from __future__ import annotations

import json
import os
import pwd
from pathlib import Path
from typing import Any

import pytest

from clusterctl.errors import SchedulerError, UnreachableError, UsageError
from clusterctl.scheduler.sites import remote_jobs
from clusterctl.scheduler.sites.mpirun import JobRequest, MpirunClient, job_info
from clusterctl.scheduler.sites.remote_jobs import open_new, read
from clusterctl.util.progress import Clock
from tests.support.inventories import host_of, inventory_of
from tests.support.messages import condition, refused
from tests.support.scripted import Call, ScriptedTransport, Step

START = JobRequest("abc", "train", "/shared/home/ada/j", "job.mpirun", "train", ("d-train-1",), 60)
ASKED = ("sudo", "-n", "/usr/bin/python3", "...")
HEALTH = ("sudo", "-n", "/opt/clusterctl/health")
INVENTORY = inventory_of(
    host_of("d-train-1", partition="train"),
    host_of("d-train-2", partition="train", address="10.0.0.4"),
    scheduler="none",
    job_user="ada",
    folder="/shared/home/ada/clusterctl",
)


def record(
    job_id: str = "m1", *, end: dict[str, Any] | None = None, cancelled: bool = False
) -> dict[str, Any]:
    return {
        "id": job_id, "token": "abc", "name": "train", "folder": "/shared/home/ada/j", "partition": "train",
        "nodes": ["d-train-1"], "time": 1000, "end": end, "cancelled": cancelled,
    }  # fmt: skip


def request(call: Call) -> Any:
    """Return the request that a host received."""
    (text,) = json.loads(call.argv[-1])
    return json.loads(text)


def ended(result: str, code: str = "exited", status: str = "0") -> dict[str, Any]:
    return {"result": result, "code": code, "status": status, "time": 1010}


def client(**steps: list[Step]) -> tuple[MpirunClient, dict[str, ScriptedTransport]]:
    """Return a client with the scripted steps of the controller (``ctl``) and the first node
    (``one``).
    """
    hosts = {
        "d-ctl": ScriptedTransport(steps.get("ctl", [])),
        "d-train-1": ScriptedTransport(steps.get("one", [])),
    }
    clock = Clock(lambda: 100.0, lambda _: None)
    return MpirunClient(INVENTORY, "ada", hosts["d-ctl"], hosts.__getitem__, clock, 0.0), hosts


def health(*faults: str) -> Step:
    return Step(HEALTH, "".join(f"{fault}\n" for fault in faults), rc=1 if faults else 0)


def reply(**answer: Any) -> Step:
    return Step(ASKED, json.dumps(answer))


@pytest.mark.parametrize(
    ("end", "cancelled", "state", "exit_code", "signal"),
    [
        (ended("success"), False, "COMPLETED", 0, 0),
        (ended("success"), True, "COMPLETED", 0, 0),
        (ended("exit-code", status="7"), False, "FAILED", 7, 0),
        (ended("signal", "killed", "SEGV"), False, "FAILED", None, 11),
        (ended("timeout", "killed", "TERM"), False, "TIMEOUT", None, None),
        (ended("exit-code", status="143"), True, "CANCELLED", None, None),
        (ended("timeout", "killed", "KILL"), True, "CANCELLED", None, None),
        (ended("oom-kill", "killed", "KILL"), False, "OUT_OF_MEMORY", None, 9),
        (ended("lost", "", ""), False, "NODE_FAIL", None, None),
        (ended("shutdown", "killed", "TERM"), False, "NODE_FAIL", None, None),
        (ended("start", "", ""), False, "BOOT_FAIL", None, None),
        (ended("protocol"), False, "FAILED", None, None),
    ],
)
def test_result_of_a_systemd_unit_is_the_job_state(end, cancelled, state, exit_code, signal):
    mpirun, _ = client(ctl=[reply(jobs=[record(end=end, cancelled=cancelled)])])
    (job,) = mpirun.own_jobs()
    assert (job.id, job.whole_id, job.state.value) == ("m1", "m1", state)
    assert (job.exit_code, job.signal, job.start_time, job.end_time) == (
        exit_code,
        signal,
        1000,
        1010,
    )
    assert job.comment == "clusterctl:abc"


@pytest.mark.parametrize(
    ("known", "state", "has_ended"),
    [
        (record(), "RUNNING", False),
        (record(cancelled=True), "COMPLETING", False),
        (record(end=ended("lost", "", "")), "NODE_FAIL", True),
    ],
)
def test_state_of_a_running_job_is_asked_of_its_first_node(known, state, has_ended):
    mpirun, hosts = client(
        ctl=[reply(jobs=[record(cancelled=known["cancelled"])])], one=[reply(jobs=[known])]
    )
    (job,) = mpirun.own_jobs()
    assert (job.state.value, job.ended, "restarted" in job.reason) == (state, has_ended, has_ended)
    sent = request(hosts["d-train-1"].calls[0])
    assert sent == {
        "user": "ada",
        "folder": INVENTORY.folder,
        "do": "settle",
        "ids": ["m1"],
    }


def test_unreachable_first_node_is_not_asked_again_at_once():
    away = Step(ASKED, error=UnreachableError("no route"))
    mpirun, hosts = client(ctl=[reply(jobs=[record()])] * 2, one=[away])
    for _ in range(2):
        (job,) = mpirun.own_jobs()
        assert (job.state.value, job.reason.split()[0]) == ("RUNNING", "d-train-1")
    assert len(hosts["d-train-1"].calls) == 1


def test_second_job_is_refused_with_user_and_start_of_the_first():
    mpirun, hosts = client(ctl=[reply(jobs=[record()])], one=[reply(jobs=[record()])])
    with refused("in-use/hosts", SchedulerError, "m1", "1970-01-01", "clusterctl cancel m1"):
        mpirun.submit(START)
    assert [request(call)["do"] for call in hosts["d-train-1"].calls] == ["settle"]
    # Or another user's job was faster.
    mpirun, _ = client(ctl=[reply(jobs=[])], one=[health(), reply(busy=record("m4"))])
    with refused("in-use/hosts", SchedulerError, "m4"):
        mpirun.submit(START)


NO_CHECK = Step(HEALTH, stderr="sudo: /opt/clusterctl/health: command not found", rc=1)


@pytest.mark.parametrize("checked", [health(), NO_CHECK])
def test_job_starts_on_the_first_of_its_nodes(checked):
    """Also if the node has no health check yet."""
    mpirun, hosts = client(ctl=[reply(jobs=[])], one=[checked, reply(id="m1")])
    assert mpirun.submit(START) == "m1"
    sent = request(hosts["d-train-1"].calls[1])
    assert (sent["do"], sent["script"], sent["limit_s"]) == ("submit", "job.mpirun", 60)
    assert set(sent["job"]) == {"token", "name", "folder", "partition", "nodes", "limit_s"}


FAULTS = ("GPU 0: 97 C, and 90 are allowed", "/ has 3 MiB free, and needs 100")


def test_unhealthy_node_gets_no_job_until_it_recovers():
    looks = [health(*FAULTS), health()]
    mpirun, hosts = client(ctl=[reply(jobs=[])] * 2, one=[*looks, reply(id="m1")])
    with refused("host-unfit/health", SchedulerError, "d-train-1") as caught:
        mpirun.submit(START)
    (failure,) = caught.value.failures
    assert (condition(failure), failure.host) == ("host-unfit/health", "d-train-1")
    assert failure.cause == "; ".join(FAULTS)
    assert mpirun.submit(START) == "m1"
    assert len(hosts["d-train-1"].calls) == 3


def test_unit_that_systemd_does_not_start_is_job_not_started():
    mpirun, _ = client(
        ctl=[reply(jobs=[])], one=[health(), reply(failed="Failed to start transient service unit")]
    )
    with refused("tool-failed/mpirun", SchedulerError):
        mpirun.submit(START)


@pytest.mark.parametrize("bad", ["1", "m0", "m", "m1_2", "M1", "m01", "m1; reboot", ""])
def test_malformed_job_id_is_refused(bad):
    with refused("option-invalid/job-id", UsageError):
        client()[0].jobs([bad])


def test_unknown_job_id_is_an_error():
    mpirun, _ = client(ctl=[reply(jobs=[record(end=ended("success"))])])
    assert mpirun.jobs(["m2"]) == ()
    error = mpirun.unknown(["m2"])
    assert (condition(error), error.what.split()[-1]) == ("not-found/job", "m2")


@pytest.mark.parametrize(
    ("job", "job_id"),
    [
        ({"id": "m1", "end": None, "cancelled": False}, "m1"),
        ({**record(), "end": {"result": "success"}}, "m1"),
        ({**record(), "time": "now"}, "m1"),
        ({**record(), "id": "x"}, "m0"),
    ],
)
def test_invalid_job_record_is_ignored_alone(job, job_id):
    whole = record("m2", end=ended("success"))
    mpirun, _ = client(ctl=[reply(jobs=[job, whole])] * 3, one=[health(), reply(id="m3")])
    spoilt, other = mpirun.own_jobs()
    assert (spoilt.id, spoilt.state.value, spoilt.nodes) == (job_id, "UNKNOWN", ())
    assert "record is damaged" in spoilt.reason
    assert (other.id, other.state.value) == ("m2", "COMPLETED")
    # It does not block other jobs.
    assert mpirun.submit(START) == "m3"
    if job_id == "m1":
        assert [condition(error) for error in mpirun.cancel(["m1"]).values()] == [
            "not-found/job-nodes"
        ]


def test_read_of_anything_but_a_record_is_none(tmp_path):
    path = tmp_path / "job.json"
    assert read(path) is None
    for spoil in (path.mkdir, lambda: os.mkfifo(path), lambda: path.symlink_to("/dev/zero")):
        spoil()
        assert read(path) is None
        with pytest.raises(OSError):  # noqa: PT011
            open_new(path)
        path.rmdir() if path.is_dir() else path.unlink()
    for text in ("", "[]", "[" * 100_000, '{"a": "' + "x" * (2 << 20) + '"}', "\0", "{"):
        path.write_text(text)
        assert read(path) is None
    path.write_text('{"a": 1}')
    assert read(path) == {"a": 1}


def test_valid_record_rejects_incomplete_records():
    good = {key: value for key, value in record().items() if key not in {"id", "end", "cancelled"}}
    assert remote_jobs.valid_record(good) == good
    for bad in (None, {}, *({**good, "nodes": nodes} for nodes in ([], "d-train-1", [1]))):
        assert remote_jobs.valid_record(bad) == {}
    for key in good:
        assert remote_jobs.valid_record({**good, key: None}) == {}


def test_nodes_are_idle_allocated_or_down():
    hardware = Step(("sh", "-c", "..."), "8\n16384000\n")
    going = record()
    mpirun, hosts = client(ctl=[reply(jobs=[going])], one=[reply(jobs=[going]), hardware])
    hosts["d-train-2"] = ScriptedTransport(
        [Step(("sh", "-c", "..."), error=UnreachableError("no route"))]
    )
    one, two = mpirun.nodes()
    assert (one.state, one.usable, one.cpus, one.memory_mib) == ("ALLOCATED", True, 8, 16000)
    assert (two.state, two.usable, "not answer" in two.reason) == ("DOWN", False, True)


def test_job_with_a_spoilt_record_ends_with_its_unit() -> None:
    """Otherwise `submit --wait` would wait for it forever."""
    spoilt = {"id": "m3", "cancelled": False}
    assert job_info({**spoilt, "end": ended("success")}, "u").state.value == "COMPLETED"
    assert job_info({**spoilt, "end": {"result": []}}, "u").state.value == "UNKNOWN"


def test_lock_that_a_job_holds_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(remote_jobs, "ASK_S", 0.2)
    account = pwd.getpwuid(os.getuid())
    monkeypatch.setattr(
        pwd, "getpwnam", lambda _: pwd.struct_passwd((*account[:5], str(tmp_path), ""))
    )
    user = remote_jobs.JobUser("me", "clusterctl")
    with user.locked(), pytest.raises(SystemExit) as caught, user.locked():
        pass
    assert caught.value.code == 68
    assert "/mpirun/.lock' is still locked after 0.2 s" in capsys.readouterr().err


def test_command_runs_beside_a_job_as_its_user() -> None:
    step = Step(("sudo", "-n", "-H", "-u", "ada", "show"), "answer")
    jobs, _ = client(one=[step])
    assert jobs.run_in_job(job_info(record(), "ada"), ["show"]).stdout == "answer"


def test_operations_on_nodes_do_nothing_without_slurm() -> None:
    """`up` and `down` call them on every cluster. No command reaches a host."""
    mpirun, _ = client()
    assert not mpirun.drains_nodes
    assert mpirun.drain(("d-1",), "maintenance") == ()
    assert mpirun.release_held_jobs() == ()
    mpirun.set_down(("d-1",), "lost")
    mpirun.resume(("d-1",))
    mpirun.reconfigure()
