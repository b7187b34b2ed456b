"""The scripts that users submit."""

from __future__ import annotations

import codecs
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from clusterctl.errors import UsageError
from clusterctl.scheduler.request.directives import Directives
from clusterctl.scheduler.request.foreign_lines import ForeignLines, foreign_lines
from clusterctl.spec.program import INTERPRETERS, Language, language_of

if TYPE_CHECKING:
    from clusterctl.spec.job import JobSpec
    from clusterctl.spec.sbatch import Directive

_ASKS_SLURM: Final = re.compile(r"[^#]*\bscontrol\b.*\bshow\b.*\bjob")
_USES_PMIX: Final = re.compile(r"[^#]*(?:--mpi[= ]pmix|SLURM_MPI_TYPE=pmix)")
_COMMAND: Final = re.compile(r"[^#]*\bCommand\b")
MAX_BYTES: Final = 4 << 20  # Slurm's max_script_size


@dataclass(frozen=True, slots=True)
class UserScript:
    """A script of the user: a Python program, started once per rank, or another script, started
    once.

    interpreter: command that runs the script. directives: the script's #SBATCH lines.
    asks_for_command: number of the line in which the script looks for its file by `scontrol show
        job`. 0: it does not.
    foreign: its lines for other schedulers. uses_pmix: whether a shell script asks for PMIx.
    """

    name: str
    interpreter: tuple[str, ...]
    directives: Directives
    is_python: bool
    asks_for_command: int = 0
    foreign: tuple[ForeignLines, ...] = ()
    uses_pmix: bool = False

    @classmethod
    def read(cls, path: Path) -> UserScript:
        """Read a script. Raises UsageError if the file does not exist or can't be run as a job."""
        try:
            with path.open("rb") as file:
                content = file.read(MAX_BYTES + 1)
        except OSError as exc:
            raise UsageError(
                f"the script {path} can't be read",
                code="file-unreadable",
                why=exc.strerror or str(exc),
                fix="use a bundled job (see `clusterctl submit --help`), or the path of an "
                "existing script",
            ) from exc
        _reject_unusable(path, content)
        text = content.decode(errors="surrogateescape")
        lines = [line.removesuffix("\r") for line in text.split("\n")]
        program = INTERPRETERS.get(path.suffix)
        default = f"/usr/bin/env {program}" if program else "/bin/bash"
        shebang = lines[0].removeprefix("#!") if lines[0].startswith("#!") else default
        # The kernel splits off at most one argument.
        interpreter = tuple(shebang.split(maxsplit=1))
        python = language_of(path) is Language.PYTHON
        directives = Directives.read(path, lines, is_python=python)
        asking = [number for number, line in enumerate(lines, start=1) if _ASKS_SLURM.match(line)]
        wants_command = any(map(_COMMAND.match, lines))
        asks_for_command = asking[0] if asking and wants_command else 0
        foreign = tuple(foreign_lines(path.name, lines))
        uses_pmix = not python and any(map(_USES_PMIX.match, lines))
        return cls(path.name, interpreter, directives, python, asks_for_command, foreign, uses_pmix)

    def notes(self, job: JobSpec, kept: Sequence[Directive]) -> Iterator[str]:
        """Yield a line for each thing that the script asks of Slurm in vain.

        kept: the options of its #SBATCH lines that neither flags nor --slurm replace.
        """
        yield from self.directives.notes(job, kept)
        yield from (one.note for one in self.foreign)
        if self.asks_for_command:
            problem = (
                "`scontrol show job` names clusterctl's job.sbatch, which is not in the "
                "script's folder"
            )
            yield f'{self.name}, line {self.asks_for_command}: {problem}: use `dirname "$0"`'


def _reject_unusable(path: Path, content: bytes) -> None:
    reason = ""
    fix = "rename the script"
    if len(content) > MAX_BYTES:
        reason = f"it is larger than {MAX_BYTES >> 20} MiB, Slurm's limit"
        fix = "move data out of the script, and send it with --include"
    elif not path.name.isprintable():
        reason = "its name has characters that can't be printed"
    elif content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        reason = "its text is UTF-16, as PowerShell writes it"
        name = shlex.quote(str(path))
        fix = f"convert it with `iconv -f UTF-16 -t UTF-8 {name} | tr -d '\\r' > NEW-FILE`"
    elif b"\0" in content:
        reason = "it is not a text file"
        fix = "submit a script that starts the program"
    else:
        reason, fix = _encoding_fault(path, content)
    if reason:
        raise UsageError(
            f"the script {path} can't be submitted",
            code="files-unfit",
            about="script",
            why=reason,
            fix=fix,
        )


def _encoding_fault(path: Path, content: bytes) -> tuple[str, str]:
    """Return the reason why bash or sbatch would misread a script, and the fix; ("", "") if all is
    well.
    """
    name = shlex.quote(str(path))
    is_shell = language_of(path) is Language.SHELL
    if content.startswith(codecs.BOM_UTF8) and (is_shell or b"#SBATCH" in content):
        reason = (
            "it begins with a byte order mark, which hides its first line and its #SBATCH lines"
        )
        return reason, f"remove the mark with `sed -i '1s/^\\xef\\xbb\\xbf//' {name}`"
    if is_shell and b"\r\n" in content:
        reason = "it has Windows line endings, which bash takes for a part of each line's last word"
        return reason, f"convert it with `sed -i 's/\\r$//' {name}`"
    if is_shell and b"\r" in content and b"\n" not in content:
        reason = "its lines end with carriage returns, so that it is a single line for bash"
        return reason, f"convert it with `sed -i 's/\\r/\\n/g' {name}`"
    return "", ""
