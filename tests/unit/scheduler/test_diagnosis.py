"""Tests of diagnoses, with recorded output of programs, launchers and Slurm."""

# ruff: noqa: E501 - recorded lines

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusterctl.scheduler.base import JobInfo, JobState, StepInfo, reason_in_words
from clusterctl.scheduler.ends.diagnose import diagnose, diagnose_waiting
from clusterctl.scheduler.ends.diagnosis import Diagnosis
from clusterctl.scheduler.ends.ending import Ending
from clusterctl.scheduler.ends.excerpt import OF_OTHERS
from clusterctl.scheduler.ends.facts import Evidence
from clusterctl.scheduler.history import Attempt
from clusterctl.scheduler.sites import advice
from tests.support.messages import condition

JOB = JobInfo(
    number=12,
    name="train",
    user="ada",
    state=JobState.FAILED,
    reason="NonZeroExitCode",
    exit_code=1,
    signal=0,
    nodes=("n1", "n2"),
)
OPERATOR: dict[str, Any] = {"advice": advice.OWN}
GUEST: dict[str, Any] = {"advice": advice.FOREIGN}
TRACEBACK = (
    'Traceback (most recent call last):\n  File "/jobs/x/x.py", line 7, in <module>\n    main()\n'
)
MPIRUN = (
    f"{'-' * 74}\nPrimary job  terminated normally, but 1 process returned\n"
    f"a non-zero exit code. Per user-direction, the job has been aborted.\n{'-' * 74}\n"
)
# Last output of torchrun 2.x.
TORCHRUN = """\
E1122 21:00:00.000000 55 torch/distributed/elastic/multiprocessing/api.py:842] failed (exitcode: 1) local_rank: 1
Traceback (most recent call last):
  File "/env/bin/torchrun", line 8, in <module>
    sys.exit(main())
  File "/env/torch/distributed/launcher/api.py", line 264, in launch_agent
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
x.py FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-22_21:00:0{second}
  host      : {host}
  rank      : {rank} (local_rank: 1)
  exitcode  : {code} (pid: 56)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""


# Messages of Open MPI 5 about a lost peer, of UCX about a signal in its rank, and the last lines of
# prterun.
PEER_GONE = f"""\
{"-" * 74}
An MPI communication peer process has unexpectedly disconnected.  This
usually indicates a failure in the peer process (e.g., a crash or
otherwise exiting without calling MPI_FINALIZE first).

  Local host: n1
  Local PID:  1384
  Peer host:  n2
{"-" * 74}
[n1:00000] *** An error occurred in Socket closed
"""
PRTERUN_ABORT = f"""\
{"-" * 74}
prterun has exited due to process rank 0 with PID 0 on node n1 calling
"abort". This may have caused other processes in the application to be
terminated by signals sent by prterun (as reported here).
{"-" * 74}
"""


def attempt_with(**event: Any) -> Attempt:
    """Return an attempt with a single event."""
    return Attempt(events=[{"time": 9, **event}])


def job_with(**fields: Any) -> JobInfo:
    return replace(JOB, **fields)


def diagnosis_of(log: str, **job: Any) -> Diagnosis:
    return diagnose(Evidence(job=job_with(**job), log=log))


def ending_of(found: Diagnosis) -> Ending:
    return Ending.of([replace(JOB, state=JobState(found.state))], found)


def names(found: Diagnosis) -> set[str]:
    """Return the code of the diagnosis, and the names of its hints."""
    return {found.code, *(hint.name for hint in found.hints)}


LOGS = (
    ("missing-module", "/opt/clusterctl/env/bin/python: No module named nosuch\n"),
    (
        "relative-import-in-script",
        TRACEBACK + "ImportError: attempted relative import with no known parent package\n",
    ),
    ("missing-name", TRACEBACK + "ImportError: cannot import name 'abc' from 'torch' (/env/torch/__init__.py)\n"),
    ("missing-file", "cat: /data/x: No such file or directory\n"),
    ("missing-file", "rank 0 on n1: --data: /data/x cannot be read: No such file or directory\n"),
    ("missing-file", "/bin/bash: line 3: ./setup.sh: No such file or directory\n"),
    ("missing-file", "python3: can't open file '/tmp/nosuch.py': [Errno 2] No such file or directory\n"),
    ("windows-newlines", "slurmstepd-n1: error: execve(): hostname\r: No such file or directory\n"),
    ("windows-newlines", "run.sh: line 3: cd: data\r: No such file or directory\n"),
    ("windows-newlines", "setup.sh: line 2: $'\\r': command not found\n"),
    ("windows-newlines", "/usr/bin/env: 'python3\\r': No such file or directory\n"),
    ("windows-newlines", "./a.sh: /bin/bash^M: bad interpreter: No such file or directory\n"),
    ("modules-of-another-site", "/jobs/x/run.sh: line 4: .venv/bin/activate: No such file or directory\n"),
    ("modules-of-another-site", "/jobs/x/run.sh: 4: .: cannot open /home/ada/env/bin/activate: No such file\n"),
    ("missing-file", ("python: can't open file '/jobs/x/10.1.2.3:29500': [Errno 2] No such file or "
        "directory\n")),
    ("command-not-found", "job.sh: line 2: ffmpeg: command not found\n"),
    ("command-not-found", "/bin/sh: 1: ffmpeg: not found\n"),
    ("command-not-found", "slurmstepd-n1: error: execve(): nosuch: No such file or directory\n"),
    (
        "missing-file",
        TRACEBACK + '  File "/usr/lib/python3.13/subprocess.py", line 1972, in _execute_child\n'
        "    raise child_exception_type(errno_num, err_msg, err_filename)\n"
        "FileNotFoundError: [Errno 2] No such file or directory: 'git'\n",
    ),
    ("missing-file", TRACEBACK + "FileNotFoundError: [Errno 2] No such file or directory: 'git'\n"),
    (
        "command-not-found",
        f"{'-' * 74}\nmpirun was unable to find the specified executable file, and therefore\n"
        f"did not launch the job.\n\nNode:       n1\nExecutable: nosuchprog\n{'-' * 74}\n",
    ),
    ("not-executable", "job.sh: line 1: /shared/x: Permission denied\n"),
    ("not-executable", "slurmstepd-n1: error: execve(): /jobs/x/run: Permission denied\n"),
    ("noexec", ("slurmstepd-n1: error: execve(): /run/slurmd/job00002/slurm_script: Permission "
        "denied\n")),
    ("wrong-architecture", "job.sh: line 2: ./a.out: cannot execute binary file: Exec format error\n"),
    ("wrong-architecture", TRACEBACK + "OSError: [Errno 8] Exec format error: './a.out'\n"),
    (
        "missing-library",
        "./a: error while loading shared libraries: libfoo.so.3: cannot open shared object "
        "file: No such file or directory\n",
    ),
    ("glibc", ("./a: /lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.38' not found (required by "
        "./a)\n")),
    ("library-versions", TRACEBACK + "ImportError: /env/x.so: undefined symbol: _ZN3c10\n"),
    ("host-memory", ("terminate called after throwing an instance of 'std::bad_alloc'\n"
        "  what():  std::bad_alloc\n")),
    ("host-memory", TRACEBACK + ("numpy.core._exceptions._ArrayMemoryError: Unable to allocate 7.28 TiB for an "
        "array\n")),
    ("cuda-out-of-memory", TRACEBACK + "RuntimeError: CUDA error: out of memory\n"),
    ("cuda-out-of-memory", TRACEBACK + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB\n"),
    ("cuda-driver-too-old", TRACEBACK + "RuntimeError: The NVIDIA driver on your system is too old (found version 11040).\n"),
    ("no-gpu", TRACEBACK + "RuntimeError: Found no NVIDIA driver on your system.\n"),
    ("cuda-no-kernel-image", TRACEBACK + "RuntimeError: CUDA error: no kernel image is available for execution on the device\n"),
    ("library-versions", TRACEBACK + "ImportError: /lib64/libcudart.so.12: version `libcudart.so.12' not found (required by /env/x.so)\n"),
    ("gpu-lost", TRACEBACK + "RuntimeError: CUDA error: uncorrectable ECC error encountered\n"),
    ("gloo-interface", TRACEBACK + "RuntimeError: [enforce fail at gloo/transport/tcp/device.cc:83] ifa != nullptr. Unable to find address for: eth7\n"),
    ("nccl", TRACEBACK + "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1691, internal error, NCCL version 2.20.5\n"
        "ncclInternalError: Internal check failed.\n"),
    ("no-gpu", TRACEBACK + "AssertionError: Torch not compiled with CUDA enabled\n"),
    ("no-gpu", TRACEBACK + "ValueError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!\n"),
    ("invalid-device-ordinal", TRACEBACK + "RuntimeError: CUDA error: invalid device ordinal\n"),
    ("cuda-assert", TRACEBACK + "RuntimeError: CUDA error: device-side assert triggered\n"),
    ("cuda-error", TRACEBACK + "RuntimeError: CUDA error: an illegal memory access was encountered\n"),
    ("cuda-error", TRACEBACK + "RuntimeError: CUDA error: misaligned address\n"),
    (
        "nccl",
        TRACEBACK + "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:219, "
            "unhandled system error\n"
            "ncclSystemError: System call (e.g. socket, malloc) or external library call "
            "failed\n"
            "Last error:\n"
            "socketStartConnect: Connect to 10.0.0.1<4711> failed : No route to host\n",
    ),
    (
        "nccl-usage",
        TRACEBACK + "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1333, "
            "invalid usage\n"
            "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\n"
            "Last error:\n"
            "Duplicate GPU detected\n",
    ),
    (
        "nccl-timeout",
        "[rank0]:[E1122 21:00:00 ProcessGroupNCCL.cpp:616] [Rank 0] Watchdog caught "
        "collective operation timeout: WorkNCCL(SeqNum=1, OpType=ALLREDUCE) ran for 600000 "
        "milliseconds before timing out.\n",
    ),
    ("port-in-use", TRACEBACK + "OSError: [Errno 98] Address already in use\n"),
    (
        "port-in-use",
        TRACEBACK + "torch.distributed.DistNetworkError: The server socket has failed to listen on "
            "any local network address. port: 29500, useIpv6: false, code: -98, name: "
            "EADDRINUSE, message: address already in use\n",
    ),
    ("rendezvous", TRACEBACK + ("torch.distributed.DistNetworkError: The client socket has timed out after 60000ms "
        "while trying to connect to (n1, 29500).\n")),
    ("no-network", TRACEBACK + "socket.gaierror: [Errno -2] Name or service not known\n"),
    ("no-network", TRACEBACK + "OSError: [Errno 101] Network is unreachable\n"),
    ("connection-lost", TRACEBACK + ("RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed "
        "out waiting 1800000ms for recv operation\n")),
    ("connection-lost", TRACEBACK + ("RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:525] Connection "
        "closed by peer [10.0.0.1]:4711\n")),
    ("disk-quota", TRACEBACK + "OSError: [Errno 122] Disk quota exceeded: 'x'\n"),
    ("read-only-file-system", TRACEBACK + "OSError: [Errno 30] Read-only file system: '/usr/x'\n"),
    ("too-many-files", TRACEBACK + "OSError: [Errno 24] Too many open files: '/dev/null'\n"),
    ("permission-denied", TRACEBACK + "PermissionError: [Errno 13] Permission denied: '/etc/x'\n"),
    ("shared-memory", TRACEBACK + ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. It is "
        "possible that dataloader's workers are out of shared memory.\n")),
    ("windows-newlines", "job.sh: line 2: $'\\r': command not found\n"),
    ("python-exception", TRACEBACK + "ValueError: x\n"),
    ("python-exception", TRACEBACK + "my.lib.Oops: x\n"),
    ("mpi-slots", (f"{'-' * 74}\n"
        "There are not enough slots available in the system to satisfy the 64\n"
        "slots\n")),
    ("mpi-launch", (f"{'-' * 74}\n"
        "ORTE was unable to reliably start one or more daemons.\n"
        "This\n")),
    ("mpi-truncate", TRACEBACK + "mpi4py.MPI.Exception: MPI_ERR_TRUNCATE: message truncated\n"),
    (
        "mpi-no-free-slots",
        "All nodes which are allocated for this job are already filled.\n"
        "[n1:7] *** An error occurred in MPI_Comm_spawn\n"
        "[n1:7] *** MPI_ERR_UNKNOWN: unknown error\n",
    ),
    ("mpi-no-free-slots", ("[n1:7] *** An error occurred in MPI_Comm_spawn\n"
        "[n1:7] *** MPI_ERR_UNKNOWN: x\n")),
    (
        "python-exception",
        TRACEBACK + '  File "src/mpi4py/MPI.src/Comm.pyx", line 2560, in mpi4py.MPI.Intracomm.Spawn\n'
        "mpi4py.MPI.Exception: MPI_ERR_UNKNOWN: unknown error\n",
    ),
    ("out-of-memory", ("slurmstepd-n1: error: StepId=12.0 exceeded memory limit (5000 > 4000), being "
        "killed\n")),
    ("out-of-memory", "srun: error: n1: task 0: Out Of Memory\n"),
    ("segmentation-fault", "srun: error: n1: task 0: Segmentation fault (core dumped)\n"),
    ("bus-error", "srun: error: n1: task 0: Bus error\n"),
    ("illegal-instruction", "srun: error: n1: task 0: Illegal instruction\n"),
    ("floating-point-exception", "srun: error: n1: task 0: Floating point exception\n"),
    ("abort", "srun: error: n1: task 0: Aborted (core dumped)\n"),
    ("killed", "srun: error: n1: task 0: Killed\n"),
    ("terminated", "srun: error: n1: task 0: Terminated\n"),
    ("cpu-limit", "srun: error: n1: task 0: CPU time limit exceeded (core dumped)\n"),
    ("modules-of-another-site", "job.sh: line 3: module: command not found\n"),
    ("worker-killed", TRACEBACK + "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed. \n"),
    (
        "download-without-internet",
        TRACEBACK + "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='huggingface.co', "
        "port=443): Max retries exceeded with url: /gpt2 (Caused by NameResolutionError('Failed to "
        "resolve'))\n",
    ),
    ("segmentation-fault", MPIRUN + ("mpirun noticed that process rank 1 with PID 0 on node n2 exited on signal 11 "
        "(Segmentation fault).\n")),
    ("exit-code", "it went wrong\n"),
    ("exit-code", ""),
)  # fmt: skip


@pytest.mark.parametrize(("code", "log"), LOGS)
def test_diagnosis_of_recorded_logs_has_the_code_of_the_cause(code: str, log: str) -> None:
    found = diagnosis_of(log)
    assert code in names(found), found
    assert ending_of(found).summary.startswith("job 12 (train) failed: ")
    assert "{" not in found.cause + found.fix


@pytest.mark.parametrize(
    "code",
    [
        "build-failed",
        "module-not-loaded",
        "secrets-gone",
        "not-staged",
        "image-unfit",
        "packed-tasks",
    ],
)
def test_cause_that_the_job_recorded_is_told_with_its_text(code: str) -> None:
    log = "main.f90:3:4: Error: syntax\nclusterctl: the text\n"
    attempt = attempt_with(event="cause", code=code, text="the text\x1b[2J", task=3)
    found = diagnose(Evidence(job=JOB, log=log, attempt=attempt))
    assert (found.code, found.cause) == (code, "the text[2J")
    assert "{" not in found.fix
    assert ("logs 12_3" in found.fix) is (code == "packed-tasks")


@pytest.mark.parametrize("code", ["", 3, None, "other", ["build-failed"]])
def test_cause_of_another_code_is_no_cause(code: Any) -> None:
    """The job's program can write to its record."""
    attempt = attempt_with(event="cause", code=code, text="the text")
    assert diagnose(Evidence(job=JOB, attempt=attempt)).code == "exit-code"


