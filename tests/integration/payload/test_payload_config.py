"""Settings that a run refuses, on one rank and on several."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.integration.payload.conftest import Runner, python
from tests.support.payload import assert_one_error


def test_settings_unfit_for_the_ranks_are_refused_at_the_start(
    alone: Runner, tmp_path: Path
) -> None:
    for flags, code, value in (
        ("--compress topk", "setting-without-effect", "data-parallel ranks"),
        ("--offload-optimizer --device cpu", "setting-without-effect", "GPUs"),
        ("--warmup-iterations 10 --iterations 9", "run-too-short", "9 iterations"),
    ):
        answer = alone("train", *flags.split(), "--out", str(tmp_path), rc=2)
        assert_one_error(answer.stderr, code, flags.split()[0], value)


def test_file_that_is_missing_on_one_rank_stops_all(program: Runner, tmp_path: Path) -> None:
    answer = program(2, "faults.py", "lacks_the_config", str(tmp_path), rc=2)
    assert_one_error(answer.stderr, "file-unreadable", "missing.toml", os.strerror(errno.ENOENT))


def test_error_of_several_ranks_is_printed_once(program: Runner) -> None:
    answer = program(2, "faults.py", "is_late", launched=True, rc=2)
    assert answer.stderr.count("payload: error:") == 1


def test_settings_are_refused_before_mpi_is_imported(alone: Runner, tmp_path: Path) -> None:
    (tmp_path / "mpi4py.py").write_text("raise RuntimeError('must not be imported')")
    answer = alone(
        "train", "--lr", "fast", PYTHONPATH=f"{tmp_path}:{Path(__file__).parents[3]}", rc=2
    )
    assert_one_error(answer.stderr, "bad-flag", "--lr")


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"]])
def test_help_needs_neither_numpy_nor_mpi(arguments: list[str]) -> None:
    blocked = "import sys; sys.modules.update(numpy=None, mpi4py=None)"
    code = f"{blocked}; from payload.__main__ import main; main({arguments!r})"
    answer = python("-c", code)
    assert answer.stderr == ""
    assert "usage: python -m payload" in answer.stdout
