"""Logs that contain the words of a cause whose evidence they are not, and failures told in unusual
words.

Each text of NEAR_MISSES names a cause by a word alone: in a warning, in a retry, in the program's
own values, or long before the end. The cause must not be reported.
"""

# ruff: noqa: E501 - recorded lines

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from clusterctl.scheduler import causes
from clusterctl.scheduler.base import StepInfo
from clusterctl.scheduler.case import Evidence
from clusterctl.scheduler.diagnosis import Diagnosis, diagnose
from clusterctl.scheduler.history import Attempt
from clusterctl.scheduler.program_error import error_at_end, is_shell
from tests.unit.scheduler.test_diagnosis import JOB, LOGS, STATES, TRACEBACK

ENDED = "epoch 7: loss 0.31\nvalidation failed: accuracy 0.1 is below 0.5\n"
EPOCHS = "".join(f"epoch {number}: loss {1 / (number + 1):.3f}\n" for number in range(60))


def diagnosis_of(log: str, **job: Any) -> Diagnosis:
    return diagnose(
        Evidence(job=replace(JOB, **{"exit_code": 3, "nodes": ("n1",), **job}), log=log)
    )


def raised(message: str, source: str = "main()") -> str:
    return TRACEBACK.replace("main()", source) + f"{message}\n"


