"""Runs of Terraform, and its output.

Terraform leads its own session, so that Ctrl-C on the terminal reaches it only through clusterctl.
If clusterctl ends or is killed, the subreaper (``util/process.py``) interrupts Terraform, which
would otherwise create machines that no record names. Terraform then writes its state and releases
the state's lock within seconds.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from types import MappingProxyType
from typing import IO, Any, Final

from clusterctl.util.process import Result, under_subreaper
from clusterctl.util.progress import Reporter

Event = Mapping[str, Any]

_VERBS: Final = {
    "create": ("creating", "created"),
    "update": ("changing", "changed"),
    "delete": ("deleting", "deleted"),
    "read": ("reading", "read"),
}
_PROGRESS_TEXTS: Final = {
    "apply_start": "{doing}…",
    "apply_progress": "{doing}… {seconds} s",
    "apply_complete": "{done} after {seconds} s",
    "apply_errored": "failed after {seconds} s",
}
_NOISE: Final = frozenset({"execution halted"})
_COLOR: Final = re.compile(r"\x1b\[[0-9;]*m")
_FRAME: Final = re.compile(r"^[╷│╵|] ?", re.MULTILINE)
_SOURCE: Final = re.compile(r"^\s*(with \S+,|on \S+ line \d+.*)$|^\s*\d+: .*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Resource:
    """A resource's address, such as ``module.nodes.google_compute_instance.node["n1"]``, and its
    parts.
    """

    address: str
    type: str
    key: str | int | None = None

    @classmethod
    def of(cls, raw: Event) -> Resource:
        return cls(raw["addr"], raw["resource_type"], raw.get("resource_key"))


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """An error or warning of Terraform. ``address``: address of the resource that it is about, or
    empty.
    """

    severity: str
    summary: str
    detail: str = ""
    address: str = ""

    @classmethod
    def of(cls, raw: Event) -> Diagnostic:
        """Read a diagnostic from Terraform's JSON output, without the excerpt of source code."""
        return cls(
            raw["severity"], raw["summary"], raw.get("detail") or "", raw.get("address") or ""
        )

    @property
    def text(self) -> str:
        return f"{self.summary}: {self.detail}" if self.detail else self.summary


def parse_event(line: str) -> Event | None:
    """Return the JSON object in a line of output. None: the line is something else, as after a
    crash.
    """
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


def errors_in(diagnostics: Iterable[Diagnostic]) -> tuple[Diagnostic, ...]:
    """Return the errors without duplicates, and without errors that only follow from other
    errors.
    """
    errors = dict.fromkeys(d for d in diagnostics if d.severity == "error")
    return tuple(d for d in errors if d.summary not in _NOISE) or tuple(errors)


def printed_error(text: str, *, code: int) -> Diagnostic:
    """Return the error in Terraform's text output, or, without "Error:" (after a crash), the
    output's end.
    """
    plain = _FRAME.sub("", _COLOR.sub("", text))
    before, separator, error = plain.partition("Error: ")
    if not separator:
        return Diagnostic("error", f"Terraform ended with exit code {code}", before.strip()[-2000:])
    summary, _, detail = error.partition("\n")
    return Diagnostic("error", summary.strip(), " ".join(_SOURCE.sub("", detail).split()))


def progress_text(event: Event) -> tuple[Resource, str] | None:
    """Return (resource, text about its progress). None: the event is not shown to users."""
    hook = event.get("hook")
    template = _PROGRESS_TEXTS.get(str(event.get("type")))
    if template is None or not isinstance(hook, Mapping) or "action" not in hook:
        return None
    action = str(hook["action"])
    doing, done = _VERBS.get(action, (action, action))
    seconds = int(hook.get("elapsed_seconds") or 0)
    return Resource.of(hook["resource"]), template.format(doing=doing, done=done, seconds=seconds)


# The time that an interrupted Terraform has to write its state.
GRACE_S: Final = 60
_POLL_S: Final = 0.1
_STDERR_BYTES: Final = 20_000
# Variables that would change the plan or the place of the state.
_NOT_INHERITED: Final = (
    "TF_CLI_ARGS",
    "TF_VAR_",
    "TF_WORKSPACE",
    "TF_DATA_DIR",
    "TF_INPUT",
    "TF_REATTACH_",
)


def run(
    argv: Sequence[str],
    folder: Path,
    reporter: Reporter,
    *,
    env: Mapping[str, str] = MappingProxyType({}),
    heard: Callable[[str], None] = lambda _: None,
) -> Result:
    """Run Terraform in ``folder``, and call ``heard`` with each line of its stdout. ``env``: further
    variables.

    An exception, such as an interrupt, interrupts Terraform and waits for its end. A second
    interrupt does not wait: Terraform ends by itself.
    """
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(_NOT_INHERITED)
    }
    settings = {"TF_IN_AUTOMATION": "1", "CHECKPOINT_DISABLE": "1", "NO_COLOR": "1"}
    with _output() as out, _output() as err:
        process = subprocess.Popen(
            under_subreaper(argv, grace_s=GRACE_S),
            cwd=folder,
            env={**inherited, **settings, **env},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
            umask=0o077,
        )
        try:
            stdout = "".join(_lines(process, out.fileno(), heard))
        except BaseException:
            process.terminate()
            message = "interrupted: waiting until Terraform has written its state"
            with suppress(Exception):
                reporter.progress(f"{message}, {GRACE_S} seconds at most")
            process.wait()
            raise
        err.seek(0)
        stderr = err.read()[-_STDERR_BYTES:].decode(errors="replace")
    return Result(process.returncode, stdout, stderr)


def _output() -> IO[bytes]:
    """Return a file for a program's output. Unlike a pipe, it does not break if clusterctl is
    killed. It is in memory if the kernel supports that, because plans may contain secrets.
    """
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("terraform"), "w+b")
    return TemporaryFile()


def _lines(
    process: subprocess.Popen[bytes], output: int, heard: Callable[[str], None]
) -> Iterator[str]:
    """Yield the lines of the file ``output`` until the process has ended, after a call of
    ``heard`` with each.
    """
    position = 0
    partial_line = b""
    has_ended = False
    while not has_ended:
        has_ended = process.poll() is not None
        new = os.pread(output, os.fstat(output).st_size - position, position)
        position += len(new)
        *lines, partial_line = (partial_line + new).split(b"\n")
        if has_ended and partial_line:
            lines.append(partial_line)
        for line in (each.decode(errors="replace") for each in lines):
            heard(line)
            yield f"{line}\n"
        if not has_ended:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_S)
