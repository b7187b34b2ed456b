"""A script of the user's: how it wants to be run, and what it asks of Slurm in its own #SBATCH lines."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from clusterctl.errors import UsageError
from clusterctl.spec.job import ScriptLanguage, script_language
from clusterctl.state.ledger import OUR_RECORDS

MAX_BYTES = 4 << 20  # Slurm's own limit for a batch script (max_script_size)
OURS = OUR_RECORDS | set("stdout.log stderr.log metrics.jsonl telemetry telemetry.log hostfile".split())
_HETEROGENEOUS = re.compile(r"#SBATCH\s+(hetjob|packjob)\b")


@dataclass(frozen=True, slots=True)
class UserScript:
    """``directives`` are its own #SBATCH lines, as they stand there; ``interpreter`` runs it.

    Of a Python program the ranks are started; a shell script is run once and starts its own.
    """

    name: str
    content: bytes
    interpreter: tuple[str, ...]
    directives: tuple[str, ...]
    is_python: bool

    def asks_for(self, option: str, letter: str | None = None) -> bool:
        """Whether its own #SBATCH lines have this option, as ``--array``, or its letter, as ``-a``."""
        words = [word for line in self.directives for word in _words(line)]
        return any(
            word == option
            or word.startswith(f"{option}=")
            or (letter is not None and word.startswith(letter))
            for word in words
        )

    @classmethod
    def read(cls, path: Path) -> UserScript:
        """Read a script.

        Raises:
            UsageError: there is no such file, or it can't be run as a job.
        """
        try:
            with path.open("rb") as file:
                content = file.read(MAX_BYTES + 1)
        except OSError as exc:
            raise UsageError(
                f"the script {path} can't be read",
                why=exc.strerror or str(exc),
                fix="name a bundled job (see `clusterctl submit --help`), or a script that exists",
            ) from exc
        _refuse_unusable(path, content)
        lines = content.decode(errors="surrogateescape").splitlines()
        is_python = script_language(path) is ScriptLanguage.PYTHON
        return cls(path.name, content, _interpreter(lines), _directives(path, lines), is_python)


def _refuse_unusable(path: Path, content: bytes) -> None:
    why = ""
    if len(content) > MAX_BYTES:
        why = f"it is larger than {MAX_BYTES >> 20} MiB, which Slurm takes no script of"
    elif path.name in OURS:
        why = f"{path.name} is the name of a file that clusterctl writes into the job's folder"
    elif not path.name.isprintable():
        why = "its name has characters that can't be printed"
    elif b"\0" in content:
        why = "it is no text"
    if why:
        raise UsageError(
            f"the script {path} can't be submitted",
            why=why,
            fix="submit a small script of another name",
        )


def _interpreter(lines: list[str]) -> tuple[str, ...]:
    if lines and lines[0].startswith("#!"):
        return tuple(lines[0][2:].split(maxsplit=1))  # as the kernel reads it: one argument at most
    return ("/bin/bash",)


def _directives(path: Path, lines: list[str]) -> tuple[str, ...]:
    """The #SBATCH lines that sbatch would heed: those before the first command."""
    found = []
    for line in lines:
        if line.strip() and not line.startswith("#"):
            break
        if _HETEROGENEOUS.match(line):
            raise UsageError(
                f"{path} asks for a heterogeneous job, which clusterctl does not submit",
                fix="use plain `sbatch` on the cluster (`clusterctl ssh`)",
            )
        if line.startswith("#SBATCH"):
            found.append(line.encode(errors="surrogateescape").decode(errors="replace"))
    return tuple(found)


def _words(directive: str) -> list[str]:
    try:
        return shlex.split(directive.removeprefix("#SBATCH"), comments=True)
    except ValueError:  # an open quote; sbatch will say so
        return directive.split()
