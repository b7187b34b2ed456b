"""The page about the training program names all that its command line knows, and nothing else."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from payload.config import _parser
from payload.models import MODELS

PAGE = (Path(__file__).parents[3] / "docs" / "payload.md").read_text()


def commands() -> dict[str, argparse.ArgumentParser]:
    (action,) = (one for one in _parser()._actions if isinstance(one, argparse._SubParsersAction))
    return dict(action.choices)


def flags(parser: argparse.ArgumentParser) -> set[str]:
    return {flag for action in parser._actions for flag in action.option_strings} - {"-h", "--help"}


def test_every_command_has_its_section() -> None:
    assert {f"## {name}" for name in commands()} - set(PAGE.splitlines()) == set()


def test_every_flag_is_named_and_no_other() -> None:
    known = {flag for parser in commands().values() for flag in flags(parser) if not flag.startswith("--no-")}
    said = set(re.findall(r"--[a-z][a-z0-9-]*", PAGE))
    theirs = {"--help", "--mpi", "--nodes", "--signal"}  # of srun, sbatch and submit
    assert known - said == set()
    assert said - known - theirs == set()


def test_every_model_is_named() -> None:
    assert {name for name in MODELS if f"`{name}`" not in PAGE} == set()
