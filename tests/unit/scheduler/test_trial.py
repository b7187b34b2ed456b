"""Answers of `sbatch --test-only` of Slurm 24.11, for partitions that refuse for other reasons."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from clusterctl.scheduler.slurm.trial import SbatchTrial

TEXT = (Path(__file__).parent / "captures" / "test-only-24.11.txt").read_text()
ANSWERS = {
    name: (int(rc), stderr)
    for name, rc, stderr in re.findall(r"== (\w+) (\d)\n((?:(?!==).*\n)+)", TEXT)
}


def trial(name: str) -> SbatchTrial:
    return SbatchTrial.of(*ANSWERS[name], asked_at=5.0)


def test_accepted_job_has_its_expected_start() -> None:
    found = trial("train")
    assert (found.accepted, found.start, found.asked_at) == (True, 1795876035, 5.0)


@pytest.mark.parametrize("name", sorted(ANSWERS.keys() - {"train"}))
def test_refused_job_has_slurms_own_words(name: str) -> None:
    found = trial(name)
    assert (found.accepted, found.start) == (False, None)
    assert ANSWERS[name][1].rstrip().endswith(found.words.rpartition("; ")[2])
    assert not re.search(r"sbatch|error|allocation failure", found.words)


def test_messages_before_the_refusal_are_kept() -> None:
    assert trial("nosuch").words == (
        "invalid partition specified: nosuch; Invalid partition name specified"
    )


def test_start_in_another_format_is_unknown() -> None:
    text = ANSWERS["train"][1].replace("1795876035", "2026-11-28T14:27:15")
    assert SbatchTrial.of(0, text, 5.0).start is None


@pytest.mark.parametrize(
    ("words", "is_about_nodes_out"),
    [
        ("allocation failure: Requested node configuration is not available", True),
        ("allocation failure: Invalid qos specification", False),
    ],
)
def test_refusal_as_of_nodes_out_of_service(words: str, is_about_nodes_out: bool) -> None:
    assert SbatchTrial.of(1, words, 5.0).is_about_nodes_out is is_about_nodes_out