STATES = (
    ("time-limit", "TIMEOUT", "TimeLimit"),
    ("lost-node", "NODE_FAIL", "NodeDown"),
    ("preempted", "PREEMPTED", "None"),
    ("cancelled", "CANCELLED", "None"),
    ("deadline", "DEADLINE", "DeadLine"),
    ("revoked", "REVOKED", "None"),
    ("boot-failure", "BOOT_FAIL", ""),
    ("no-record", "PURGED", ""),
    ("out-of-memory", "OUT_OF_MEMORY", "OutOfMemory"),
    ("waiting-for-resources", "PENDING", "Resources"),
    ("waiting-for-priority", "PENDING", "Priority"),
    ("waiting-for-dependency", "PENDING", "Dependency"),
    ("dependency-never-satisfied", "PENDING", "DependencyNeverSatisfied"),
    ("waiting-for-nodes-out-of-service", "PENDING", "ReqNodeNotAvail, UnavailableNodes:n1"),
    (
        "waiting-for-nodes-out-of-service",
        "PENDING",
        "Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved",
    ),
    (
        "waiting-for-unavailable-nodes",
        "PENDING",
        "ReqNodeNotAvail,_May_be_reserved_for_other_job",
    ),
    ("waiting-for-time", "PENDING", "BeginTime"),
    ("partition-down", "PENDING", "PartitionDown"),
    ("waiting-for-licenses", "PENDING", "Licenses"),
    ("waiting-for-reservation", "PENDING", "Reservation"),
    ("waiting-for-quota", "PENDING", "QOSMaxJobsPerUserLimit"),
    ("waiting-for-quota", "PENDING", "AssocGrpCpuLimit"),
    ("waiting-for-quota", "PENDING", "MaxGRESPerAccount"),
    ("waiting-for-quota", "PENDING", "AssocGrpCPUMinutesLimit"),
    ("waiting-for-own-array", "PENDING", "JobArrayTaskLimit"),
    ("waiting-for-another-reason", "PENDING", "BurstBufferStageIn"),
    ("waiting-for-another-reason", "PENDING", "BurstBufferResources"),
    ("user-environment", "PENDING", "user env retrieval failed requeued held"),
    ("waiting-beyond-partition", "PENDING", "PartitionConfig"),
    ("waiting-beyond-limits", "PENDING", "BadConstraints"),
    ("waiting-beyond-job-limit", "PENDING", "QOSMaxCpuPerJobLimit"),
    ("waiting-beyond-job-limit", "PENDING", "AssocMaxWallDurationPerJobLimit"),
    ("waiting-beyond-job-limit", "PENDING", "QOSMinGRES"),
    ("waiting-without-permission", "PENDING", "AccountNotAllowed"),
    ("reservation-gone", "PENDING", "ReservationDeleted"),
    ("held", "PENDING", "JobHoldMaxRequeue"),
    ("held", "PENDING", "job requeued in held state"),
    ("held", "PENDING", "JobHeldAdmin"),
    ("waiting-beyond-limits", "PENDING", "PartitionTimeLimit"),
    ("held", "PENDING", "JobHeldUser"),
    ("held-after-launch-failure", "PENDING", "launch failed requeued held"),
    ("held-after-launch-failure", "PENDING", "launch failure limit exceeded requeued held"),
    ("waiting-for-the-scheduler", "PENDING", "None"),
)


