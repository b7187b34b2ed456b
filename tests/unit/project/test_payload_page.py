"""The page about the training program names all that its command line knows, and nothing else."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from payload.cli.arguments import parser
from payload.models import MODELS

PAGE = (Path(__file__).parents[3] / "docs" / "payload.md").read_text()


def commands() -> dict[str, argparse.ArgumentParser]:
    actions = parser()._actions
    (action,) = (one for one in actions if isinstance(one, argparse._SubParsersAction))
    return dict(action.choices)


def flags() -> list[set[str]]:
    """The spellings of each."""
    actions = (action for parser in commands().values() for action in parser._actions)
    spellings = (set(action.option_strings) for action in actions)
    return [some for some in spellings if some and "--help" not in some]


def test_table_has_every_command() -> None:
    assert {name for name in commands() if f"\n| [`{name}`](#" not in PAGE} == set()


def test_page_names_every_flag_and_no_unknown_flag() -> None:
    page_flags = set(re.findall(r"--[a-z][a-z0-9-]*", PAGE))
    # Of srun, sbatch and submit.
    other_flags = {
        "--follow",
        "--help",
        "--local",
        "--mpi",
        "--nodes",
        "--run",
        "--signal",
    }
    assert [spellings for spellings in flags() if not spellings & page_flags] == []
    assert page_flags - set().union(*flags()) - other_flags == set()


def test_page_names_every_model() -> None:
    assert {name for name in MODELS if f"`{name}`" not in PAGE} == set()
