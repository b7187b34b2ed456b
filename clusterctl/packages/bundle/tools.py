"""How the package managers of this machine are run, with our settings and what they said; and downloads."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import requests

from clusterctl.errors import MachineError
from clusterctl.util.lifetime import under_subreaper

_LONGEST_REASON = 1500
_TIMEOUT_S = 60.0
_ALWAYS = {"LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}


def need(tool: str, *, of: str, fix: str) -> None:
    """Make sure of a tool that packing for ``of`` takes.

    Raises:
        MachineError: it is not on this machine.
    """
    if shutil.which(tool) is None:
        raise MachineError(f"packages of {of} can't be fetched here: there is no {tool}", fix=fix)


def run(argv: Sequence[str], *, what: str, fix: str, env: Mapping[str, str] | None = None) -> str:
    """Run it to its end; its stdout.

    Raises:
        MachineError: it failed; with the end of what it said.
    """
    done = subprocess.run(
        under_subreaper(argv),
        env={**os.environ, **_ALWAYS, **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip())[-_LONGEST_REASON:]
        raise MachineError(f"{what} failed", where=argv[0], why=said or f"exit {done.returncode}", fix=fix)
    return done.stdout


def download(url: str, *, what: str) -> bytes:
    """What lies at a URL; `file:` is this machine's.

    Raises:
        MachineError: it can't be had.
    """
    try:
        if url.startswith("file://"):
            return Path(url.removeprefix("file://")).read_bytes()
        answer = requests.get(url, timeout=_TIMEOUT_S)
        answer.raise_for_status()
    except (OSError, requests.RequestException) as exc:
        fix = "check that this machine reaches it, then run it again: what was downloaded is kept"
        raise MachineError(f"{what} can't be had", where=url, why=str(exc), fix=fix) from exc
    return answer.content
