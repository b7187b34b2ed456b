"""The systemd units and local accounts of a host."""

from __future__ import annotations

import grp
import os
import pwd
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

# AnsibleModule.run_command
Run = Callable[..., Any]

_PROC = Path("/proc")
_PATIENCE_S = 10.0
_ACCOUNT_UNIT = re.compile(r"user(?:-runtime-dir)?@(\d+)\.service")


class Units:
    """Reads and changes systemd units."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def read(self, unit: str) -> dict[str, str]:
        """Return LoadState ("load"), UnitFileState ("file") and "active" (active or inactive) of a
        unit.
        """
        _, out, _ = self._run(
            ["systemctl", "show", unit, "--property=LoadState,UnitFileState,ActiveState"]
        )
        properties = dict(line.split("=", 1) for line in out.splitlines() if "=" in line)
        running = properties.get("ActiveState") in ("active", "activating", "reloading")
        return {
            "load": properties.get("LoadState", ""),
            "file": properties.get("UnitFileState", ""),
            "active": "active" if running else "inactive",
        }

    def enabled(self) -> list[str]:
        """Return the units that start at boot, or whose sockets and timers do."""
        listed = ["list-unit-files", "--state=enabled", "--plain", "--no-legend", "--no-pager"]
        _, out, _ = self._run(["systemctl", *listed])
        return [line.split()[0] for line in out.splitlines() if line.strip()]

    def active(self) -> list[str]:
        """Return the units that run or start."""
        states = "--state=active,activating,reloading"
        listed = ["list-units", states, "--plain", "--no-legend", "--no-pager"]
        _, out, _ = self._run(["systemctl", *listed])
        return [line.split()[0] for line in out.splitlines() if line.strip()]

    def stop(self, unit: str, before: dict[str, str]) -> list[str]:
        """Stop a unit unless it ran ``before``; disable it unless it was enabled. Return texts of
        both.
        """
        now = self.read(unit)
        done = []
        if now["active"] == "active" and before["active"] != "active":
            self._do("stop", unit)
            done.append(f"stopped {unit}")
        if now["file"] == "enabled" and before["file"] != "enabled":
            self._do("disable", unit)
            done.append(f"disabled {unit}")
        return done

    def start(self, unit: str, before: dict[str, str], *, changed: bool, reload: bool) -> list[str]:
        """Give a unit the state that it had ``before``, as far as it starts. Return texts about the
        steps.

        changed: whether its files changed, so that it must restart. reload: a reload is enough for
            that.
        """
        now = self.read(unit)
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
            rc, _, _ = self._run(["systemctl", "reload-or-restart" if reload else "restart", unit])
            if rc == 0:
                done.append(f"restarted {unit}")
        if now["load"] == "not-found":
            self._run(["systemctl", "reset-failed", unit])
        return done

    def reload(self) -> None:
        self._do("daemon-reload")

    def forget_removed(self) -> None:
        """Make systemd forget failed units of purged packages, which have no file, and of accounts
        that were removed while they had processes.
        """
        listed = ["list-units", "--all", "--state=failed", "--plain", "--no-legend", "--no-pager"]
        _, out, _ = self._run(["systemctl", *listed])
        for unit, load, *_ in (line.split() for line in out.splitlines() if len(line.split()) > 1):
            if load == "not-found" or _lacks_account(unit):
                self._run(["systemctl", "reset-failed", unit])

    def _do(self, *words: str) -> None:
        # Skip the hooks for Debian's SysV scripts, which are slow.
        self._run(["systemctl", *words], check_rc=True, environ_update={"SYSTEMCTL_SKIP_SYSV": "1"})


def _lacks_account(unit: str) -> bool:
    """Return whether a unit belongs to an account by its uid, and there is no such account."""
    if (match := _ACCOUNT_UNIT.fullmatch(unit)) is None:
        return False
    try:
        pwd.getpwuid(int(match[1]))
    except KeyError:
        return True
    return False


def remove_user(run: Run, account: pwd.struct_passwd) -> None:
    """Kill an account's processes and remove the account, but not its home."""
    _end_processes(account.pw_uid)
    run(["userdel", account.pw_name], check_rc=True)


def remove_group(run: Run, name: str) -> None:
    """Remove a group, unless it is gone already, or is still an account's primary group."""
    try:
        entry = grp.getgrnam(name)
    except KeyError:
        return
    if all(account.pw_gid != entry.gr_gid for account in pwd.getpwall()):
        run(["groupdel", name], check_rc=True)


def _end_processes(uid: int) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while pids := [pid for pid in _pids() if _uid(pid) == uid]:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {pids} of uid {uid} do not end")
        time.sleep(0.1)


def _pids() -> list[int]:
    return [int(path.name) for path in _PROC.iterdir() if path.name.isdigit()]


def _uid(pid: int) -> int | None:
    """Return the uid of a process; None if the process has ended, or runs in a container."""
    with suppress(OSError):
        if (_PROC / str(pid) / "ns/pid").readlink() != (_PROC / "self/ns/pid").readlink():
            return None
        status = (_PROC / str(pid) / "status").read_text()
        if "State:\tZ" not in status:
            return int(status.partition("\nUid:")[2].split()[0])
    return None