@pytest.mark.parametrize(("code", "state", "reason"), STATES)
def test_diagnosis_of_slurms_state_and_reason(code: str, state: str, reason: str) -> None:
    found = diagnosis_of(TRACEBACK + "ValueError: x\n", state=JobState(state), reason=reason)
    assert (found.code, found.state) == (code, state)
    verb = ending_of(found).summary.removeprefix("job 12 (train) ").partition(":")[0]
    assert verb in ({"is waiting"} if state == "PENDING" else {"failed", "ended"})
    # Only a job that can start some day is told to wait.
    assert not (
        replace(JOB, state=JobState(state), reason=reason).is_stuck and found.fix.startswith("wait")
    )


def test_diagnose_waiting_distinguishes_jobs_by_their_request() -> None:
    """Two jobs wait for the same reason, with different numbers of nodes."""
    pending = replace(JOB, state=JobState.PENDING, reason="PartitionConfig", partition="train")
    jobs = [replace(pending, number=count, tres=f"cpu=1,mem=1G,node={count}") for count in (2, 3)]
    found = [*diagnose_waiting(jobs, **OPERATOR)]
    assert [diagnosis.job_id for diagnosis in found] == ["2", "3"]
    assert ["2 nodes" in found[0].cause, "3 nodes" in found[1].cause] == [True, True]


@pytest.mark.parametrize(
    "reason", ["JobHeldUser", "JobArrayTaskLimit", "launch failed requeued held"]
)
def test_fix_of_a_waiting_job_has_its_id(reason: str) -> None:
    pending = replace(JOB, state=JobState.PENDING, reason=reason)
    found = [*diagnose_waiting([replace(pending, task=task) for task in (3, 4)], **OPERATOR)]
    assert ["12_3" in found[0].fix, "12_4" in found[1].fix] == [True, True]
    assert not any("JOB" in diagnosis.fix for diagnosis in found)


@pytest.mark.parametrize(
    ("state", "reason", "operator_words"),
    [
        ("PENDING", "JobHeldAdmin", "--admin"),
        ("PENDING", "PartitionDown", "scontrol update"),
        ("PENDING", "ReqNodeNotAvail", "clusterctl up"),
        ("PENDING", "launch failed requeued held", "clusterctl up"),
        ("BOOT_FAIL", "", "clusterctl up"),
        ("NODE_FAIL", "", "clusterctl up"),
    ],
)
def test_fix_for_a_guest_names_the_administrators(
    state: str, reason: str, operator_words: str
) -> None:
    job = replace(JOB, state=JobState(state), reason=reason)
    operator_finding, guest_finding = (
        diagnose(Evidence(job=job, **reader)) for reader in (OPERATOR, GUEST)
    )
    assert operator_finding.code == guest_finding.code
    assert (operator_words in operator_finding.fix, operator_words in guest_finding.fix) == (
        True,
        False,
    )
    assert "administrators" in guest_finding.fix


@pytest.mark.parametrize(
    ("days", "is_told"), [(1, True), (50, True), (364, False), (365, False), (-1, False)]
)
def test_start_estimate_months_ahead_is_not_shown(days: int, is_told: bool) -> None:
    """Slurm takes such a job to last for a year."""
    job = replace(JOB, state=JobState.PENDING, reason="Resources")
    found = diagnose(Evidence(job=replace(job, expected_start=int(time.time()) + days * 86_400)))
    assert ("expects to start it" in found.cause) is is_told


@pytest.mark.parametrize(
    "reason",
    [
        "JobHeldUser",
        "JobHeldAdmin",
        "job requeued in held state",
        "job_requeued_in_held_state",
        "JobHoldMaxRequeue",
    ],
)
def test_held_job_has_a_command_with_its_id_and_no_expected_start(reason: str) -> None:
    job = replace(JOB, state=JobState.PENDING, reason=reason, expected_start=int(time.time()) + 30)
    found = diagnose(Evidence(job=job))
    assert found.code == "held"
    assert "scontrol release 12`" in found.fix
    assert "expects" not in found.cause


def test_job_requeued_in_held_state_after_a_failed_launch_was_held_by_slurm() -> None:
    job = replace(JOB, state=JobState.PENDING, reason="launch failed requeued held")
    assert diagnose(Evidence(job=job)).code == "held-after-launch-failure"


def test_command_that_shows_the_log_is_given_once() -> None:
    assert ending_of(diagnosis_of("odd\n")).fix.count("clusterctl logs 12") == 1
    renamed = Diagnosis(job_id="12", fix="rename x", lines=("odd",))
    ending = Ending(job_id="12", diagnosis=renamed, logs="demo/12")
    assert ending.fix == "rename x; the whole log: `clusterctl logs demo/12`"


@pytest.mark.parametrize("more", ["", "the plain model is used\nthe model is too bad\n"])
def test_line_has_a_hint_only_if_it_is_the_last(more: str) -> None:
    """After another line the program may have gone on."""
    line = "ModuleNotFoundError: No module named 'fine'\n"
    found = diagnosis_of(line + more)
    assert [(hint.name, hint.is_certain) for hint in found.hints] == (
        [] if more else [("missing-module", True)]
    )
    assert not more or found.fix.startswith("no remedy")


MEASURED = re.compile(r"n\d|[\d.]+ GiB").findall


def test_out_of_memory_has_peak_and_limit() -> None:
    job = replace(JOB, state=JobState.OUT_OF_MEMORY, tres="cpu=2,mem=8G,node=2,billing=2")
    steps = (
        StepInfo("12.0", peak=4187593113, peak_host="n2"),
        StepInfo("12.batch", peak=9_000_000),
    )
    found = diagnose(Evidence(job=job, steps=steps))
    assert (found.code, MEASURED(found.cause)) == ("out-of-memory", ["n2", "3.9 GiB", "4 GiB"])
    assert "--mem" in found.fix
    # A sample that Slurm took seconds before the end is not the peak.
    found = diagnose(Evidence(job=job, steps=steps[1:]))
    assert MEASURED(found.cause) == ["4 GiB"]
    # Without a scheduler there is no --mem.
    assert "--mem" not in diagnose(Evidence(job=replace(job, prefix="m"))).fix


