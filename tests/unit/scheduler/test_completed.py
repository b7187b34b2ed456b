"""The error with which the log of a COMPLETED job ends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from clusterctl.scheduler.base import JobState
from clusterctl.scheduler.ends.completed import diagnose_completed, error_at_end
from clusterctl.scheduler.ends.facts import Evidence, is_shell
from clusterctl.scheduler.history import Attempt
from tests.unit.scheduler.test_diagnosis import JOB, TRACEBACK


def raised(message: str, source: str = "main()") -> str:
    return TRACEBACK.replace("main()", source) + f"{message}\n"


NO_APEX = raised("ModuleNotFoundError: No module named 'apex'", "import apex")
NO_CACHE = raised(
    "FileNotFoundError: [Errno 2] No such file or directory: 'cache.pkl'", "open('cache.pkl')"
)
STEPS = "epoch 1\nepoch 2\n"

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
    "shell, prints an earlier traceback": ("#!/bin/bash\n", f"{NO_APEX}again\nsaved\n", "", False),
    "shell, falls back": ("#!/bin/bash\n", "", NO_APEX + "falling back to torch\n", False),
    "python, went on": ("import apex\n", STEPS, NO_APEX, False),
    "python, recovered": ("import apex\n", "recovered\n", NO_CACHE, False),
    "python, one line more": ("import apex\n", "", NO_APEX + "done\n", False),
    "python, one line more in stdout": ("import apex\n", NO_APEX + "done\n", "", False),
    "python, shebang, went on": ("#!/usr/bin/env python3\n", STEPS, NO_APEX, False),
    "unknown, went on": ("", STEPS, NO_APEX, False),
    "python, tool": ("import os\n", STEPS, "cat: x: No such file or directory\n", False),
    "python, error in stdout, then stderr": ("import os\n", NO_CACHE, "saved\n", False),
    "command": ("", "", "fatal: not a git repository\n", True),
    "result": ("", f"{STEPS}error: 1.2e-05\n", "", False),
    "result, negative": ("#!/bin/bash\n", f"{STEPS}Error: -.3\n", "", False),
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


KILLED = (
    "slurmstepd: error: Detected 1 oom_kill event in StepId={}.batch. Some of the step tasks ...\n"
)
NOTICE = {"time": 4, "event": "signal", "signal": "SIGUSR1", "notice": True}
ENDED = {"time": 6, "event": "end", "status": 0}


@pytest.mark.parametrize(
    ("given", "logs", "code"),
    [
        ({"log": KILLED.format(12)}, {}, "killed-for-memory"),
        ({"log": KILLED.format(123)}, {}, ""),
        ({"attempt": Attempt(events=[NOTICE, ENDED])}, {}, "ended-after-notice"),
        ({"attempt": Attempt(events=[{**NOTICE, "ignored": True}, ENDED])}, {}, ""),
        ({}, {"nonfinite": '{"step": 3, "loss": NaN}'}, "metrics-nonfinite"),
        ({}, {"nonfinite": '{"step": 3, "note": "NaN"}'}, ""),
        ({}, {"nonfinite": "[NaN"}, ""),
    ],
)
def test_completed_job_has_a_note_on_what_may_be_wrong(
    given: dict[str, Any], logs: dict[str, str], code: str
) -> None:
    job = replace(JOB, state=JobState.COMPLETED, exit_code=0)
    found = diagnose_completed(Evidence(job=job, **given), logs)
    assert [note.code for note in (found.notes if found else ())] == [code] * bool(code)