# Code of the cause that is only resembled, and the log.
NEAR_MISSES = (
    ("build-failed", "INFO: the build failed on n1 with exit code 2: trying again\n" + ENDED),
    ("module-not-loaded", "warning: the module foo can't be loaded on n1, using the default\n" + ENDED),
    ("image-unfit", "the image of --container can't be used on n1: x\n" + ENDED),
    ("not-staged", "WARNING clusterctl: files can't be staged on n1: retrying\n" + ENDED),
    ("permission-denied", "clusterctl: n1: /scratch/x leads to /data/x itself: /data/x/a: Permission denied\n" + ENDED),
    ("disk-full", "clusterctl: n1: /scratch/x leads to /data/x itself: No space left on device\n"),
    (
        "connection-refused",
        'clusterctl: the message "started" to receiver 1 was not sent from n1: Connection refused\n',
    ),
    ("packed-tasks", "launcher: 2 of 24 tasks have failed: 3, 7; retrying\n" + ENDED),
    ("secrets-gone", "the values of `submit --secret` can't be read on a laptop (see docs)\n" + ENDED),
    ("out-of-memory", "cache exceeded memory limit, evicting 30 entries\n" + ENDED),
    ("out-of-memory", raised("ValueError: srun: error: n1: task 0: Out Of Memory")),
    ("cuda-illegal-address", raised("KeyError: 'an illegal memory access was encountered'") + EPOCHS + ENDED),
    ("cuda-assert", "INFO last week's bug: device-side assert triggered\n" + ENDED),
    ("shared-memory", "WARNING: out of shared memory, falling back to files\n" + ENDED),
    ("segmentation-fault", "note: segmentation fault occurred in run 3\n" + ENDED),
    ("cuda-out-of-memory", "CUDA out of memory with batch 64, retrying with 32\n" + EPOCHS + ENDED),
    (
        "cuda-out-of-memory",
        raised("grpc._channel._InactiveRpcError: <_InactiveRpcError of RPC that terminated with:\n"
            "\tstatus = StatusCode.RESOURCE_EXHAUSTED\n"
            "\tdetails = \"Received message larger than max (5 vs. 4)\"\n"
            ">"),
    ),
    ("cuda-out-of-memory", ("Exception in thread \"main\" java.lang.OutOfMemoryError: Java heap space\n"
        "\tat Main.main(Main.java:5)\n")),
    ("java-memory", "INFO log4j: java.lang.OutOfMemoryError: handled by the pool\n" + ENDED),
    ("host-memory", ("test_alloc.py::test_MemoryError_is_caught PASSED\n"
        "test_alloc.py::test_sum FAILED\n"
        "= 1 failed, 1 passed =\n")),
    ("host-memory", "WARNING: Cannot allocate memory for the cache, using none instead\n" + ENDED),
    ("worker-killed", "the last run ended with: died with <Signals.SIGKILL: 9>; skipping it\n" + ENDED),
    ("windows-newlines", "INFO fixed $'\\\\r' in 3 files\n" + ENDED),
    ("own-file-hides-package", raised("AttributeError: module 'config' has no attribute 'lr'")),
    ("download-without-internet", "WARNING couldn't connect to 'https://huggingface.co' , using the cached files instead\n" + ENDED),
    ("missing-module", "warning: No module named 'apex', using torch.optim instead\n" + ENDED),
    ("missing-module", raised("ModuleNotFoundError: No module named 'apex'") + EPOCHS + ENDED),
    ("missing-package", "note: there is no package called 'fast', using the slow way\n" + ENDED),
    ("missing-header", "conftest.c:1:10: fatal error: mpi.h: No such file or directory\n" + EPOCHS + ENDED),
    ("module-stayed-at-home", "warning: No module named 'mine', falling back to the slow way\n" + ENDED),
    ("own-module-not-found", "ImportError (ignored): No module named 'mine'\n" + ENDED),
    ("relative-import-in-script", "note: attempted relative import with no known parent package is fine here\n" + ENDED),
    ("missing-name", raised("ImportError: cannot import name 'x' from 'y' (/y.py)") + EPOCHS + ENDED),
    ("glibc", "warning: version `GLIBC_2.38' not found, using the system's tool instead\n" + ENDED),
    ("missing-library", ("W tensorflow/stream_executor: Could not load dynamic library 'libcudart.so.11.0'; "
        "dlerror: libcudart.so.11.0: cannot open shared object file: No such file or directory\n") + ENDED),
    ("undefined-symbol", "WARNING: undefined symbol: _ZN3c10 in the optional extension, ignored\n" + ENDED),
    ("wrong-architecture", "skipping ./helper.arm64: Exec format error\n" + ENDED),
    ("virtual-environment-not-sent", "note: .venv/bin/activate: No such file\n" + ENDED),
    ("modules-of-another-site", "job.sh: line 3: module: command not found\n" + EPOCHS + ENDED),
    ("command-not-found", "reading config\nconfig key lr_min: not found\n"),
    ("command-not-found", "job.sh: line 3: nvidia-smi: command not found\n" + EPOCHS + ENDED),
    ("missing-file", "cat: old.csv: No such file or directory\n" + EPOCHS + ENDED),
    ("missing-file", "No such file or directory: 'cache.bin', continuing without a cache\n" + ENDED),
    ("missing-file", raised("FileNotFoundError: [Errno 2] No such file or directory: 'x'") + EPOCHS + ENDED),
    ("noexec", "INFO test: slurmstepd: execve(): /run/slurmd/slurm_script: Permission denied\n" + ENDED),
    ("not-executable", "cat: /data/x: Permission denied\n"),
    ("not-executable", ("skipping /data/a: Permission denied\n"
        "skipping /data/b: Permission denied\n"
        "only 3 of 5 files\n")),
    ("read-only-file-system", raised("KeyError: 'Read-only file system'")),
    ("disk-quota", "WARNING Disk quota exceeded for /home/ada, using /tmp instead\n" + ENDED),
    ("disk-full", "WARN: No space left on device for the cache; disabling the cache\n" + ENDED),
    ("disk-full", raised("ValueError: 80 requested and 0 written in column disk")),
    ("too-many-files", "Too many open files, retrying with fewer\n" + ENDED),
    ("too-many-processes", raised("BlockingIOError: [Errno 11] Resource temporarily unavailable", "data = sock.recv(4)")),
    ("too-many-processes", raised("BlockingIOError: [Errno 11] Unable to synchronously open file (unable to lock file, "
        "errno = 11, error message = 'Resource temporarily unavailable')")),
    ("permission-denied", "ada@login: Permission denied (publickey,password).\n"),
    ("ssh-refused", raised("PermissionError: [Errno 13] Permission denied: 'publickey'")),
    ("cuda-driver-too-old", "WARNING: The NVIDIA driver on your system is too old; using the CPU\n" + ENDED),
    ("invalid-device-ordinal", "INFO docs: invalid device ordinal means a missing GPU\n" + ENDED),
    ("no-gpu", "CUDA is not available, using the CPU\n" + ENDED),
    ("no-gpu", ("/env/torch/cuda/__init__.py:174: UserWarning: CUDA initialization: Found no NVIDIA "
        "driver on your system.\n") + ENDED),
    ("cuda-no-kernel-image", raised("RuntimeError: no kernel image is available") + EPOCHS + ENDED),
    ("cuda-version-library", "WARNING libcudnn.so.9: version mismatch, falling back to eager mode\n" + ENDED),
    ("gpu-lost", 'ERROR:  column "Xid" does not exist\n'),
    ("cuda-error", "INFO retry after CUDA error: misaligned address\n" + ENDED),
    ("port-in-use", "Address already in use, trying another port\nlistening on 8081\n" + ENDED),
    ("port-in-use", "port 8080: Address already in use\n" + EPOCHS + ENDED),
    ("nccl-timeout", raised("KeyError: 'collective operation timeout'")),
    ("nccl-network", "n1:7:7 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>\n" + ENDED),
    ("nccl-usage", "INFO Duplicate GPU detected in the list, ignored\n" + ENDED),
    ("nccl", "n1:7:7 [0] NCCL INFO ncclCommInitRank comm 0x1 rank 0 nranks 2 - Init COMPLETE\n" + ENDED),
    ("rendezvous", ("[W1122 socket.cpp:697] The client socket has timed out after 1000ms while trying to "
        "connect to (n1, 1).\n") + ENDED),
    ("connection-refused", ("attempt 1: Connection refused, retrying in 5 s\n"
        "attempt 2: connected\n") + ENDED),
    ("unknown-host", "WARNING Name or service not known: statsd, metrics are ignored\n" + ENDED),
    ("no-network", raised("requests.exceptions.SSLError: HTTPSConnectionPool(host='x', port=443): Max retries "
        "exceeded with url: / (Caused by SSLError(SSLCertVerificationError(1, 'certificate "
        "verify failed')))")),
    ("connection-lost", raised("ValueError: the trace has 'Broken pipe' in line 3")),
    ("broken-pipe", "INFO BrokenPipeError: the viewer was closed\n" + ENDED),
    ("gloo-interface", "INFO gloo.rv. Unable to resolve was fixed in 2.3\n" + ENDED),
    ("gloo-connect", ("[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is "
        ": 1\n") + ENDED),
    ("mpi-slots", "INFO not enough slots available in the queue of requests\n" + ENDED),
    ("mpi-launch", raised("ValueError: the log says 'ORTE was unable to reliably start'")),
    ("mpi-truncate", raised("KeyError: 'MPI_ERR_TRUNCATE'") + EPOCHS + ENDED),
    ("mpi-error", "INFO returned MPI_ERR_PENDING, retrying\n" + ENDED),
    ("arguments", ("main.c:5:3: error: expected ';' before 'return'\n"
        "make: *** [Makefile:3: main] Error 1\n")),
    ("usage", "note: payload: error: was the old format\n" + ENDED),
    ("syntax-error", "WARNING: job.sh: line 2: syntax error in an unused function\n" + ENDED),
    ("assertion", raised("AssertionError: x") + EPOCHS + ENDED),
    ("keyboard-interrupt", raised("KeyboardInterrupt") + EPOCHS + ENDED),
    ("unpicklable", ("/env/x.py:3: FutureWarning: You are using `torch.load` with `weights_only=False`\n"
        "  m = torch.load(p)\n") + ENDED),
    ("python-exception", "could not read the cache\n" + raised("KeyError: 'a'") + EPOCHS + ENDED),
    ("cpp-exception", "INFO terminate called after throwing an instance of 'x' is expected below\n" + ENDED),
    ("no-input", "Overwrite? [y/N] y\noverwritten\n" + ENDED),
    ("no-input", raised("EOFError: Ran out of input", "pickle.load(file)")),
    ("no-input", raised("EOFError", "buf = conn.recv()")),
    ("no-input", raised("EOFError: telnet connection closed", "t.read_until(b'x')")),
    ("no-input", "Overwrite the results? [y/N]\ny\n" + ENDED),
    ("no-input", "Answers: (y/n)\nq1 (yes/no)?\n" + ENDED),
    ("no-input", "Did the run converge? (yes/no): no\nnot converged\n"),
    ("missing-file", ("[warn] cache.db: No such file or directory, starting empty\n"
        "result rejected\n")),
    ("host-memory", "policy: on MemoryError: shrink\nbad policy 'grow'\n"),
    ("no-gpu", ("W0000 00:00:1 gpu_device.cc:2342] Cannot dlopen some GPU libraries. Skipping "
        "registering GPU devices: libcuda.so.1\n") + ENDED),
    ("no-gpu", "INFO:jax._src.xla_bridge:Unable to initialize backend 'cuda': no CUDA-capable device\n" + ENDED),
    ("connection-lost", ("WARNING:urllib3.connectionpool:Retrying (Retry(total=4)) after connection broken by "
        "'ConnectionResetError(104, 'Connection reset by peer')': /x\n") + ENDED),
    ("python-exception", "worker 3 failed:\n" + raised("ZeroDivisionError: division by zero") + "batch ok\n" * 33),
    ("segmentation-fault", raised("RuntimeError: child said: Segmentation fault")),
    ("command-not-found", "-- CUDA compiler: not found\nCMake Error at CMakeLists.txt:3: stop\n"),
    ("too-many-processes", raised("BlockingIOError: [Errno 11] Resource temporarily unavailable", "fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)")),
    ("arguments", "optimizer: error: 0.3 expected error below 0.1\n"),
    ("port-in-use", "ok 1 - bind fails with EADDRINUSE as expected\nnot ok 2 - bind works\n"),
    ("connection-refused", "2026-11-27 10:00:00.123 | WARNING  | app:main:3 - Connection refused, no metrics\n" + ENDED),
    ("connection-refused", ('{"level": "warning", "msg": "Connection refused"}\n'
        '{"level": "error", "msg": "bad mesh"}\n')),
    ("missing-file", ("make: tidy: No such file or directory\n"
        "make: [Makefile:3: check] Error 127 (ignored)\n") + ENDED),
    ("missing-file", "2026-11-27T10:00:00Z WARN  fit: cache: No such file or directory (os error 2)\n" + ENDED),
    ("launcher-crashed", "job.sh: line 3: 77 Segmentation fault      (core dumped) ./a.out\n"),
    ("left-mpi", ("slurmstepd-n1: error:  mpi/pmix_v5: _errhandler: n1 [0]: pmixp_client_v2.c:211: Error "
        "handler invoked: status = -61, source = [slurm.pmix.11.1:1]\n"
        "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.\n"
        "srun: error: n1: task 1: Exited with exit code 3\n")),
)  # fmt: skip