def test_out_of_memory_message_of_slurmstepd_has_peak_and_limit() -> None:
    """slurmstepd's message if Slurm itself enforces the memory limit; the job's state is then
    FAILED.
    """
    log = (
        "slurmstepd-n2: error: StepId=12.0 exceeded memory limit (4724464025 > 4294967296), "
        "being killed\n"
        "srun: error: n2: task 1: Killed\n"
    )
    found = diagnosis_of(log, reason="JobLaunchFailure", exit_code=0, signal=9)
    assert (found.code, found.rank) == ("out-of-memory", 1)
    assert MEASURED(found.cause) == ["n2", "4.4 GiB", "4 GiB"]
    assert "JobLaunchFailure" not in ending_of(found).outcome


def test_cancelled_job_names_the_user_and_timeout_the_limit() -> None:
    found = diagnose(Evidence(job=replace(JOB, state=JobState.CANCELLED), cancelled_by="bob"))
    assert found.cause.endswith(" by bob")
    job = replace(JOB, state=JobState.TIMEOUT, time_limit_s=300, start_time=1000, end_time=1310)
    words = diagnose(Evidence(job=job)).cause.split()
    assert [word for word in words if word[0].isdigit()] == ["5m", "5m10s"]


@pytest.mark.parametrize(
    ("log", "rank", "host", "how"),
    [
        ("srun: error: n2: task 1: Exited with exit code 3\n", 1, "n2", "exit code 3"),
        (
            "srun: error: n2: task 1: Segmentation fault\n"
            "srun: launch/slurm: _step_signal: Terminating StepId=7.0\n"
            "srun: error: n1: task 0: Exited with exit code 15\n",
            1,
            "n2",
            "SIGSEGV",
        ),
        (
            "srun: Job step aborted: Waiting up to 7 seconds for job step to finish.\n"
            "srun: error: n1: task 0: Killed\nsrun: error: n2: task 1: Exited with exit code 1\n",
            1,
            "n2",
            "exit code 1",
        ),
        ("srun: error: n2: tasks 2-3: Exited with exit code 139\n", 2, "n2", "exit code 139"),
        (MPIRUN + ("mpirun noticed that process rank 1 with PID 0 on node n2 exited on signal 9 "
            "(Killed).\n"), 1, "n2", "SIGKILL"),
        (MPIRUN + "  Process name: [[17184,1],1]\n  Exit code:    7\n", 1, "n2", "exit code 7"),
        (TORCHRUN.format(second=1, host="n2.cluster", rank=3, code=-11), 3, "n2", "SIGSEGV"),
        (
            TORCHRUN.format(second=2, host="n1", rank=0, code=1) + TORCHRUN.format(second=1, host="n2", rank=3, code=5),
            3,
            "n2",
            "exit code 5",
        ),
    ],
)  # fmt: skip
def test_diagnosis_names_the_rank_that_failed_first(
    log: str, rank: int, host: str, how: str
) -> None:
    found = diagnose(Evidence(job=JOB, log=log, tasks_per_node=1))
    assert (found.rank, found.host) == (rank, host)
    assert how == (found.signal or f"exit code {found.exit_code}")
    assert f"rank {rank} on {host}" in found.cause


@pytest.mark.parametrize(
    ("log", "how", "code"),
    [
        ("", "", "exit-code"),
        ("139 tests failed\n", "exit", "exit-code"),
        ("Segmentation faults: 139\n", "", "exit-code"),
        ("srun: error: n1: task 0: Exited with exit code 139\n", "", "exit-code"),
        ("", "SIGSEGV", "signal"),
        ("", "SIGBUS", "exit-code"),
        ("run.sh: line 4:  1457 Segmentation fault      ./a.out\n", "exit", "signal"),
        ("Segmentation fault (core dumped)\n", "exit", "signal"),
        ("srun: error: n1: task 0: Segmentation fault\n", "", "signal"),
    ],
)
def test_exit_code_is_a_signal_only_if_a_signal_was_reported(log: str, how: str, code: str) -> None:
    """A shell returns 139 for a program that SIGSEGV has ended, and any program may exit with it."""
    job = replace(JOB, exit_code=139, nodes=("n1",))
    found = diagnose(Evidence(job=job, log=log, attempt=attempt_with(event="end", how=how)))
    signal = "SIGSEGV" if code == "signal" else ""
    # As the job itself has it.
    assert (found.code, found.signal, found.exit_code) == (code, signal, 139)


def test_unknown_exit_code_of_a_job_is_unknown_in_its_diagnosis() -> None:
    stopped = replace(JOB, state=JobState.TIMEOUT, exit_code=None, signal=None)
    found = diagnose(Evidence(job=stopped))
    assert (found.exit_code, found.signal) == (None, "")


STEP = "srun: error: n1: task 0: {}\nsrun: Terminating StepId=7.{}\n"
CRASHED = STEP.format("Segmentation fault", 1)
EXITED = STEP.format("Exited with exit code 4", 2)


@pytest.mark.parametrize(
    ("script", "log", "exit_code", "code", "shown"),
    [
        ("#!/bin/bash\n", CRASHED, 139, "signal", 139),
        # The script went on.
        ("#!/bin/bash\n", CRASHED, 1, "exit-code", 1),
        ("#!/bin/bash\n", EXITED, 6, "exit-code", 6),
        ("", CRASHED, 1, "signal", None),
        # The later step ended the script.
        ("#!/bin/bash\n", CRASHED + EXITED, 4, "exit-code", 4),
        ("#!/bin/bash\n", EXITED + CRASHED, 139, "signal", 139),
        # A rank that srun killed afterwards, and whose status is srun's.
        (
            "#!/bin/bash\n",
            STEP.format("Exited with exit code 3", 1) + "srun: error: n1: task 1: Killed\n",
            137,
            "exit-code",
            3,
        ),
    ],
)
def test_step_that_its_script_survived_is_not_the_cause(
    script: str, log: str, exit_code: int, code: str, shown: int | None
) -> None:
    job = replace(JOB, exit_code=exit_code, nodes=("n1",))
    found = diagnose(Evidence(job=job, log=log, script=script))
    assert (found.code, found.exit_code) == (code, shown)


def test_later_of_two_steps_that_end_alike_ended_the_script() -> None:
    first, second = (
        STEP.format("Exited with exit code 4", step).replace("n1: task 0", f"n{step}: task {step}")
        for step in (1, 2)
    )
    job = replace(JOB, exit_code=4)
    found = diagnose(Evidence(job=job, log=first + second, script="#!/bin/bash\n"))
    assert (found.rank, found.host) == (2, "n2")


def test_step_ended_the_script_if_the_exit_code_is_that_of_a_rank_that_srun_killed() -> None:
    warm_up = STEP.format("Exited with exit code 1", 1) + "srun: error: n2: task 1: Killed\n"
    step = STEP.format("Exited with exit code 5", 2) + "srun: error: n2: task 1: Terminated\n"
    step = step.replace("srun: T", "srun: launch/slurm: _step_signal: T")  # Slurm 22.05
    job = replace(JOB, exit_code=143)
    found = diagnose(Evidence(job=job, log=warm_up + step, script="#!/bin/bash\n"))
    assert (found.exit_code, found.rank) == (5, 0)


@pytest.mark.parametrize(
    ("log", "is_full", "code"),
    [("", True, "disk-full"), ("", False, "exit-code"), ("step 3\n", True, "exit-code")],
)
def test_empty_log_on_a_full_disk_is_not_a_silent_program(
    log: str, is_full: bool, code: str
) -> None:
    job = replace(JOB, exit_code=1, nodes=("n1",))
    assert diagnose(Evidence(job=job, log=log, was_read=True, is_full=is_full)).code == code


@pytest.mark.parametrize(
    ("script", "exit_code", "remark"),
    [
        ("#!/bin/bash\nsrun ./fine || ./coarse\n", 6, "the script continued after exit code 4"),
        ("srun ./fine || ./coarse\n", 6, "the job itself ended with exit code 6"),
        (
            "srun ./fine\n",
            143,
            "the job itself ended with exit code 143, as a shell does after SIGTERM",
        ),
        ("#!/bin/bash\nset -e\nsrun ./fine\n", 4, ""),
    ],
)
def test_exit_codes_of_the_job_and_of_its_rank_are_both_told(
    script: str, exit_code: int, remark: str
) -> None:
    job = job_with(exit_code=exit_code, nodes=("n1",))
    remarks = [*diagnose(Evidence(job=job, log=EXITED, script=script)).remarks]
    assert bool(remarks) == bool(remark), remarks
    assert not remark or remarks[0].startswith(remark)


