"""The page about the training program names all that its command line knows, and nothing else."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path

from payload.cli.arguments import parser
from payload.models import MODELS
from payload.training.fit import find_error

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
        "--tasks-per-node",
    }
    assert [spellings for spellings in flags() if not spellings & page_flags] == []
    assert page_flags - set().union(*flags()) - other_flags == set()


def test_page_names_every_model() -> None:
    assert {name for name in MODELS if f"`{name}`" not in PAGE} == set()


def test_trainings_of_the_page_are_valid_for_their_ranks() -> None:
    lines = re.findall(r"^clusterctl submit (train .*) -- (.+)$", PAGE, re.MULTILINE)
    assert len(lines) >= 2
    for options, arguments in lines:
        per_option = re.findall(r"--(?:nodes|tasks-per-node) (\d+)", options)
        ranks = math.prod(int(number) for number in per_option)
        assert find_error(["train", *arguments.split()], ranks) is None, arguments