@pytest.mark.parametrize(("code", "log"), NEAR_MISSES)
def test_diagnosis_of_a_resemblance_names_another_cause(code: str, log: str) -> None:
    found = diagnosis_of(log)
    assert found.code != code, found
    # No other cause fires instead, unless the log is its evidence.
    others = {"exit-code", "python-exception", "java-memory", "permission-denied", "ssh-refused"}
    others |= {"segmentation-fault"} if "Segmentation" in log else set()
    assert found.code in others, found


def test_near_misses_cover_the_causes_that_read_logs() -> None:
    """Causes that Slurm, a signal or a launcher reports have their evidence outside of the
    program's log.
    """
    reading = {
        cause.code for cause in causes.ENDED if isinstance(cause, causes.Cause) and cause.log
    }
    reading |= {"module-stayed-at-home", "own-module-not-found", "missing-module"}
    reading |= {"missing-package", "missing-header"}
    assert reading - {code for code, _ in NEAR_MISSES} == set()


# Code, words that the cause has, and the log.
UNUSUAL = (
    ("missing-file", "ckpt/best.pt", "mv: cannot stat 'ckpt/best.pt': No such file or directory\n"),
    ("missing-file", "results/run 3/", "cp: target 'results/run 3/': No such file or directory\n"),
    ("missing-file", "data/*.csv", "ls: cannot access 'data/*.csv': No such file or directory\n"),
    ("missing-file", "logs/fit.out", "tail: cannot open 'logs/fit.out' for reading: No such file or directory\n"),
    ("missing-file", "data.tgz", ("tar: data.tgz: Cannot open: No such file or directory\n"
        "tar: Error is not recoverable: exiting now\n")),
    ("missing-file", "/data/x.bin", ("terminate called after throwing an instance of 'std::filesystem::filesystem_error'\n"
        "  what():  filesystem error: cannot open file: No such file or directory "
        "[/data/x.bin]\n")),
    ("missing-file", "conf.yml", ("panic: open conf.yml: no such file or directory\n"
        "\n"
        "goroutine 1 [running]:\n")),
    ("missing-file", "out/tables", raised("OSError: Cannot save file into a non-existent directory: 'out/tables'")),
    ("missing-file", "my data.csv", "job.sh: line 3: my data.csv: No such file or directory\n"),
    ("missing-file", "does not name it", "epoch 1\nfopen: No such file or directory\n"),
    ("missing-file", "does not name it", "Error: No such file or directory\n"),
    ("no-input", "", raised("EOFError: EOF when reading a line", "a = input('Overwrite? [y/N] ')")),
    ("no-input", "", raised("termios.error: (25, 'Inappropriate ioctl for device')", "old = termios.tcgetattr(fd)")),
    ("no-input", "", ("Cloning into 'x'...\n"
        "fatal: could not read Username for 'https://github.com': No such device or address\n")),
    ("no-input", "", ("sudo: a terminal is required to read the password; either use the -S option\n"
        "sudo: a password is required\n")),
    ("no-input", "", "Overwrite run 7? [y/N]: Aborted!\n"),
    ("no-input", "", ("After this operation, 9 MB of additional disk space will be used.\n"
        "Do you want to continue? [Y/n] Abort.\n")),
    ("no-input", "", "Host key verification failed.\n"),
    ("disk-full", "", raised("sqlite3.OperationalError: database or disk is full")),
    ("disk-full", "", raised("OSError: Not enough free space to write 640000000 bytes")),
    ("disk-full", "80000000", raised("OSError: 80000000 requested and 0 written")),
    ("shared-memory", "", raised("RuntimeError: unable to write to file </torch_4711_1234_0>: No space left on device "
        "(28)")),
    ("unknown-host", "", "curl: (6) Could not resolve host: example.com\n"),
    ("unknown-host", "", "wget: unable to resolve host address \u2018example.com\u2019\n"),
    ("java-memory", "Java heap space", ("Exception in thread \"main\" java.lang.OutOfMemoryError: Java heap space\n"
        "\tat Main.main(Main.java:5)\n")),
    ("ssh-refused", "", "ada@login: Permission denied (publickey,password).\n"),
    ("permission-denied", "/data/x", "cat: /data/x: Permission denied\n"),
    ("too-many-processes", "", ("OpenBLAS blas_thread_init: pthread_create failed for thread 5 of 64: Resource "
        "temporarily unavailable\n")),
    ("connection-refused", "", "giving up after 5 retries: Connection refused\n"),
    ("broken-pipe", "", raised("BrokenPipeError: [Errno 32] Broken pipe")),
    ("host-memory", "", "Error: cannot allocate vector of size 74.5 Gb\nExecution halted\n"),
    ("host-memory", "", "ERROR: LoadError: OutOfMemoryError()\nStacktrace:\n [1] Array\n"),
    ("host-memory", "", "fatal error: runtime: out of memory\n\nruntime stack:\nruntime.throw\n"),
    ("host-memory", "", "memory allocation of 68719476736 bytes failed\n"),
    ("host-memory", "", ("Error allocating 80000000000 bytes\n"
        "Error termination. Backtrace:\n"
        "#0 0x1\n")),
    ("missing-file", "a/b/c", "mkdir: cannot create directory \u2018a/b/c\u2019: No such file or directory\n"),
    ("missing-file", "in.txt", "Can't open in.txt: No such file or directory at fit.pl line 3.\n"),
    ("missing-file", "data.csv", ("Error in file(file, \"rt\") : cannot open the connection\n"
        "In file(file, \"rt\") :\n"
        "  cannot open file 'data.csv': No such file or directory\n"
        "Execution halted\n")),
    ("missing-file", "in.dat", ("ERROR: LoadError: SystemError: opening file \"in.dat\": No such file or directory\n"
        "Stacktrace:\n"
        " [1] systemerror\n")),
    ("missing-file", "input.nml", ("At line 5 of file main.f90 (unit = 10)\n"
        "Fortran runtime error: Cannot open file 'input.nml': No such file or directory\n")),
    ("command-not-found", "python2", "/usr/bin/env: \u2018python2\u2019: No such file or directory\n"),
    ("port-in-use", "", ("INFO:     Started server process [7]\n"
        "ERROR:    [Errno 98] error while attempting to bind on address ('0.0.0.0', 8000): "
        "address already in use\n"
        "INFO:     Application shutdown complete.\n")),
    ("no-input", "", "Proceed ([y]/n)? \n\nCondaSystemExit: Exiting.\n"),
    ("no-input", "", "gpg: cannot open '/dev/tty': No such device or address\n"),
    ("permission-denied", "out/a.txt", "touch: cannot touch 'out/a.txt': Permission denied\n"),
)  # fmt: skip


