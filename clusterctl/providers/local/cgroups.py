"""A control group of its own for each machine, where no systemd of the host gives it one.

`systemd-nspawn --keep-unit` puts a machine below the control group that it was started in. Started from one
shell, all machines would share one: their systemds would then write into each other's `system.slice`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from clusterctl.errors import ProvisionError
from clusterctl.providers.local import processes
from clusterctl.providers.local.run import run

_PREFIX = "clusterctl-"
_PATIENCE_S = 5.0
_MEMBER = re.compile(rf"/{_PREFIX}(c[0-9a-f]{{6}}-\d{{3}})\b")


def enter(machine: str) -> list[str]:
    """Make the machine's groups; returns the start of a command line that enters them and goes on.

    Raises:
        ProvisionError: control groups can't be written here.
    """
    groups = [root / f"{_PREFIX}{machine}" for root in _hierarchies()]
    try:
        for group in groups:
            group.mkdir(exist_ok=True)
    except OSError as exc:
        raise ProvisionError(
            "control groups can't be made here",
            where=str(exc.filename),
            why=exc.strerror or str(exc),
            fix="in a container, run it with a writable /sys/fs/cgroup",
        ) from exc
    script = 'until [ "$1" = -- ]; do echo $$ >"$1/cgroup.procs" || exit 1; shift; done; shift; exec "$@"'
    return ["sh", "-c", script, "sh", *map(str, groups), "--"]


def leave(machine: str) -> None:
    """Remove the groups of a machine that has ended, deepest first; the kernel may need a moment."""
    deadline = time.monotonic() + _PATIENCE_S
    while left := [group for group in groups(machine) if not _remove(group)]:
        if time.monotonic() > deadline:
            raise ProvisionError("control groups could not be removed", why=", ".join(map(str, left)))
        time.sleep(0.02)


def groups(machines: str) -> tuple[Path, ...]:
    """The groups there are of machines whose name begins so."""
    return tuple(group for root in _hierarchies() for group in sorted(root.glob(f"{_PREFIX}{machines}*")))


def members() -> Iterator[tuple[int, str]]:
    """The processes of all machines here, as (pid, machine), by our groups or systemd's units for them."""
    return processes.look(_machine_of)


def _machine_of(process: Path) -> str | None:
    found = _MEMBER.search((process / "cgroup").read_text())
    if found and (process / "cmdline").read_bytes():  # a zombie has none, and is gone for us
        return found[1]
    return None


def _remove(group: Path) -> bool:
    with suppress(ProvisionError):
        run(["find", str(group), "-depth", "-type", "d", "-delete"], what=f"removing {group}")
    return not group.exists()


def _hierarchies() -> Iterator[Path]:
    """Where systemd keeps its tree: the unified hierarchy, and version 1's named one where it is used."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        kind, _, options = fields[fields.index("-") + 1 :][:3]
        if kind == "cgroup2" or (kind == "cgroup" and "name=systemd" in options.split(",")):
            yield Path(fields[4])