def test_exit_code_of_a_script_is_not_of_the_node_whose_failure_it_survived() -> None:
    log = "srun: error: n2: task 1: Exited with exit code 4\nsrun: Terminating StepId=7.0\n"
    job = job_with(exit_code=7, nodes=("n1", "n2"))
    found = diagnose(Evidence(job=job, log=log, script="#!/bin/bash\nsrun ./a || exit 7\n"))
    assert (found.exit_code, found.host) == (7, "")


def test_memory_that_a_script_survived_is_not_the_cause() -> None:
    log = (
        "slurmstepd-n1: error: Detected 1 oom_kill event in StepId=12.0. Some of the step tasks have "
        "been OOM Killed.\nsrun: error: n1: task 0: Out Of Memory\nretry\nresult differs\n"
    )
    script = "#!/bin/bash\nsrun ./big || srun ./small\n./check\n"
    job = job_with(exit_code=7, nodes=("n1",))
    assert diagnose(Evidence(job=job, log=log, script=script)).code == "exit-code"
    killed = replace(job, exit_code=137)
    assert diagnose(Evidence(job=killed, log=log, script=script)).code == "out-of-memory"


def test_exception_of_another_rank_is_said_to_be_of_another() -> None:
    """The rank that failed first wrote nothing."""
    job = job_with(exit_code=1, nodes=("n1",))
    ended = "srun: error: n1: task 1: Exited with exit code 1\nsrun: Terminating StepId=7.0\n"
    late = f"{TRACEBACK}TimeoutError: no answer\n"
    found = diagnose(Evidence(job=job, log=late + ended, ranks={0: late, 1: ""}))
    assert (found.code, found.rank) == ("exit-code", 1)
    assert f"of {OF_OTHERS}" in found.cause


def test_answer_has_the_facts_and_the_hints() -> None:
    found = diagnosis_of(TRACEBACK + "OSError: [Errno 28] No space left on device\n").as_dict()
    assert (condition(found), found["exit_code"]) == ("python-exception", 1)
    assert found["facts"]["lost"] == {}
    (hint,) = found["hints"]
    assert (hint["name"], hint["line"], hint["is_certain"]) == (
        "disk-full",
        found["lines"][-1],
        False,
    )


def test_last_words_on_stderr_are_told_beside_a_traceback_on_stdout() -> None:
    printed = TRACEBACK + "KeyError: 'handled'\n"
    found = diagnose(Evidence(job=JOB, log=f"{printed}\nno folds are left\n", stdout=printed))
    assert (found.code, found.lines[-1]) == ("exit-code", "no folds are left")
    assert ("KeyError" in found.cause, "no folds" in found.cause) == (True, False)


def test_out_of_memory_line_of_another_job_is_no_cause() -> None:
    """A program may print the log of another job."""
    line = "slurmstepd-n7: error: Detected 1 oom_kill event in StepId={}.0. Some of the steps.\n"
    assert diagnosis_of(line.format(12)).code == "out-of-memory"
    assert diagnosis_of(line.format(11) + "1 of 4 jobs failed\n").code == "exit-code"
    assert diagnosis_of(line.format(123) + "1 of 4 jobs failed\n").code == "exit-code"


CAPTURES = Path(__file__).parents[1] / "jobs" / "captures"


def test_traceback_is_of_the_rank_that_failed_first() -> None:
    first = TRACEBACK + "KeyError: 'a bug'\n"
    then = (
        f"{TRACEBACK}RuntimeError: [gloo/transport/tcp/pair.cc:525] Connection closed by peer "
        "[10.0.0.1]:1\n"
    )
    ends = "srun: error: n2: task 1: Exited with exit code 1\n"
    mixed = diagnose(Evidence(job=JOB, log=first + then + ends))
    assert "KeyError: 'a bug'" in mixed.cause
    both = TRACEBACK + "ValueError: of rank 0\n"
    own = diagnose(Evidence(job=JOB, log=first + both + ends, ranks={0: both, 1: first}))
    assert own.lines[-1] == "KeyError: 'a bug'"


def test_messages_of_surviving_ranks_are_not_the_cause() -> None:
    log = (CAPTURES / "killed-torchrun.log").read_text()  # of torch 2.13, on two nodes
    found = diagnose(Evidence(job=JOB, log=log, ranks={0: log.partition("E1123")[0], 1: ""}))
    assert (found.signal, found.rank, found.host, found.lines) == (
        "SIGKILL",
        1,
        "n2",
        (),
    )
    assert found.code == "signal"
    unrecorded = diagnose(Evidence(job=JOB, log=log))
    assert "reset by peer" in unrecorded.lines[-1]


def test_traceback_of_torchrun_is_left_out() -> None:
    log = "[rank1]: " + TRACEBACK.replace("\n", "\n[rank1]: ") + "ValueError: x\n"
    found = diagnosis_of(log + TORCHRUN.format(second=1, host="n1", rank=1, code=1))
    assert found.lines[-1] == "ValueError: x"
    assert (
        found.cause
        == "exit code 1 in rank 1 on n1; last exception at /jobs/x/x.py:7: ValueError: x"
    )
    alone = diagnosis_of(TORCHRUN.format(second=1, host="n1", rank=1, code=-6))
    assert (alone.code, alone.signal) == ("signal", "SIGABRT")


# As PyTorch 2.13 and joblib 1.6 print them.


def test_silent_rank_is_shown_without_lines_of_the_launcher() -> None:
    banner = (
        f"{'-' * 74}\n"
        "mpirun noticed that process rank 1 with PID 0 on node n2 exited on signal 11 (x).\n"
        f"{'-' * 74}\n"
    )
    assert diagnosis_of(MPIRUN + banner).lines == ()
    assert diagnosis_of("srun: error: n2: task 1: Killed\n").lines == ()


def test_escape_sequences_of_a_log_are_removed() -> None:
    found = diagnosis_of("Traceback (most recent call last):\n" * 2**10 + "\x1b[2J")
    assert all(line.isprintable() for line in found.lines)