@pytest.mark.parametrize(("code", "words", "log"), UNUSUAL)
def test_diagnosis_names_the_cause_in_unusual_words(code: str, words: str, log: str) -> None:
    found = diagnosis_of(log, exit_code=1)
    assert (found.code, words in found.cause) == (code, True), found


# Causes that need more evidence than a log, or a state and a reason. They have tests of their own.
OTHER_EVIDENCE = {
    "hung-after-end",
    "killed-supervisor",
    "launch-failure",
    "log-not-writable",
    "lost-slurmstepd",
    "mpi-abort",
    "node-unfit",
    "own-file-hides-package",
    "signal",
    "stopped",
    "unknown",
}


def test_each_cause_is_the_diagnosis_of_a_row() -> None:
    """An entry below a less certain one would never apply."""
    entries = (*causes.WAITING, *causes.ENDED)
    codes = {entry.code for entry in entries if isinstance(entry, causes.Cause)}
    assert codes - {code for code, *_ in (*LOGS, *STATES, *UNUSUAL)} == OTHER_EVIDENCE


@pytest.mark.parametrize(
    "log", [text for _, words, text in UNUSUAL if words == "does not name it"], ids=["call", "word"]
)
def test_missing_file_without_a_name_is_not_named(log: str) -> None:
    """The word before the message is a call or no name at all."""
    assert not {"fopen", "Error"} & set(diagnosis_of(log).cause.split())


