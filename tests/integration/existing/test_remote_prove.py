"""The program that submits the proof job and waits, with commands that answer as Slurm's."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from clusterctl.providers.existing.prove import _PROVE
from tests.support.local_transport import LocalTransport

# As squeue of Slurm 24.11 answers without slurmctld, and about a job that it does not know any
# more.
NO_ANSWER = "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1"
UNKNOWN = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
ENDS = "printf 'hosts\\tc1\\nend\\n' >>facts; echo 'RUNNING|None|N/A'"
PATIENCE_S = 60
LIMIT_S = 600
Prove = Callable[..., str]


@pytest.fixture
def prove(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Prove:
    """Run the program with these answers of squeue, the last one repeated. Time passes by
    `sleep`.
    """
    commands = tmp_path / "bin"
    commands.mkdir()
    (tmp_path / "ours").mkdir()
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")

    def run(*answers: str, sbatch: str = "echo 7") -> str:
        cases = "".join(f"{number}) {answer} ;;\n" for number, answer in enumerate(answers[:-1]))
        count = (
            f'count=$(cat {tmp_path}/count 2>/dev/null || echo 0); echo "$((count + 1))" '
            f">{tmp_path}/count"
        )
        texts = {
            "sbatch": sbatch,
            "squeue": f"{count}\ncase $count in\n{cases}*) {answers[-1]} ;;\nesac",
            "scancel": f'echo "$*" >>{tmp_path}/cancelled',
            "sleep": f"echo >>{tmp_path}/clock",
            "date": f"cat {tmp_path}/clock 2>/dev/null | wc -l",
        }
        for name, text in texts.items():
            (commands / name).write_text(f"#!/bin/sh\n{text}\n")
            (commands / name).chmod(0o755)
        # The input stays open as long as the program runs.
        argv = [
            "sh",
            "-c",
            _PROVE,
            "prove",
            str(tmp_path / "ours"),
            "proof",
            "",
            f"{PATIENCE_S}",
            f"{LIMIT_S}",
            "0",
            "0",
        ]
        with LocalTransport().converse(argv) as talk:
            printed = b"".join(iter(talk.receive, b"")).decode()
        assert list((tmp_path / "ours").iterdir()) == []
        return "".join(line for line in printed.splitlines(keepends=True) if line != "waiting\n")

    return run


def cancelled(tmp_path: Path) -> list[str]:
    # The first call cancels jobs of a killed `attach`.
    return (tmp_path / "cancelled").read_text().splitlines()[1:]


def test_failed_squeue_does_not_end_the_wait(prove: Prove, tmp_path: Path) -> None:
    assert prove(NO_ANSWER, NO_ANSWER, NO_ANSWER, ENDS) == "hosts\tc1\nend\n"
    assert cancelled(tmp_path) == []


@pytest.mark.parametrize("answer", [UNKNOWN, "true"])
def test_job_unknown_to_squeue_has_ended(prove: Prove, tmp_path: Path, answer: str) -> None:
    assert prove(NO_ANSWER, answer) == ""
    assert (tmp_path / "count").read_text() == "3\n"


def test_pending_job_is_cancelled_after_a_failed_squeue(prove: Prove, tmp_path: Path) -> None:
    assert prove(NO_ANSWER, "echo 'PENDING|Resources|N/A'") == "pending\tResources\tN/A\n"
    assert cancelled(tmp_path) == ["7"]


def test_job_is_waited_for_as_long_as_its_limit(prove: Prove, tmp_path: Path) -> None:
    running = ["echo 'RUNNING|None|N/A'"] * ((PATIENCE_S + LIMIT_S) // 10)
    assert prove(*running, ENDS) == "hosts\tc1\nend\n"
    assert cancelled(tmp_path) == []


def test_squeue_that_never_answers_ends_the_wait(prove: Prove, tmp_path: Path) -> None:
    assert prove(NO_ANSWER).startswith("output\tslurm_load_jobs error")
    assert cancelled(tmp_path) == ["7"]


@pytest.mark.parametrize(
    "sbatch",
    [
        "echo 'BUDGET: 1000 h left'; echo 7",
        "echo 7; echo BUDGET",
        "printf 'hours left\\n1000\\n7\\n'; echo noise >&2",
        "echo 'Submitted batch job 7'",
        "printf '\\033[32m7\\033[0m\\n'",
    ],
    ids=["before", "after", "number", "not-parsable", "colours"],
)
def test_job_is_found_by_name_if_sbatch_prints_other_text(
    prove: Prove, tmp_path: Path, sbatch: str
) -> None:
    """squeue then names the job by its name, and only the newest counts."""
    pending = "echo 'PENDING|Resources|N/A'"
    assert prove("printf '6\\n7\\n'", pending, sbatch=sbatch) == "pending\tResources\tN/A\n"
    assert cancelled(tmp_path) == ["7"]


def test_renamed_job_is_found_by_the_output_of_sbatch(prove: Prove, tmp_path: Path) -> None:
    pending = "echo 'PENDING|Resources|N/A'"
    assert (
        prove("true", pending, sbatch="echo BUDGET; echo '7;other'") == "pending\tResources\tN/A\n"
    )
    assert cancelled(tmp_path) == ["7"]


def test_job_without_an_id_is_cancelled_by_its_name(prove: Prove, tmp_path: Path) -> None:
    assert prove(NO_ANSWER, sbatch="echo accepted").startswith("refused\t")
    (words,) = cancelled(tmp_path)
    assert "--name=proof" in words


def test_cluster_name_in_sbatch_output_is_no_part_of_the_job_id(
    prove: Prove, tmp_path: Path
) -> None:
    assert prove("echo 'PENDING|Resources|N/A'", sbatch="echo '7;campus'").startswith("pending")
    assert cancelled(tmp_path) == ["7"]