@pytest.mark.timeout(60)  # seconds; some took minutes
@pytest.mark.parametrize(
    "line",
    [
        "",
        "x" * 2**17,
        "-" * 2**16,
        "  File ",
        "/" * 790,
        "a.b" * 260,
        "[rank0]: " * 80,
        "Traceback: " * 70,
        "run.sh: line 3: /home/ada/jobs/train-1/a-long-name/of-a-folder: Is a directory",
    ],
)
def test_log_of_repeated_lines_is_diagnosed_in_linear_time(line: str) -> None:
    assert diagnosis_of(f"{line}\n" * (2**17 // (len(line) or 32))).state == "FAILED"


def test_rank_that_leaves_mpi_early_hangs_the_others() -> None:
    found = diagnosis_of(
        f"{'-' * 74}\n"
        "mpirun has exited due to process rank 1 with PID 7 on node n2 exiting improperly.\n"
        f"{'-' * 74}\n"
    )
    assert found.code == "exit-code"


def test_node_that_could_not_launch_a_job_is_named_as_its_cause() -> None:
    assert diagnosis_of("", reason="JobLaunchFailure", exit_code=0).code == "launch-failure"
    assert diagnosis_of("", reason="JobLaunchFailure", exit_code=3).code == "exit-code"


@pytest.mark.parametrize(
    "launcher",
    [
        PRTERUN_ABORT,
        *(
            f"srun: error: {one}\n"
            for one in ("n1: task 0: Exited with exit code 14", "n2: task 1: Killed")
        ),
    ],
)
@pytest.mark.parametrize(("end", "how"), [(-7, "SIGBUS"), (-9, "SIGKILL"), (3, ""), (137, "")])
def test_rank_that_lost_another_is_not_the_first_that_failed(
    launcher: str, end: int, how: str
) -> None:
    """The surviving rank reports to its launcher sooner. Ranks that the launcher ended, and records
    that the job wrote, are ignored.
    """
    ends = {0: "5.0 14 n1", 1: f"7.5 {end} n2", 2: "8.0 143 n2", 3: "x", 4: "1 2 3 4", 5: "x 1 n1"}
    # Open MPI sends the rest to its launcher.
    ranks = {
        0: PEER_GONE.rpartition("-\n")[2],
        1: "",
        2: "",
    }
    found = diagnose(Evidence(job=JOB, log=PEER_GONE + launcher, ranks=ranks, ends=ends))
    assert (found.rank, found.host, found.signal) == (1, "n2", how)
    unknown = diagnose(Evidence(job=JOB, log=PEER_GONE + launcher, ranks=ranks))
    assert (unknown.rank, unknown.signal) in {(None, ""), (0, ""), (1, "SIGKILL")}
    sooner = {0: "5.0 -9 n1", 1: f"7.5 {end} n2"}  # that was not ended by the loss of another
    first = diagnose(Evidence(job=JOB, log=launcher, ends=sooner))
    assert (first.rank, first.signal) == (0, "SIGKILL")
    # job.py has killed all ranks but the first.
    killed = attempt_with(event="signal", signal="SIGKILL")
    told = Evidence(job=JOB, log=launcher, attempt=killed)
    own = diagnose(replace(told, ends={0: "9.1 -9 n1", 1: "8.5 -15 n2", 2: "8.7 3 n2"}))
    assert (own.rank, own.exit_code) == (2, 3)
    assert diagnose(replace(told, ends={0: "9.1 -9 n1"})).rank == diagnose(told).rank


@pytest.mark.parametrize(
    ("record", "how"), [("5.0 -6 n2", "SIGABRT"), ("5.0 -9 n2", "SIGKILL"), ("", "SIGKILL")]
)
def test_rank_that_silently_lost_another_is_not_the_first(record: str, how: str) -> None:
    """As Open MPI 5 under load: exit code 14 without a message, and the killed rank may have no
    record of its end.
    """
    log = (
        "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.\n"
        "srun: error: n1: task 0: Exited with exit code 14\n"
        "srun: error: n2: task 1: Killed\n"
    )
    found = diagnose(
        Evidence(job=JOB, log=log, ranks={0: "", 1: ""}, ends={0: "5.1 14 n1", 1: record})
    )
    assert (found.rank, found.host, found.signal) == (1, "n2", how)


@pytest.mark.parametrize(("record", "ended"), [(139, ("", 139)), (-11, ("SIGSEGV", None))])
@pytest.mark.parametrize("said", ["Exited with exit code 139", "Segmentation fault", "Killed"])
def test_recorded_end_is_a_signal_only_if_the_record_says_so(
    record: int, ended: tuple[str, int | None], said: str
) -> None:
    """srun may tell another end, for example if it killed the rank afterwards."""
    log = (
        "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.\n"
        "srun: error: n1: task 0: Exited with exit code 14\n"
        f"srun: error: n2: task 1: {said}\n"
    )
    ends = {0: "5.1 14 n1", 1: f"5.0 {record} n2"}
    found = diagnose(Evidence(job=JOB, log=log, ranks={0: "", 1: ""}, ends=ends))
    assert (found.rank, found.signal, found.exit_code) == (1, *ended)


@pytest.mark.parametrize(("end", "how"), [(-11, "SIGSEGV"), (-9, "SIGKILL"), (137, "")])
@pytest.mark.parametrize("first", [0, 1])
def test_first_failed_rank_is_found_when_srun_killed_all_ranks(
    first: int, end: int, how: str
) -> None:
    """slurmstepd kills all ranks when its PMIx server loses a rank, and the shell can't record how
    its program ended.
    """
    killed = [f"srun: error: n{rank + 1}: task {rank}: Killed\n" for rank in (first, 1 - first)]
    ended = "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.\n" + "".join(
        killed
    )
    ranks = {0: "", 1: ""}
    ends = {1: f"5.0 {end} n2"}
    found = diagnose(Evidence(job=JOB, log=ended, ranks=ranks, ends=ends))
    assert (found.rank, found.host, found.signal) == (1, "n2", how)
    assert diagnose(Evidence(job=JOB, log=ended, ranks=ranks)).rank == first
    for says in ("[n2:31  :0:310] Caught signal 7 (Bus error)", "[n2:00379] Signal: Bus error (7)"):
        unrecorded = diagnose(Evidence(job=JOB, log=ended, ranks=ranks | {1: f"{says}\n"}))
        assert (unrecorded.rank, unrecorded.host, unrecorded.signal) == (1, "n2", "SIGBUS")
    torn = diagnose(Evidence(job=JOB, log=ended, ranks=ranks, ends={1: ""}))
    assert (torn.rank, torn.host, torn.signal) == (1, "n2", "SIGKILL")
    named = diagnose(Evidence(job=JOB, log=killed[0] + ended, ranks=ranks, ends={1: "5.0 7 n2"}))
    # A killed rank has not failed first.
    assert (named.rank, named.exit_code) == (1, 7)


# stderr of a job on n1 and n2 with rank 1 on n2, when n2 died, and when slurmstepd died on n2.
# Slurm 24.11
ABORTED = "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.\n"
SURVIVOR_KILLED = (
    f"{ABORTED}slurmstepd-n1: error: *** STEP 12.1 ON n1 CANCELLED AT 2026-11-26T17:17:55 ***\n"
    "srun: error: n1: task 0: Killed\nsrun: Terminating StepId=12.1\n"
)
# job.py has killed srun.
SRUN_KILLED = attempt_with(event="cause", code="lost-slurmstepd", text="srun waits for ranks")
TIMED_OUT = "srun: error: Timed out waiting for job step to complete\n"
PEER_RESET = (
    TRACEBACK
    + "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:1\n"
)
WATCHED = {"n2": "clusterctl watcher: no answer for 3 s"}


@pytest.mark.parametrize(
    ("log", "ranks", "ends"),
    [
        (SURVIVOR_KILLED + TIMED_OUT, {0: "epoch 1\n", 1: ""}, {}),
        # The program on the survivor ends before srun kills it.
        (
            "srun: error: n1: task 0: Exited with exit code 14\n" + ABORTED,
            {0: PEER_GONE},
            {0: "5.0 14 n1"},
        ),
        (
            "srun: error: n1: task 0: Exited with exit code 1\n" + ABORTED,
            {0: PEER_RESET},
            {0: "5.0 1 n1"},
        ),
        ("srun: error: n1: task 0: Terminated\n" + ABORTED, {0: "", 1: ""}, {0: "5.0 143 n1"}),
        ("lost the peer\n", {0: "lost the peer\n"}, {0: "5.0 7 n1"}),
        ("", {}, {}),
    ],
    ids=["signal", "lost-peer", "reset", "signal", "exit-code", "torchrun"],
)
def test_lost_node_is_the_cause_and_not_its_survivors(
    log: str, ranks: dict[int, str], ends: dict[int, str]
) -> None:
    found = diagnose(Evidence(job=JOB, log=log, ranks=ranks, ends=ends, lost=WATCHED))
    assert (found.code, found.rank, found.host, found.signal) == (
        "lost-node",
        None,
        "n2",
        "",
    )
    assert WATCHED["n2"] in found.cause
    unknown = diagnose(Evidence(job=JOB, log=log, ranks=ranks, ends=ends))
    assert unknown.code != "lost-node"


def test_lost_node_named_by_srun_alone_is_the_cause() -> None:
    log = "srun: error: Node failure on n2\n" + SURVIVOR_KILLED
    found = diagnose(Evidence(job=JOB, log=log, ranks={0: "", 1: ""}))
    assert (found.code, found.host) == ("lost-node", "n2")


@pytest.mark.parametrize(
    ("ranks", "end", "code"),
    [
        ({0: "", 1: ""}, "5.0 -11 n1", "signal"),
        ({0: "", 1: ""}, "5.0 -9 n1", "signal"),
        ({0: TRACEBACK + "KeyError: 'own'\n", 1: ""}, "5.0 1 n1", "python-exception"),
    ],
)
def test_rank_that_failed_by_itself_outweighs_a_lost_node(
    ranks: dict[int, str], end: str, code: str
) -> None:
    """The node may have stopped answering for another reason, or because of the failure."""
    found = diagnose(
        Evidence(job=JOB, log=SURVIVOR_KILLED, ranks=ranks, ends={0: end}, lost=WATCHED)
    )
    assert (found.code, found.rank) == (code, 0)


@pytest.mark.parametrize(
    ("last", "attempt"), [(TIMED_OUT, Attempt()), ("", SRUN_KILLED)], ids=["srun", "job.py"]
)
def test_killed_slurmstepd_is_not_the_fault_of_its_rank(last: str, attempt: Attempt) -> None:
    """Open MPI ends the rank that lost slurmstepd with 195, and slurmstepd never reports the
    end.
    """
    log = SURVIVOR_KILLED + last
    ends = {1: "5.0 195 n2"}
    ranks = {0: "", 1: "[n2:00000] *** An error occurred in PMIx Event Notification\n"}
    evidence = Evidence(job=JOB, log=log, ranks=ranks, ends=ends, attempt=attempt)
    found = diagnose(evidence)
    assert (found.code, found.rank, found.host) == ("lost-slurmstepd", 1, "n2")
    own = diagnose(replace(evidence, ends={1: "5.0 7 n2"}))
    assert own.code == "exit-code"


@pytest.mark.parametrize(
    ("reason", "is_open", "more", "code"),
    [
        ("RaisedSignal:9(Killed)", True, {}, "killed-supervisor"),
        # A rank with a record of its own end does not explain the end of job.py.
        ("RaisedSignal:9(Killed)", True, {"ends": {0: "5.0 143 n1"}}, "killed-supervisor"),
        # The program was killed, and job.py has recorded its end, or it was not SIGKILL.
        ("RaisedSignal:9(Killed)", False, {}, "signal"),
        ("NonZeroExitCode", True, {}, "signal"),
        # The node was lost with job.py.
        ("RaisedSignal:9(Killed)", True, {"lost": WATCHED}, "lost-node"),
    ],
)
def test_killed_job_py_is_not_the_fault_of_the_program(
    reason: str, is_open: bool, more: dict[str, Any], code: str
) -> None:
    job = replace(JOB, reason=reason, exit_code=0, signal=9)
    found = diagnose(
        Evidence(
            job=job,
            log="step 3\n",
            attempt=Attempt({"event": "start", "time": 1} if is_open else {}),
            **more,
        )
    )
    assert found.code == code


@pytest.mark.parametrize(
    ("sent", "number", "code"),
    [
        ({"signal": "SIGUSR1", "notice": True}, 10, "notice-not-handled"),
        ({"signal": "SIGTERM", "notice": True, "state": "RUNNING"}, 15, "notice-not-handled"),
        # Near misses: another signal than the notice, and one that a person has sent.
        ({"signal": "SIGUSR1", "notice": True}, 12, "exit-code"),
        ({"signal": "SIGUSR1"}, 10, "signal"),
    ],
)
def test_signal_that_announces_the_time_limit_is_named(
    sent: dict[str, Any], number: int, code: str
) -> None:
    job = replace(JOB, exit_code=128 + number)
    attempt = attempt_with(event="signal", **sent)
    assert diagnose(Evidence(job=job, log="step 3\n", attempt=attempt)).code == code


def test_ranks_that_job_py_killed_are_not_the_cause() -> None:
    """A slurmstepd was killed under a program without MPI, so that job.py has killed the other
    ranks.
    """
    job = replace(JOB, exit_code=137)
    found = diagnose(
        Evidence(job=job, attempt=SRUN_KILLED, ranks={0: "", 1: ""}, ends={0: "5.0 -9 n1"})
    )
    assert found.code == "lost-slurmstepd"


# stderr of a job with two ranks on n1, of which rank 1 called os._exit(0). Slurm 24.11
LOST_CLIENT = (
    "slurmstepd-n1: error:  mpi/pmix_v5: _errhandler: n1 [0]: pmixp_client_v2.c:211: Error "
    "handler invoked: status = -61, source = [slurm.pmix.3.0:1]\n"
)
CANCELLED_STEP = "slurmstepd-n1: error: *** STEP 3.0 ON n1 CANCELLED AT 2026-11-27T22:11:24 ***\n"
LEFT = (
    f"{LOST_CLIENT}{ABORTED}{CANCELLED_STEP}srun: error: n1: task 0: Killed\n"
    "srun: Terminating StepId=3.0\n"
)


@pytest.mark.parametrize(
    ("log", "ends", "code", "rank"),
    [
        # The lost rank was killed itself, before or after the report of PMIx.
        (f"srun: error: n1: task 1: Killed\n{LEFT}", {}, "signal", 1),
        (LEFT.replace("task 0:", "task 1:"), {}, "signal", 1),
        (LEFT.replace("task 0:", "tasks 0-1:"), {}, "signal", None),
        (LEFT, {1: "5.0 -9 n1"}, "signal", 1),
        (
            f"srun: error: n1: task 1: Exited with exit code 3\n{LEFT}",
            {1: "5.0 3 n1"},
            "exit-code",
            1,
        ),
    ],
)
def test_lost_client_of_pmix_that_failed_has_not_left_mpi(
    log: str, ends: dict[int, str], code: str, rank: int | None
) -> None:
    job = replace(JOB, nodes=("n1",), exit_code=137)
    found = diagnose(Evidence(job=job, log=log, ranks={0: "", 1: ""}, ends=ends))
    assert (found.code, found.rank) == (code, rank)


def test_lost_client_of_pmix_of_a_lost_slurmstepd_has_not_left_mpi() -> None:
    """job.py has killed srun, which then reports nothing."""
    job = replace(JOB, nodes=("n1",), exit_code=137)
    log = LOST_CLIENT + ABORTED
    ends = {0: "5.0 -9 n1"}
    found = diagnose(
        Evidence(job=job, log=log, ranks={0: "", 1: ""}, ends=ends, attempt=SRUN_KILLED)
    )
    assert (found.code, found.rank) == ("lost-slurmstepd", 0)


def test_rank_that_left_mpi_on_a_lost_node_is_not_the_cause() -> None:
    found = diagnose(Evidence(job=JOB, log=LEFT, ranks={0: "", 1: ""}, lost=WATCHED))
    assert (found.code, found.host) == ("lost-node", "n2")


@pytest.mark.parametrize("reason", ["no-progress", "chain-over"])
def test_stopped_restarts_have_reason_and_cause(reason: str) -> None:
    log = TRACEBACK + "KeyError: 'a bug'\n"
    found = diagnose(Evidence(job=JOB, log=log, attempt=attempt_with(event="stop", reason=reason)))
    is_over = reason == "chain-over"
    assert found.code == ("stopped-chain-over" if is_over else "python-exception")
    assert ("KeyError: 'a bug'" in found.cause) is not is_over
    assert any("not restarted" in line for line in found.remarks) is not is_over
    assert found.as_dict()["facts"]["not_restarted"] == reason
    usage = diagnose(Evidence(job=JOB, log=log, attempt=attempt_with(event="stop", reason="usage")))
    assert usage.code == "python-exception"


HANG = {"event": "hang", "time": 100, "seconds": 90, "summary": "rank 1 at loader.py:88"}


def test_hang_is_the_cause_and_not_the_kill_that_ended_it() -> None:
    attempt = Attempt(events=[{**HANG, "action": "end"}])
    found = diagnose(Evidence(job=JOB, log=SURVIVOR_KILLED, attempt=attempt, lost=WATCHED))
    assert found.code == "hang"
    assert "1m30s" in found.cause
    assert "rank 1 at loader.py:88" in found.cause


def test_time_limit_after_a_reported_hang_names_the_hang() -> None:
    attempt = Attempt(events=[{**HANG, "action": "warn"}])
    found = diagnose(Evidence(job=replace(JOB, state=JobState.TIMEOUT), attempt=attempt))
    assert found.code == "time-limit"
    assert str(attempt.hang).removeprefix("no progress ") in found.cause
    assert (
        diagnose(Evidence(job=JOB, log=TRACEBACK + "KeyError: 1\n", attempt=attempt)).code != "hang"
    )


def test_messages_of_clusterctl_are_not_quoted() -> None:
    messages = (
        "clusterctl: hang: no progress for 90 s: rank 1 at x.py:1\n"
        "clusterctl: SIGKILL in rank 1 on n2 after 5 s; this job is requeued\n"
        "clusterctl: this job is not requeued: KeyError, again without a newer checkpoint\n"
        '/var/spool/slurmd/job00012/slurm_script: line 39: 77 Killed    srun --mpi=pmix "$python"\n'
    )
    found = diagnose(Evidence(job=replace(JOB, exit_code=7), log="epoch 1\n" + messages))
    assert found.lines == ("epoch 1",)


def test_lost_client_of_pmix_is_not_the_cause() -> None:
    prterun = (
        f"{'-' * 74}\nprterun detected that one or more processes exited with non-zero status,\n"
        "thus causing the job to be terminated. The first process to do so was:\n\n"
        f"   Process name: [prterun-n1-392@1,1]\n   Exit code:    3\n{'-' * 74}\n"
    )
    end = (
        "[n1:00392] PMIX ERROR: PMIX_ERR_UNREACH in file ../../../src/server/pmix_server.c at "
        "line 3148\n"
    )
    found = diagnose(
        Evidence(job=JOB, log=PEER_GONE + prterun + end, ranks={0: "", 1: ""}, tasks_per_node=1)
    )
    assert (found.code, found.rank, found.exit_code) == ("exit-code", 1, 3)
    other = diagnose(
        Evidence(job=JOB, log="[n1:1] PMIX ERROR: PMIX_ERR_NOT_FOUND in file x.c at line 3\n")
    )
    assert "mpi-pmix" in names(other)


def interrupted(signal: str = "SIGUSR1", **event: Any) -> Attempt:
    """Return the attempt of a training that a signal has stopped, after iteration 253."""
    sent = {"time": 8, "event": "signal", "signal": signal}
    return Attempt(events=[sent, {"time": 9, "event": "interrupted", "iteration": 253, **event}])


@pytest.mark.parametrize(
    ("code", "fields"),
    [
        ("time-limit", {"state": JobState.TIMEOUT}),
        ("cancelled", {"state": JobState.CANCELLED}),
        ("stopped", {"state": JobState.FAILED, "exit_code": 143}),
    ],
)
@pytest.mark.parametrize(
    ("event", "is_saved"), [({"continues": True}, True), ({"continues": False}, False), ({}, False)]
)
def test_fix_after_saved_work_is_to_continue(
    code: str, fields: dict[str, Any], event: dict[str, Any], *, is_saved: bool
) -> None:
    found = diagnose(Evidence(job=replace(JOB, **fields), attempt=interrupted(**event)))
    assert found.code == code
    assert ("253" in found.cause) is is_saved
    assert ("the command at the end of the log" in found.fix) is is_saved


def test_signal_that_stopped_a_bundled_job_is_the_sent_signal() -> None:
    """Its exit code is that of SIGTERM at each signal."""
    job = replace(JOB, state=JobState.FAILED, exit_code=143, nodes=("n1",))
    stopped = diagnose(Evidence(job=job, attempt=interrupted()))
    assert (stopped.code, stopped.signal, stopped.exit_code) == (
        "stopped",
        "SIGUSR1",
        None,
    )
    assert "SIGUSR1" in stopped.cause
    unsent = diagnose(Evidence(job=job, attempt=attempt_with(event="interrupted")))
    assert (unsent.code, unsent.exit_code) == ("exit-code", 143)
    own = diagnose(
        Evidence(job=job, log="", attempt=attempt_with(event="signal", signal="SIGUSR1"))
    )
    assert (own.code, own.signal) == ("exit-code", "")
    told = diagnose(
        Evidence(job=job, log="", attempt=attempt_with(event="signal", signal="SIGTERM"))
    )
    assert (told.code, told.signal) == ("signal", "SIGTERM")


# A job whose log slurmstepd could not open, as Slurm 24.11 reports it.
NO_LOG = replace(
    JOB,
    nodes=("n2",),
    reason="RaisedSignal:53(Real-time_signal_19)",
    exit_code=0,
    signal=53,
    work_dir="/shared/home/ada/x",
)


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("RaisedSignal:9(Killed)", "ended by SIGKILL"),
        ("RaisedSignal:11(Segmentation_fault)", "ended by SIGSEGV"),
        ("RaisedSignal:60(Real-time_signal_26)", "ended by signal 60"),
        ("RaisedSignal:15", "ended by SIGTERM"),
        (NO_LOG.reason, "slurmstepd could not open the job's log"),
        ("Resources", "Resources"),
        ("None", ""),
        ("", ""),
    ],
)
def test_reason_tells_a_signal_in_words(reason: str, words: str) -> None:
    assert reason_in_words(reason) == words