def test_lost_http_connection_is_not_blamed_on_a_rank() -> None:
    message = (
        "requests.exceptions.ConnectionError: ('Connection aborted.', ConnectionResetError(104, "
        "'Connection reset by peer'))"
    )
    found = diagnosis_of(raised(message), exit_code=1)
    assert (found.code, "another rank" in found.cause) == ("connection-lost", False)


def test_error_before_warnings_is_still_the_cause() -> None:
    warnings = "".join(f"WARNING: bad record {number}, skipped\n" for number in range(60))
    assert (
        diagnosis_of("solver: cannot write out.h5: No space left on device\n" + warnings).code
        == "disk-full"
    )


def test_traceback_before_a_summary_of_wandb_is_the_cause() -> None:
    summary = "".join(f"wandb: loss {number}\n" for number in range(60))
    assert diagnosis_of(raised("KeyError: 'a'") + summary, exit_code=1).code == "python-exception"


def test_traceback_is_the_cause_although_other_ranks_continue_to_write() -> None:
    log = raised("KeyError: 'a'") + EPOCHS + "srun: error: n1: task 1: Exited with exit code 1\n"
    assert diagnosis_of(log, exit_code=1).code == "python-exception"


def test_message_of_a_killed_rank_is_not_its_cause() -> None:
    log = "cat: x: No such file or directory\nsrun: error: n1: task 0: Killed\n"
    assert diagnosis_of(log, exit_code=137).code == "killed"


NO_GIT = raised(
    "FileNotFoundError: [Errno 2] No such file or directory: 'git'", "subprocess.run(['git'])"
).replace(
    "FileNotFound",
    '  File "/usr/lib/python3.13/subprocess.py", line 1972, in _execute_child\n'
    "    raise child_exception\n"
    "FileNotFound",
    1,
)
PMIX_MESSAGE = (
    "[n1:7] PMIX ERROR: PMIX_ERR_OUT_OF_RESOURCE in file gds_ds12_lock_pthread.c at line 1\n"
)


@pytest.mark.parametrize(
    ("log", "code"),
    [
        (NO_GIT, "command-not-found"),
        (
            "no version\n" + NO_GIT + "epoch 1\n" + raised("RuntimeError: shape mismatch"),
            "python-exception",
        ),
        (PMIX_MESSAGE, "mpi-pmix"),
        (PMIX_MESSAGE + raised("RuntimeError: shape mismatch"), "python-exception"),
        (PMIX_MESSAGE + raised("RuntimeError: MPI could not be initialized"), "mpi-pmix"),
    ],
)
def test_message_before_the_exception_of_the_program_is_not_its_cause(log: str, code: str) -> None:
    assert diagnosis_of(log, exit_code=1).code == code


