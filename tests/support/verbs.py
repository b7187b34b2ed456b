"""Run the installed console script `clusterctl` in a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support import forks
from tests.support.answers import hold_output
from tests.support.residue import temporary

_TRACEBACK = "Traceback (most recent call last)"
SCRIPT = Path(sys.executable).with_name("clusterctl")


@dataclass(frozen=True)
class CommandResult:
    """The exit code and the output of a command."""

    argv: tuple[str, ...]
    rc: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        """The answer of `-o json`."""
        return json.loads(self.stdout)

    def __str__(self) -> str:
        """The command with its exit code and output, for failed assertions."""
        ended = f"$ {' '.join(self.argv)}\nexit code {self.rc}"
        return f"{ended}\n-- stdout\n{self.stdout}\n-- stderr\n{self.stderr}"


@dataclass(frozen=True)
class Clusterctl:
    """`clusterctl("up", "-f", spec)`. Every call has a time limit, and none may show a
    traceback.
    """

    home: Path
    cwd: Path
    environ: Mapping[str, str] = field(default_factory=dict)
    script: Path = SCRIPT

    def __call__(
        self,
        *argv: str | Path,
        rc: int | None = 0,
        timeout_s: float = 600,
        cwd: Path | None = None,
        stdin: str = "",
    ) -> CommandResult:
        """Run a verb and expect an exit code; `rc=None` takes any.

        Raises:
            AssertionError: another exit code, a traceback, or no end within `timeout_s`.
        """
        words = (str(self.script), *map(str, argv))
        result = self._run(words, cwd or self.cwd, stdin, timeout_s)
        assert _TRACEBACK not in result.stdout + result.stderr, f"a traceback\n{result}"
        assert rc is None or result.rc == rc, f"no exit {rc}\n{result}"
        hold_output(words, result.stdout)
        return result

    def start(self, *argv: str | Path, cwd: Path | None = None) -> subprocess.Popen[str]:
        """Start a verb in a process session of its own, for the test to signal or await."""
        words = (str(self.script), *map(str, argv))
        environ = self._environ()
        pipe = subprocess.PIPE
        return subprocess.Popen(
            words,
            cwd=cwd or self.cwd,
            env=environ,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            text=True,
            start_new_session=True,
        )

    def _environ(self) -> dict[str, str]:
        folder = temporary(self.home)
        folder.mkdir(exist_ok=True)
        ours = {"CLUSTERCTL_HOME": str(self.home), "TMPDIR": str(folder), "COLUMNS": "200"}
        return {**os.environ, **ours, **self.environ}

    def _run(
        self, words: tuple[str, ...], cwd: Path, stdin: str, timeout_s: float
    ) -> CommandResult:
        environ = self._environ()
        if self.script == SCRIPT:  # without the start of a program
            done = forks.clusterctl(
                words, cwd=cwd, environ=environ, stdin=stdin, timeout_s=timeout_s
            )
        else:
            done = subprocess.run(
                words,
                cwd=cwd,
                env=environ,
                input=stdin,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        result = CommandResult(words, done.returncode, done.stdout, done.stderr)
        assert result.rc != forks.TIMED_OUT, f"no end, {timeout_s}s\n{result}"
        return result
