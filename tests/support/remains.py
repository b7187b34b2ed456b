"""Remove the leftovers of killed test runs from this machine: `python -m tests.support.remains`.

Leftovers are local clusters and accounts with a workspace or home in the temporary folder of a run
that has ended, labs whose keeper has ended, processes that such a run started, and a kernel
setting. Clusters of other workspaces are never changed.
"""

from __future__ import annotations

import os
import pwd
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from clusterctl.errors import ClusterctlError
from clusterctl.providers.local.client import Helper
from clusterctl.providers.local.layout import STATE as CLUSTERS
from tests.support.conditions import without_autogroup
from tests.support.processes import ROOT, as_root
from tests.support.residue import LABS

RUN = "TEST_RUN_OF_CLUSTERCTL"  # in the environment of all that a run starts: its pid, and when that began
_FOLDER = re.compile(r".*?/pytest-of-[^/]+/pytest-\d+(?=/)")
_MARKED = re.compile(rf"{tempfile.gettempdir()}/[^/]*ctltest-(\d+)-(\d+)-[^/]*(?=/|$)")
_SUDOERS = Path("/etc/sudoers.d")


def begin() -> None:
    """Mark what this process and its children start as a run's, unless it is part of another
    one.
    """
    os.environ.setdefault(RUN, f"{os.getpid()}-{_began(os.getpid())}")


def marked(prefix: str) -> str:
    """How a temporary folder that is not below pytest's is to be called: one knows then whose it
    was.
    """
    return f"{prefix}ctltest-{os.environ[RUN]}-"


def is_over(workspace: str) -> bool:
    """Whether a workspace is a test run's that has ended; pytest's folder has its pid as long as it
    runs.
    """
    if found := _MARKED.match(workspace):
        return _began(int(found[1])) != found[2]
    if not (found := _FOLDER.match(workspace)):
        return False
    try:
        pid = int(Path(found[0], ".lock").read_text())
        return b"pytest" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return True
    except (OSError, ValueError):  # another user's, or about to be written
        return False


def orphaned() -> Iterator[int]:
    """The processes of runs that are no more, and of their accounts."""
    accounts = {one.pw_uid for one in pwd.getpwall() if is_over(one.pw_dir)}
    for proc in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # another user's, or it ended
            run = re.search(
                rb"(?:^|\0)%s=(\d+)-(\d+)" % RUN.encode(), (proc / "environ").read_bytes()
            )
            if (run and _began(int(run[1])) != run[2].decode()) or proc.stat().st_uid in accounts:
                yield int(proc.name)


def _began(pid: int) -> str:
    """When a process began, in the kernel's ticks; empty: there is none."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""


def remove_clusters(call: Callable[..., dict[str, Any]]) -> Iterator[str]:
    """Remove the clusters of runs that are no more."""
    for one in call("clusters", {})["clusters"]:
        if is_over(one["workspace"]):
            call("down", {"id": one["id"]})
            yield f"removed cluster {one['name']} ({one['id']}) of {one['workspace']}"


def remove() -> Iterator[str]:
    """Remove all of it; yields what was."""
    if CLUSTERS.exists():
        yield from remove_clusters(Helper(_say).call)
    if any(LABS.glob("*.lab")):
        argv = [*as_root(), sys.executable, "-m", "tests.support.keeper", "--remove-dead"]
        subprocess.run(argv, cwd=ROOT, check=True, timeout=600, stdin=subprocess.DEVNULL)
    for pid in orphaned():
        with suppress(ProcessLookupError):
            command = (
                Path(f"/proc/{pid}/cmdline")
                .read_bytes()
                .replace(b"\0", b" ")
                .decode(errors="replace")
            )
            os.kill(pid, signal.SIGKILL)
            yield f"ended process {pid}: {command[:100]}"
    for account in pwd.getpwall():
        if is_over(account.pw_dir):
            rule = _SUDOERS / f"clusterctl-test-{account.pw_name}"
            subprocess.run([*as_root(), "rm", "-f", "--", str(rule)], check=True)
            subprocess.run([*as_root(), "userdel", "--force", account.pw_name], check=True)
            yield f"removed account {account.pw_name}"
    for folder in filter(is_over, map(str, Path(tempfile.gettempdir()).iterdir())):
        subprocess.run([*as_root(), "rm", "-rf", "--one-file-system", "--", folder], check=True)
        yield f"removed {folder}"
    with without_autogroup():
        pass


def _say(text: object) -> None:
    print(text, file=sys.stderr)  # noqa: T201


def main() -> int:
    try:
        for line in remove():
            _say(line)
    except (ClusterctlError, subprocess.SubprocessError) as exc:
        _say(f"not all that earlier test runs left could be removed: {exc}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