SCRIPTS: Mapping[str, tuple[str, bool]] = {
    "prompt": ("#!/bin/bash\nset -e\nread -rp 'Continue? [y/N] ' a\necho $a\n", True),
    "errexit": ("#!/bin/bash -e\nread answer\n", True),
    "exits": ("#!/bin/bash\nread -p 'Sure? ' a || exit 1\n", True),
    "loop": ("#!/bin/bash\nset -e\nwhile read -r line; do ./x $line; done < list.txt\n", False),
    "file": ("#!/bin/bash\nset -e\nread -r name < name.txt\n./x $name\n", False),
    "word": ("#!/bin/bash\nset -e\n# read the data\n./reader\n", False),
    "continues": ("#!/bin/bash\nread answer\n./x\n", False),
    "here": ("#!/bin/bash\nset -e\nread a b <<< '1 2'\n./x\n", False),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_read_in_a_script_is_the_cause_only_without_input(name: str) -> None:
    """bash prints no prompt without a terminal, so that the log is empty."""
    script, is_cause = SCRIPTS[name]
    found = diagnose(Evidence(job=JOB, script=script, was_read=True))
    assert (found.code == "no-input") == is_cause, found
    # The name of the cause outweighs the script.
    evidence = Evidence(
        job=JOB, script=script, was_read=True, log="./x: No such file or directory\n"
    )
    assert diagnose(evidence).code == "missing-file"


@pytest.mark.parametrize(("log", "reads"), [("", False), ("it went wrong\n", True)])
@pytest.mark.parametrize(
    "job", [{"exit_code": 3}, {"exit_code": 0, "signal": 3}, {"exit_code": 0, "signal": 6}]
)
def test_fix_for_an_empty_log_does_not_advise_to_read_it(
    log: str, job: Mapping[str, int], *, reads: bool
) -> None:
    found = diagnose(Evidence(job=replace(JOB, **job), log=log, was_read=True))
    assert ("read the end of the log" in found.fix) == reads, found


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
    assert diagnose(Evidence(job=job, log=EXCEEDED)).rank is None


@pytest.mark.parametrize(
    "log",
    [
        "/jobs/x/run.sh: line 3: 77 Segmentation fault      (core dumped) mpirun -np 2 ./a.out\n",
        (
            "[n1:77] Signal: Segmentation fault (11)\n"
            "[n1:77] [ 0] /lib/libc.so.6(+0x1)\n"
            "[n1:77] [ 1] /usr/bin/prterun(main+0x2)\n"
        ),
    ],
    ids=["bash", "stack"],
)
def test_crash_of_mpirun_is_not_of_the_program(log: str) -> None:
    assert diagnosis_of(log, exit_code=139).code == "launcher-crashed"
    assert diagnosis_of(
        log.replace("mpirun", "./b.out").replace("prterun", "b.out"), exit_code=139
    ).code == ("segmentation-fault")


LISTENING = (
    "torch.distributed.DistNetworkError: The server socket has failed to listen on any local "
    "network address. port: {port}, useIpv6: false, code: -98, name: EADDRINUSE, message: "
    "address already in use"
)


@pytest.mark.parametrize(
    ("log", "is_master"),
    [
        (raised(LISTENING.format(port=61012)), True),
        (
            raised(
                "OSError: [Errno 98] Address already in use",
                "s.bind(('', int(os.environ['MASTER_PORT'])))",
            ),
            True,
        ),
        (raised(LISTENING.format(port=29500)), False),
        (raised(LISTENING.format(port=610123)), False),
        (raised("OSError: [Errno 98] Address already in use"), False),
    ],
)
def test_port_in_use_is_master_port_only_if_the_error_names_it(
    log: str, *, is_master: bool
) -> None:
    found = diagnose(
        Evidence(job=JOB, log=log, attempt=Attempt({"event": "start", "time": 1, "port": 61012}))
    )
    assert (found.code, found.cause.startswith("MASTER_PORT")) == ("port-in-use", is_master), found
    # A job that has MASTER_PORT already is not told to use it.
    assert ("use MASTER_PORT" in found.fix) is not is_master


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("#!/bin/bash\nsrun --export=SEED=7 hostname\n", "step-without-path"),
        ("#!/bin/bash\nsrun -n 2 --export NONE hostname\n", "step-without-path"),
        ("#!/bin/bash\nsrun --export=ALL,SEED=7 hostname\n", "command-not-found"),
        ("#!/bin/bash\n# srun --export=NONE hostname\nsrun hostname\n", "command-not-found"),
        ("", "command-not-found"),
    ],
)
def test_srun_that_finds_no_command_has_no_path_only_with_export(script: str, code: str) -> None:
    log = (
        "slurmstepd-n1: error: execve(): hostname: No such file or directory\n"
        "srun: error: n1: task 0: Exited with exit code 2\n"
    )
    job = replace(JOB, exit_code=2)
    assert diagnose(Evidence(job=job, log=log, script=script)).code == code


@pytest.mark.parametrize(
    ("line", "file", "is_log"),
    [
        ("#SBATCH -o logs/%x-%j.out", "logs/myfit-12.out", True),
        ("#SBATCH --output=logs/%x_%A_%a.out", "./logs/arr_12_1.out", True),
        ("#SBATCH -J fit --error=fit.err", "fit.err", True),
        ("#SBATCH -o logs/%x-%j.out", "logs/data.csv", False),
        ("#SBATCH -o logs/%x-%j.out", "out/myfit-12.out", False),
        ("# -o logs/%x-%j.out", "logs/myfit-12.out", False),
    ],
)
def test_log_with_another_path_is_found_by_the_redirection_in_the_script(
    line: str, file: str, *, is_log: bool
) -> None:
    log = f"tail: cannot open '{file}' for reading: No such file or directory\n"
    found = diagnose(Evidence(job=JOB, log=log, script=f"#!/bin/bash\n{line}\ntail -n1 {file}\n"))
    assert (found.code == "log-has-another-path") is is_log, found
    assert found.code in {"log-has-another-path", "missing-file"}


NO_APEX = raised("ModuleNotFoundError: No module named 'apex'", "import apex")
NO_CACHE = raised(
    "FileNotFoundError: [Errno 2] No such file or directory: 'cache.pkl'", "open('cache.pkl')"
)
NO_MEMORY = raised("MemoryError", "x = bytearray(n)")
STEPS = "epoch 1\nepoch 2\n"


def diagnosis_of_logs(stdout: str, stderr: str, *, script: str = "", **job: Any) -> Diagnosis:
    """Return the diagnosis of a job that wrote its two logs."""
    ended = replace(JOB, **{"nodes": ("n1",), **job})
    return diagnose(Evidence(job=ended, log=f"{stdout}\n{stderr}", stdout=stdout, script=script))


