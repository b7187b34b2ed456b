"""What is known only here about where a job comes from: version, git commit and uncommitted changes."""

from __future__ import annotations

import json
import platform
from contextlib import closing
from pathlib import Path
from typing import Any

from clusterctl import __version__
from clusterctl.errors import TransportError
from clusterctl.jobs.environment import PLAIN, Environment
from clusterctl.spec.job import JobSpec
from clusterctl.transport.base import Transport

MAX_DIFF = 1 << 20
PATIENCE_S = 15.0  # a submission does not wait long for what is good to know


def client_facts(
    job: JobSpec, environment: Environment = PLAIN, *, local: Transport, folder: Path
) -> dict[str, Any]:
    """The content of environment.client.json; ``folder`` is the one whose git state counts."""
    return {
        "clusterctl": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "job": json.loads(json.dumps(job.model_dump(), default=str)),  # a path may be no UTF-8
        "requirements": environment.lock.text if environment.lock else None,
        "git": _git(local, folder),
    }


def _git(local: Transport, folder: Path) -> dict[str, Any] | None:
    """Commit and uncommitted changes of the folder; None where nobody can tell them."""
    git = ["git", "--no-optional-locks", "-C", str(folder)]
    try:
        commit = local.run([*git, "rev-parse", "HEAD"], timeout_s=PATIENCE_S).stdout.strip()
        root = local.run([*git, "rev-parse", "--show-toplevel"], timeout_s=PATIENCE_S).stdout.rstrip("\n")
        status = local.run([*git, "status", "--porcelain", "--", "."], timeout_s=PATIENCE_S).stdout
        # Neither the user's diff programs nor their colours: this is for a machine to apply again.
        diff = _bounded(
            local,
            [*git, "diff", "--no-ext-diff", "--no-textconv", "--no-color", "--binary", "HEAD", "--", "."],
        )
    except TransportError:  # no git, no repository, no commit yet, or too large to be looked through in time
        return None
    return {
        "commit": commit,
        "root": root,
        "status": status[:MAX_DIFF],
        "diff": diff[:MAX_DIFF].decode(errors="replace"),
        "diff_truncated": len(diff) > MAX_DIFF,
    }


def _bounded(local: Transport, argv: list[str]) -> bytes:
    """What a command says, up to a little more than MAX_DIFF bytes."""
    said = b""
    with closing(local.stream(argv)) as stream:
        for chunk in stream:
            said += chunk
            if len(said) > MAX_DIFF:
                break
    return said
