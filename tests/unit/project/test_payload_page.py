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


def test_every_command_is_in_the_table() -> None:
    assert {name for name in commands() if f"\n| [`{name}`](#" not in PAGE} == set()


def test_every_flag_is_named_and_no_other() -> None:
    said = set(re.findall(r"--[a-z][a-z0-9-]*", PAGE))
    # Of srun, sbatch and submit.
    theirs = {
        "--help",
        "--local",
        "--mpi",
        "--nodes",
        "--run",
        "--signal",
    }
    assert [spellings for spellings in flags() if not spellings & said] == []
    assert said - set().union(*flags()) - theirs == set()


def test_every_model_is_named() -> None:
    assert {name for name in MODELS if f"`{name}`" not in PAGE} == set()