def test_details_have_the_reason_in_words() -> None:
    found = diagnose(Evidence(job=replace(NO_LOG, state=JobState.FAILED), log="", was_read=True))
    assert found.as_dict()["reason"] == NO_LOG.reason
    assert "RaisedSignal" not in ending_of(found).outcome


def test_job_on_a_node_without_its_shared_folder_is_unfit() -> None:
    lack = "the shared folder /shared is not mounted"
    found = diagnose(Evidence(job=NO_LOG, was_read=True, unfit={"n2": lack}, **OPERATOR))
    assert found.code == "node-unfit"
    assert f"{lack} (n2)" in found.cause


# Jobs with --no-requeue whose node did not pass the Prolog, as Slurm 24.11 reports them: on their
# first node, and on another one at their first step.
STOPPED = replace(
    JOB, state=JobState.CANCELLED, nodes=("n1", "n2"), exit_code=0, start_time=100, end_time=101
)
PROLOG_FAILED = """\
srun: got SIGCONT
slurmstepd-n1: error: Prolog failure on node n2
srun: forcing job termination
srun: StepId=7.1 aborted before step completely launched.
"""


def test_job_that_the_prolog_cancelled_names_what_its_node_lacks() -> None:
    lack = "the shared folder /shared is not mounted"
    evidence = Evidence(
        job=STOPPED,
        log=PROLOG_FAILED,
        was_read=True,
        unfit={"n2": lack},
        cancelled_by="root",
        **OPERATOR,
    )
    found = diagnose(evidence)
    assert found.code == "node-unfit"
    assert f"{lack} (n2)" in found.cause
    assert diagnose(replace(evidence, unfit={})).code == "node-unfit"


