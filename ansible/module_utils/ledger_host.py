"""Units and accounts of a host."""

from __future__ import annotations

import grp
import os
import pwd
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

Run = Callable[..., Any]  # AnsibleModule.run_command

_PROC = Path("/proc")
_ETC = Path("/etc")
_PATIENCE_S = 10.0
_SYSTEM = 1000  # below it, numbers are those of system accounts


class Units:
    """The units of systemd."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def look(self, unit: str) -> dict[str, str]:
        """Whether it is there, starts at boot, and runs."""
        _, out, _ = self._run(["systemctl", "show", unit, "--property=LoadState,UnitFileState,ActiveState"])
        found = dict(line.split("=", 1) for line in out.splitlines() if "=" in line)
        running = found.get("ActiveState") in ("active", "activating", "reloading")
        return {
            "load": found.get("LoadState", ""),
            "file": found.get("UnitFileState", ""),
            "active": "active" if running else "inactive",
        }

    def stop(self, unit: str, before: dict[str, str]) -> list[str]:
        """Have it not run, nor start at boot, unless it did before; what was done."""
        now = self.look(unit)
        done = []
        if now["active"] == "active" and before["active"] != "active":
            self._do("stop", unit)
            done.append(f"stopped {unit}")
        if now["file"] == "enabled" and before["file"] != "enabled":
            self._do("disable", unit)
            done.append(f"disabled {unit}")
        return done

    def start(self, unit: str, before: dict[str, str], *, changed: bool, reload: bool) -> list[str]:
        """Have it as it was; one whose files ``changed`` reads them."""
        now = self.look(unit)
        done = []
        if before["load"] == "masked" and now["load"] not in ("masked", "not-found"):
            self._do("mask", unit)
            done.append(f"masked {unit}")
        if before["file"] == "enabled" and now["file"] != "enabled" and now["load"] == "loaded":
            self._do("enable", unit)
            done.append(f"enabled {unit}")
        if (
            before["active"] == "active"
            and (changed or now["active"] != "active")
            and now["load"] == "loaded"
        ):
            self._do("reload-or-restart" if reload else "restart", unit)
            done.append(f"restarted {unit}")
        if now["load"] == "not-found":
            self._run(["systemctl", "reset-failed", unit])
        return done

    def reload(self) -> None:
        """Have systemd read its units anew."""
        self._do("daemon-reload")

    def _do(self, *words: str) -> None:
        # Without the hooks for Debian's SysV scripts, which take longer than all else.
        self._run(["systemctl", *words], check_rc=True, environ_update={"SYSTEMCTL_SKIP_SYSV": "1"})


def users() -> list[str]:
    """Every account of the host's own table; those of a directory service are nobody's to remove here."""
    return _own(_ETC / "passwd")


def groups() -> list[str]:
    """Every group of the host's own table."""
    return _own(_ETC / "group")


def is_system_user(name: str) -> bool:
    """Whether its number is that of a system account; packages make such."""
    return pwd.getpwnam(name).pw_uid < _SYSTEM


def is_system_group(name: str) -> bool:
    """Whether its number is that of a system group; packages make such."""
    return grp.getgrnam(name).gr_gid < _SYSTEM


def remove_user(run: Run, name: str) -> str:
    """Remove an account, and end what runs under it. Its home stays: where that is."""
    entry = pwd.getpwnam(name)
    _end_processes(entry.pw_uid)
    run(["userdel", name], check_rc=True)
    return entry.pw_dir


def remove_group(run: Run, name: str) -> bool:
    """Remove a group, unless it went with its account, or is somebody's first one."""
    try:
        entry = grp.getgrnam(name)
    except KeyError:
        return False
    if any(one.pw_gid == entry.gr_gid for one in pwd.getpwall()):
        return False
    run(["groupdel", name], check_rc=True)
    return True


def _own(table: Path) -> list[str]:
    lines = table.read_text(errors="surrogateescape").splitlines()
    return [line.partition(":")[0] for line in lines if line and line[0] not in "+-#"]


def _end_processes(uid: int) -> None:
    """End every process of that account.

    Raises:
        TimeoutError: one would not end.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while pids := [pid for pid in _pids() if _uid(pid) == uid]:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {pids} of the account with the number {uid} do not end")
        time.sleep(0.1)


def _pids() -> list[int]:
    return [int(path.name) for path in _PROC.iterdir() if path.name.isdigit()]


def _uid(pid: int) -> int | None:
    """Whose process it is; None where it has ended, or runs in a container: numbers mean others there."""
    with suppress(OSError):
        if (_PROC / str(pid) / "ns/pid").readlink() != (_PROC / "self/ns/pid").readlink():
            return None
        status = (_PROC / str(pid) / "status").read_text()
        if "State:\tZ" not in status:
            return int(status.partition("\nUid:")[2].split()[0])
    return None