# Errors that the program has handled: exit code (negative: signal), stdout, stderr.
HANDLED = {
    "optional module": (9, STEPS, NO_APEX),
    "falls back": (9, "", NO_APEX + "falling back to torch.optim\n"),
    "falls back, exit code 1": (1, "", NO_APEX + "falling back to torch.optim\nloss is too high\n"),
    "retries, exit code 1": (1, STEPS, NO_CACHE + "retrying without a cache\nbad split\n"),
    "buffered epochs": (9, NO_APEX + STEPS, ""),
    "one line more": (2, "", NO_CACHE + "built the cache\n"),
    "two tracebacks": (4, STEPS, NO_APEX + NO_CACHE),
    "logged with its level": (5, STEPS, "ERROR:root:cannot load\n" + NO_CACHE),
    "negative code": (255, STEPS, NO_APEX),
    "crash": (-11, STEPS, NO_APEX),
    "abort": (-6, STEPS, NO_CACHE),
    "killed": (-9, "", NO_MEMORY),
    "killed, shell": (137, STEPS, NO_MEMORY),
    "terminated": (143, STEPS, NO_CACHE),
    "printed exception": (12, ("FileNotFoundError: [Errno 2] No such file or directory: 'cache.pkl' -> building it\n"
        "built\n"), ""),
    "printed name": (12, "load: MemoryError: 3 GiB, built in parts\nscore too low\n", ""),
    "printed call": (3, ("first try: OSError(28, 'No space left on device')\n"
        "moved to /scratch\n"
        "score too low\n"), ""),
    "printed import": (3, STEPS, "ModuleNotFoundError: No module named 'apex'\n"),
    "phrase": (3, "CUDA out of memory is a fine phrase\n", ""),
    "phrase in quotes": (3, "a job that says 'CUDA out of memory' was found\nscore too low\n", ""),
    "phrase denied": (3, "no CUDA out of memory so far\nscore too low\n", ""),
    "phrase of a plan": (1, "if Connection refused: ask ada\nscore too low\n", ""),
    "phrase of a missing file": (3, ("No such file or directory is a fine phrase\n"
        "score too low\n"), ""),
    "phrase of a named file": (3, ("file x.csv: No such file or directory is expected here\n"
        "score too low\n"), ""),
    "phrase of a question": (3, "if No such file or directory: ask ada\nscore too low\n", ""),
    "phrase of MPI": (3, "PMI server not found is a phrase\nscore too low\n", ""),
    "phrase as a subject": (1, "No space left on device would end this job\nscore too low\n", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", HANDLED)
def test_diagnosis_of_a_handled_error_is_the_exit_code(name: str) -> None:
    code, stdout, stderr = HANDLED[name]
    found = diagnosis_of_logs(stdout, stderr, exit_code=max(code, 0), signal=max(-code, 0))
    assert found.code in {"exit-code", "killed", "terminated", "segmentation-fault", "abort"}, found
    assert "apex" not in found.cause + found.fix
    # The log's last lines are shown all the same.
    assert found.lines


LAUNCHED = "make: *** [Makefile:3: fit] Error 1\n"
# Errors that ended the program: code of the cause, exit code (negative: signal), stdout, stderr,
# script.
NOT_HANDLED = {
    "uncaught": ("missing-module", 1, STEPS, NO_APEX, ""),
    "uncaught, one log": ("missing-module", 1, "", STEPS + NO_APEX, ""),
    "uncaught, buffered output": ("missing-file", 1, "", NO_CACHE + STEPS, ""),
    "last words before another code": ("missing-file", 3, "", STEPS + NO_CACHE, ""),
    "make": ("missing-module", 2, STEPS, NO_APEX + LAUNCHED, ""),
    "xargs": ("missing-module", 123, STEPS, NO_APEX, ""),
    "script's own code": ("missing-file", 3, STEPS, NO_CACHE, ("#!/bin/bash\n"
        "python3 fit.py || exit 3\n")),
    "aborts after an exception": ("host-memory", 134, STEPS, NO_MEMORY + "terminate called without an active exception\n", ""),
    "interrupt": ("keyboard-interrupt", 130, STEPS, raised("KeyboardInterrupt"), ""),
    "no exit code": ("missing-module", 0, STEPS, NO_APEX, ""),
    "tool": ("missing-file", 2, STEPS, "tar: data.tgz: Cannot open: No such file or directory\n", ""),
    "python itself": ("missing-file", 2, STEPS, "python3: can't open file '/x/fit.py': [Errno 2] No such file or directory\n", ""),
    "gpu": ("cuda-out-of-memory", 2, STEPS, "fit.cu:7: CUDA error: out of memory\n", ""),
    "gpu, words after": ("cuda-out-of-memory", 2, STEPS, "CUDA out of memory. Tried to allocate 2.00 GiB\n", ""),
    "gives up": ("missing-file", 1, STEPS, NO_CACHE + "giving up after retrying 3 times\n", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_HANDLED)
def test_diagnosis_of_an_unhandled_error_has_its_code(name: str) -> None:
    code, exit_code, stdout, stderr, script = NOT_HANDLED[name]
    found = diagnosis_of_logs(stdout, stderr, script=script, exit_code=exit_code)
    assert found.code == code, found


@pytest.mark.parametrize(("exit_code", "code"), [(9, "exit-code"), (1, "missing-module")])
def test_exit_code_of_a_rank_tells_whether_its_error_was_handled(exit_code: int, code: str) -> None:
    log = f"srun: error: n1: task 0: Exited with exit code {exit_code}\n"
    job = replace(JOB, exit_code=1, nodes=("n1",))
    found = diagnose(Evidence(job=job, log=log, ranks={0: NO_APEX + STEPS, 1: STEPS}))
    assert (found.code, found.rank) == (code, 0), found


@pytest.mark.parametrize(
    ("rank_log", "code"),
    [(STEPS + NO_CACHE, "missing-file"), (NO_CACHE + STEPS, "exit-code")],
)
def test_exception_in_the_log_of_the_failed_rank_is_the_cause(rank_log: str, code: str) -> None:
    stdout = "start\n"
    log = f"{stdout}\nsrun: error: n1: task 0: Exited with exit code 3\n"
    job = replace(JOB, exit_code=3, nodes=("n1",))
    assert diagnose(Evidence(job=job, log=log, stdout=stdout, ranks={0: rank_log})).code == code
    # Without it, several ranks share the log: rank 0 did not end by the exception.
    shared = f"{stdout}\n{rank_log}srun: error: n1: task 0: Exited with exit code 3\n"
    assert diagnose(Evidence(job=job, log=shared, stdout=stdout)).code == "exit-code"


def test_traceback_before_mpi_abort_is_the_cause() -> None:
    """The program chose the exit code."""
    banner = (
        f"{'-' * 74}\n"
        "MPI_ABORT was invoked on rank 0 in communicator MPI_COMM_WORLD\n"
        "with errorcode 5.\n"
        f"{'-' * 74}\n"
    )
    assert diagnosis_of_logs(STEPS, NO_CACHE + banner, exit_code=5).code == "missing-file"
    assert (
        diagnosis_of_logs(STEPS, NO_CACHE + "bad mesh\n" + banner, exit_code=5).code == "mpi-abort"
    )


IGNORED = "Exception ignored in: <function Reader.__del__ at 0x7f3601fedbc0>\n" + NO_APEX


@pytest.mark.parametrize(
    ("stderr", "exit_code", "code"),
    [
        (NO_CACHE + IGNORED, 1, "missing-file"),
        (IGNORED + NO_CACHE, 1, "missing-file"),
        (IGNORED, 1, "exit-code"),
        (IGNORED, 3, "exit-code"),
    ],
)
def test_exception_that_python_ignores_is_not_the_cause(
    stderr: str, exit_code: int, code: str
) -> None:
    """Objects that are removed at the end of a program raise such exceptions after its own."""
    assert diagnosis_of_logs("", stderr, exit_code=exit_code).code == code


@pytest.mark.parametrize(
    ("before", "part"),
    [("Exception in thread Thread-1 (load):\n", "thread Thread-1 (load)"), ("", "")],
)
def test_exception_of_a_thread_is_not_said_to_end_the_program(before: str, part: str) -> None:
    found = diagnosis_of_logs("", before + NO_CACHE, exit_code=1)
    assert found.code == "missing-file"
    assert found.cause.partition("; it ended ")[2].partition(",")[0] == part


# The script of a COMPLETED job, its logs, and whether a message names an error at their end.
ENDS = {
    "shell, stderr": ("#!/bin/bash\n", "done\n", NO_APEX, True),
    "shell, one log": ("#!/bin/sh\n", STEPS + NO_APEX, "", True),
    "shell, command": (
        "#!/usr/bin/env bash\n",
        "",
        "run.sh: line 3: nosuch: command not found\n",
        True,
    ),
    "shell, remark": ("#!/bin/bash -l\n", "", NO_APEX + "done\n", True),
    "python, last words": ("import apex\n", "", NO_APEX, True),
    "python, last words in stdout": ("import apex\n", STEPS + NO_CACHE, "", True),
    "unknown, last words": ("", "", NO_CACHE, True),
    "python, shebang": ("#!/usr/bin/env python3\n", "", NO_CACHE, True),
    "shell, falls back": ("#!/bin/bash\n", "", NO_APEX + "falling back to torch\n", False),
    "python, went on": ("import apex\n", STEPS, NO_APEX, False),
    "python, recovered": ("import apex\n", "recovered\n", NO_CACHE, False),
    "python, one line more": ("import apex\n", "", NO_APEX + "done\n", False),
    "python, one line more in stdout": ("import apex\n", NO_APEX + "done\n", "", False),
    "python, shebang, went on": ("#!/usr/bin/env python3\n", STEPS, NO_APEX, False),
    "unknown, went on": ("", STEPS, NO_APEX, False),
    "python, tool": ("import os\n", STEPS, "cat: x: No such file or directory\n", False),
    "python, error in stdout, then stderr": ("import os\n", NO_CACHE, "saved\n", False),
    "shell, nothing": ("#!/bin/bash\n", STEPS, "", False),
}


# What Python 3.11 writes about an exception that ends a part of a program.
PARTS = {
    "Exception in thread Thread-1 (load):": "thread Thread-1 (load)",
    "Process Process-1:": "Process Process-1",
    "Exception ignored in atexit callback: <function save at 0x7f8137da1bc0>": "atexit callback",
    "Error in atexit._run_exitfuncs:": "atexit",
    "Task exception was never retrieved\nfuture: <Task finished name='Task-2'>": "Task",
    # It ends nothing.
    "Exception ignored in: <function A.__del__ at 0x7f3601fedbc0>": "",
    "Exception in thread main": "",
    "step 3 failed": "",
}


@pytest.mark.parametrize("before", PARTS, ids=lambda line: line.partition(":")[0])
@pytest.mark.parametrize("script", ["import torch\n", "#!/bin/bash\n"])
def test_exception_that_ended_a_part_of_a_completed_program_is_noted(
    before: str, script: str
) -> None:
    stderr = f"warming up\n{before}\n{NO_CACHE}saved\nfalling back\n"
    found = error_at_end(STEPS, stderr, is_shell=is_shell(script))
    assert (found.part if found else "") == PARTS[before]
    if found:
        assert NO_CACHE.endswith(f"\n{found.line}\n")
        assert found.log == "stderr"


@pytest.mark.parametrize("name", ENDS)
def test_error_at_end_notes_errors_of_completed_jobs(name: str) -> None:
    script, stdout, stderr, is_noted = ENDS[name]
    found = error_at_end(stdout, stderr, is_shell=is_shell(script))
    assert bool(found) is is_noted, found