@pytest.mark.parametrize("log", ["", "step 1\n"])
def test_cancelled_job_shows_its_unfit_node_beside_the_cause(log: str) -> None:
    """Slurm does not say that root cancelled the job for its node: the Prolog may, or a person."""
    evidence = Evidence(job=STOPPED, log=log, was_read=True, cancelled_by="root", **OPERATOR)
    found = diagnose(replace(evidence, unfit={"n2": "GPU 0: 96 C"}))
    assert found.code == "cancelled"
    assert "unfit node: GPU 0: 96 C (n2)" in found.remarks


def test_job_without_a_log_on_a_fit_node_names_its_folder() -> None:
    found = diagnose(Evidence(job=NO_LOG, was_read=True, **OPERATOR))
    assert found.code == "log-not-writable"
    assert "/shared/home/ada/x" in found.cause
    assert "ssh n2 -- namei -l /shared/home/ada/x`" in found.fix
    guest = diagnose(Evidence(job=NO_LOG, was_read=True, **GUEST))
    # The login node has written there, so only another folder helps.
    assert "namei" not in guest.fix
    assert "attach again with a --folder" in guest.fix


@pytest.mark.parametrize("signal", [0, 9])
def test_job_that_started_is_not_explained_by_its_node(signal: int) -> None:
    """A node may be drained for a hot GPU while its jobs run to their end."""
    job = replace(NO_LOG, signal=signal, exit_code=1, reason="NonZeroExitCode")
    found = diagnose(Evidence(job=job, was_read=True, unfit={"n2": "GPU 0: 96 C"}, **OPERATOR))
    assert found.code not in {"node-unfit", "log-not-writable"}


PMIX = """\
slurmstepd-n1: error:  mpi/pmix_v5: _errhandler: n1 [0]: pmixp_client_v2.c:211: Error handler invoked: status = -61, source = [slurm.pmix.11.1:1]
slurmstepd-n1: error: *** STEP 11.1 ON n1 CANCELLED AT 2026-11-27T22:15:19 ***
srun: Job step aborted: Waiting up to 32 seconds for job step to finish.
srun: error: n1: task 0: Killed
srun: Terminating StepId=11.1
"""


def test_rank_that_left_mpi_with_exit_code_0_is_the_cause() -> None:
    job = replace(JOB, exit_code=0, signal=9, nodes=("n1",))
    evidence = Evidence(job=job, log=PMIX, ranks={0: "step 4\n", 1: "step 4\n"})
    found = diagnose(evidence)
    assert (found.code, found.rank, found.host) == ("left-mpi", 1, "n1")
    # A rank with a record of its failure has not left with exit code 0.
    assert diagnose(replace(evidence, ends={1: "5.0 3 n1"})).code == "exit-code"
    # A program may write lines such as those of srun.
    odd = "".join(
        f"srun: error: n1: tasks {tasks}: Killed\n" for tasks in ("1-3-5", "-1", "9" * 5000)
    )
    assert diagnose(replace(evidence, log=odd + PMIX)).code == "left-mpi"


EXCEEDED = """\
slurmstepd-n2: error: StepId=12.1 exceeded memory limit (991117312 > 524288000), being killed
srun: Job step aborted: Waiting up to 32 seconds for job step to finish.
srun: error: n2: tasks 0-1: Killed
"""


def test_out_of_memory_of_a_step_names_the_rank_with_the_largest_memory() -> None:
    job = replace(JOB, exit_code=0, signal=9, nodes=("n2",), tres="cpu=2,mem=500M,node=1")
    step = StepInfo("12.1", peak=968051712, peak_host="n2", peak_task=1)
    found = diagnose(Evidence(job=job, log=EXCEEDED, steps=(StepInfo("12.0", peak=1), step)))
    assert (found.code, found.rank) == ("out-of-memory", 1)
    # Without accounting it is unknown which of the killed tasks used the memory.
