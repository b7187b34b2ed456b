"""Checks command lines of ``python -m payload`` without running them: JSON in, JSON out.

    $ echo '[["train", "--lrr", "0.1"], ["gemm"]]' | python -m payload.arguments
    {"wrong": ["unrecognized arguments: --lrr 0.1; did you mean --lr?", null],
     "options": {"train": {"--model": true, "--find": false, ...}, ...}}

``wrong`` has an entry for each command line. ``options`` tells whether each takes a value.
Standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from collections.abc import Sequence
from typing import Any

from payload.config import COMMANDS, TrainConfig, check
from payload.errors import UsageError
from payload.settings import Command, make, parser_of, settings_of, yes_or_no


def wrong_with(parser: argparse.ArgumentParser, argv: Sequence[str]) -> str | None:
    """What is wrong with a command line, as far as that shows without the files that it names."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            flags = vars(parser.parse_args(argv))
        command = COMMANDS[flags.pop("command")]
        if "config" not in flags or flags.pop("config") is None:  # the file is the node's
            check(make(command, flags))
    except SystemExit:  # the help is wanted
        return None
    except UsageError as exc:
        program = f"{parser.prog} {argv[0]}" if argv else parser.prog
        return str(exc).removeprefix(f"{program}: ").removesuffix(f"; see `{program} --help`")
    return None


def options_of(command: type[Command]) -> dict[str, bool]:
    """The options of a command, and whether each takes a value."""
    found = {"--config": True} if command is TrainConfig else {}
    for one in settings_of(command):
        if one.field.metadata["read"] is yes_or_no:
            found |= {f"--{one.key}": False, f"--no-{one.key}": False}
        elif "words" not in one.field.metadata:
            found[f"--{one.key}"] = True
    return found


def main(lines: Sequence[Sequence[str]]) -> dict[str, Any]:
    """The answer about these command lines."""
    parser = parser_of(COMMANDS, TrainConfig)
    options = {name: options_of(command) for name, command in COMMANDS.items()}
    return {"wrong": [wrong_with(parser, argv) for argv in lines], "options": options}


if __name__ == "__main__":
    json.dump(main(json.load(sys.stdin)), sys.stdout)
