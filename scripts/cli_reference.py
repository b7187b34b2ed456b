"""Write docs/cli.md from the command line's options. `--check` reports whether the page is up to
date.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Container, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from clusterctl.cli.main import app
from clusterctl.cli.options import COMMON

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"
SUBMIT = ("submit",)
HEAD = """\
# Command line

<!-- Written by scripts/cli_reference.py from the code: `make reference` after a change. -->

Every command accepts the options of the first table, before or after its name. Results go to stdout,
everything else to stderr.

**Exit codes**: 0 success · 1 failure · 2 the command or the spec is wrong · 3 `plan --check` found changes ·
with `wait`, `--wait` and `--follow`: 4 the job failed or can never start, 5 it was cancelled or reached its
time limit, 6 the wait timed out and the job is not cancelled · 7 the job did not survive `rehearse` · 130
interrupted. `shell` and `ssh` return the exit code of the remote command. A word that is neither a job's ID
nor a run's name is a wrong command (2); an ID that the cluster does not know is a failure (1), but as an
option of `submit` or `replay` it is wrong (2).

**`-o json`** prints a single object on stdout: `ok`, `failures` (each with `code`, `cause`, `host`, `phase`,
`fix`, `retryable`) and [the keys of the command](json.md).
"""


def reference() -> str:
    """Return the text of docs/cli.md."""
    parts = [HEAD, _table("option", _options(app, skip=()))]
    parts += [_section(path, command) for path, command in verbs(app)]
    return "\n".join(parts)


def verbs(group: Any, before: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every command with the words of its name, in the order of `--help`."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from verbs(command, (*before, name))
        else:
            yield (*before, name), command.load()


def _section(path: tuple[str, ...], command: Any) -> str:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    words = ["clusterctl", *path, *(_placeholder(argument) for argument in arguments)]
    paragraphs = [" ".join(part.split()) for part in command.help.split("\n\n")]
    parts = [
        f"## {' '.join(path)}\n",
        "\n\n".join(paragraphs),
        f"\n`{' '.join(words)} [options]`\n",
    ]
    if arguments:
        parts.append(
            _table("argument", [(_placeholder(a), _with_local(a, a.help or "")) for a in arguments])
        )
    options = _options(command, skip=COMMON)
    shared = [] if path == SUBMIT else [one for one in options if one in _options_of_submit()]
    if own := [one for one in options if one not in shared]:
        parts.append(_table("option", own))
    if shared:
        names = ", ".join(f"`{_cell(name)}`" for name, _ in shared)
        parts.append(f"And these, as for [submit](#submit): {names}.\n")
    return "\n".join(parts)


@cache
def _options_of_submit() -> list[tuple[str, str]]:
    """Return the options that other commands share with `submit`, and so need not repeat."""
    return _options(dict(verbs(app))[SUBMIT], skip=COMMON)


def _placeholder(argument: Any) -> str:
    name = str(argument.metavar or argument.name.upper())
    if name == "COMMAND":
        name = "-- COMMAND..."
    return name if argument.required or name.startswith("[") else f"[{name}]"


def _options(command: Any, *, skip: Container[str]) -> list[tuple[str, str]]:
    """Return the options of a command with their help, as `--help` shows them."""
    context = command.context_class(command, info_name="clusterctl")
    options = [p for p in command.params if p.param_type_name == "option" and p.name not in skip]
    records = [(option, option.get_help_record(context)) for option in options]
    return [(record[0], _with_local(option, record[1])) for option, record in records if record]


def _with_local(parameter: Any, text: str) -> str:
    """Return the help of a parameter, with what its value has of the user's machine."""
    local = getattr(parameter, "local", None)
    return f"{text} ({local.words})" if local is not None else text


def _table(head: str, rows: list[tuple[str, str]]) -> str:
    lines = [f"| {head} | |", "|---|---|", *(f"| `{_cell(a)}` | {_cell(b)} |" for a, b in rows)]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> int:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    text = reference()
    if not parser.parse_args().check:
        PAGE.write_text(text)
        return 0
    stale = not PAGE.exists() or PAGE.read_text() != text
    if stale:
        print("docs/cli.md is out of date: run `make reference`", file=sys.stderr)
    return int(stale)


if __name__ == "__main__":
    sys.exit(main())
