"""Tests of the commands of a shell script that it goes on after: their errors are not its end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from clusterctl.scheduler.case import Evidence
from clusterctl.scheduler.diagnosis import Diagnosis, diagnose
from clusterctl.scheduler.script_end import is_of_earlier_command
from tests.unit.scheduler.test_diagnosis import JOB, TRACEBACK

BASH = "#!/bin/bash\n"
RM = "rm: cannot remove 'x': No such file or directory"


@pytest.mark.parametrize(
    ("script", "exit_code", "is_earlier"),
    [
        ("rm x; python q.py\n", 3, True),
        ("rm x\nfalse\n\n# the end\n", 1, True),
        ("rm x\nexit 3\n", 3, True),
        ("rm x || exit 1\npython q.py\n", 3, True),
        ("for i in 1; do\n  rm x\ndone\nfalse\n", 1, True),
        ("rm x\npython q.py\nrc=$?\nrm y\nexit $rc\n", 3, True),
        ("rm x\npython q.py\nexit $?\n", 3, True),
        ("set -e\nrm x || true\npython q.py\n", 3, True),
        ("set -e\nif rm x; then echo y; fi\npython q.py\n", 3, True),
        ("set -e\nrm x || true\nrm y\npython q.py\n", 3, False),
        ("set -e\nrm x || exit 3\npython q.py\n", 1, False),
        ("set -e\nls y || rm x\npython q.py\n", 1, False),
        ("set -e\nif ls y; then rm x; fi\npython q.py\n", 1, False),
        (f"rm x || exit {'9' * 5000}\npython q.py\n", 3, True),
        ("set -e\nrm x\npython q.py\n", 1, False),
        ("python q.py\nrm x\nexit\n", 1, False),
        ("rm x\npython q.py\nexit $rc\n", 3, False),
        ("rm x\n", 1, False),
        ("python a.py\nrm x\n", 1, False),
        ("rm x && python q.py\n", 1, False),
        ("rm x || exit 1\npython q.py\n", 1, False),
        ("rm x || exit\npython q.py\n", 1, False),
        ("for i in 1; do rm x; done\n", 1, False),
        ("for i in 1; do\n  rm x\ndone\n", 1, False),
        ("true\nif true; then\n  rm x\nelse\n  false\nfi\n", 1, False),
        ("main() {\n  rm x\n}\nmain\n", 1, False),
        ("rm x &\nwait $!\n", 1, False),
        ("command='rm x'\n$command\n", 1, False),
        ("bash <<END\nrm x\nEND\n", 1, False),
        ("rm x\necho 'open\n", 1, False),
        ("python a.py\n", 1, False),
        ("", 1, False),
    ],
)
def test_command_that_a_script_went_on_after_is_found(
    script: str, exit_code: int, is_earlier: bool
) -> None:
    assert is_of_earlier_command(RM, BASH + script, exit_code) == is_earlier


def diagnosis_of(script: str, stderr: str, exit_code: int) -> Diagnosis:
    job = replace(JOB, exit_code=exit_code, nodes=("n1",))
    return diagnose(Evidence(job=job, log=stderr, script=BASH + script))


@pytest.mark.parametrize(
    ("script", "stderr", "exit_code", "code"),
    [
        ("rm x; python quiet.py\n", RM, 3, "exit-code"),
        (
            "cd data\npython quiet.py\n",
            "/job.sbatch: line 2: cd: data: No such file or directory",
            1,
            "exit-code",
        ),
        (
            "rm x\nnvcc a.cu\n",
            f"{RM}\n/job.sbatch: line 3: nvcc: command not found",
            127,
            "command-not-found",
        ),
        ("set -e\nrm x; python quiet.py\n", RM, 1, "missing-file"),
        ("rm x\n", RM, 1, "missing-file"),
    ],
)
def test_error_of_an_earlier_command_is_quoted_and_not_the_cause(
    script: str, stderr: str, exit_code: int, code: str
) -> None:
    found = diagnosis_of(script, stderr + "\n", exit_code)
    assert (found.code, found.exit_code) == (code, exit_code)
    is_quoted = code == "exit-code"
    assert (stderr in found.cause) == is_quoted


@pytest.mark.parametrize(
    ("script", "is_told"),
    [("python x.py\nfalse\n", True), ("python -m x\nfalse\n", True), ("python x.py\n", False)],
)
def test_exception_of_an_earlier_command_is_not_the_cause_of_another_exit_code(
    script: str, is_told: bool
) -> None:
    found = diagnosis_of(script, TRACEBACK + "KeyError: 'a'\n", 3)
    assert found.code == ("exit-code" if is_told else "python-exception")
    assert "KeyError: 'a'" in found.cause


@pytest.mark.parametrize(
    ("script", "is_told"),
    [("python x.py\nfalse\n", True), ("python -m x\nfalse\n", True), ("python x.py\n", False)],
)
def test_exception_of_an_earlier_command_may_not_be_the_cause(script: str, is_told: bool) -> None:
    found = diagnosis_of(script, TRACEBACK + "KeyError: 'a'\n", 1)
    assert found.code == "python-exception"
    assert (found.cause != diagnosis_of("", TRACEBACK + "KeyError: 'a'\n", 1).cause) == is_told
