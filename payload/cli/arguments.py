"""Checks command lines of ``python -m payload`` without running them: JSON in, JSON out.

    $ echo '[["train", "--lrr", "0.1"], ["gemm"]]' | python -m payload.cli.arguments
    ["unrecognized arguments: --lrr 0.1; did you mean --lr?", null]

Standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from collections.abc import Sequence

from payload.cli.config import COMMANDS, TrainConfig, check
from payload.cli.settings import make, parser_of
from payload.errors import UsageError


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


def main(lines: Sequence[Sequence[str]]) -> list[str | None]:
    """Return the error of each of these command lines."""
    parser = parser_of(COMMANDS, TrainConfig)
    return [wrong_with(parser, argv) for argv in lines]


if __name__ == "__main__":
    json.dump(main(json.load(sys.stdin)), sys.stdout)
