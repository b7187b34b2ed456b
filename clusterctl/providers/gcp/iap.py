"""SSH through Identity-Aware Proxy: hosts have no public address, and `gcloud` carries the connection."""

from __future__ import annotations

import shutil
import subprocess
from typing import Final

from clusterctl.errors import MachineError

_ANSWER_S: Final = 60.0
_INSTALL: Final = (
    "install the Google Cloud CLI (https://cloud.google.com/sdk/docs/install), then: gcloud auth login"
)


def tunnel(instance: str, *, project: str, zone: str) -> tuple[str, ...]:
    """The program that leads to an instance's SSH port; `%p` is that port."""
    return (
        *("gcloud", "compute", "start-iap-tunnel", instance, "%p", "--listen-on-stdin"),
        *(f"--project={project}", f"--zone={zone}", "--verbosity=error"),
    )


def check() -> None:
    """That `gcloud` is here, and somebody is logged in.

    Raises:
        MachineError: it is not, or nobody is; no host could be reached.
    """
    if shutil.which("gcloud") is None:
        raise MachineError(
            "missing tool: gcloud", why="it carries SSH to hosts without a public address", fix=_INSTALL
        )
    argv = ["gcloud", "auth", "list", "--filter=status:ACTIVE", "--format=value(account)"]
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, errors="replace", timeout=_ANSWER_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise MachineError("gcloud does not run", why=str(exc), fix=_INSTALL) from exc
    if done.returncode != 0:
        raise MachineError("gcloud does not run", why=done.stderr.strip()[-1000:], fix=_INSTALL)
    if not done.stdout.strip():
        raise MachineError(
            "nobody is logged in to gcloud",
            why="it carries SSH to hosts without a public address",
            fix="log in: gcloud auth login",
        )
