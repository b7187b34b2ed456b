#!/usr/bin/python
"""Ansible module: a systemd unit is enabled and running, and was started after its last
configuration change.

Handlers are lost if a play is killed between a change and the restart. This module checks the unit
itself instead, so that a second run always converges.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: service_current
short_description: A systemd unit runs with its current configuration
description:
  - Unmasks, enables and starts a unit, and restarts it if its configuration changed after its start.
  - Only enables the unit in an image, where systemd does not run, and if C(SYSTEMD_OFFLINE) is set in the
    task's environment, on a machine that becomes an image.
  - Waits until the unit listens on its port. If it does not, fails with the end of its journal and the errors
    in its log.
options:
  name:
    description: Name of the unit. Without a dot, that of a service.
    type: str
    required: true
  config:
    description: Files that the unit reads when it starts.
    type: list
    elements: path
    default: []
  port:
    description: TCP port on which the unit listens once it is ready.
    type: int
  log:
    description: File to which the unit logs errors that are not in its journal.
    type: path
  wait:
    description: Whether to wait until the unit is ready.
    type: bool
    default: true
  timeout_s:
    description: Longest wait for the unit, in seconds.
    type: int
    default: 30
"""

# The second timestamp changes if a daemon executes itself again, as slurmctld does since 23.11 at
# `scontrol reconfigure`.
STARTED = ("InactiveExitTimestampMonotonic", "ExecMainStartTimestampMonotonic")
PROPERTIES = ("LoadState", "ActiveState", "UnitFileState", "NeedDaemonReload", *STARTED)
MAX_ERRORS = 5
# The folder exists if systemd has booted the host, see sd_booted(3).
BOOTED = "/run/systemd/system"
# /proc/net/tcp writes the state LISTEN as this number.
LISTEN = "0A"


def read_unit(module: AnsibleModule, name: str) -> dict[str, str]:
    """Return the properties of a systemd unit that this module needs: name -> value."""
    unit = name if "." in name else f"{name}.service"
    argv = ["systemctl", "show", unit, "--property=" + ",".join(PROPERTIES)]
    _, stdout, _ = module.run_command(argv, check_rc=True)
    return dict(line.split("=", 1) for line in stdout.splitlines() if "=" in line)


def is_stale(unit: dict[str, str], config: list[str], *, now: float, monotonic: float) -> bool:
    """Return whether a ``config`` file is newer than the start of the unit, or missing. Times in
    seconds.
    """
    started = now - monotonic + max(int(unit.get(key) or 0) for key in STARTED) / 1e6
    return any(not Path(path).exists() or os.stat(path).st_ctime > started for path in config)


def listens(port: int, tables: tuple[str, ...] = ("/proc/net/tcp", "/proc/net/tcp6")) -> bool:
    """Return whether a process listens on a TCP port. Don't connect, because Slurm would log an
    error.
    """
    for table in tables:
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except FileNotFoundError:
            # The host has no IPv6.
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == LISTEN and int(fields[1].rsplit(":", 1)[1], 16) == port:
                return True
    return False


def unmask(module: AnsibleModule, name: str) -> None:
    """Unmask a unit. A mask that lasts until the next boot (``mask --runtime``) is another one."""
    for options in ([], ["--runtime"]):
        module.run_command(["systemctl", "unmask", *options, name], check_rc=True)


def size(log: str | None) -> int:
    return Path(log).stat().st_size if log and Path(log).exists() else 0


def errors_since(log: str | None, start: int) -> list[str]:
    """Return the last errors in a Slurm daemon's log after byte ``start``, without times and
    duplicates.
    """
    if size(log) <= start:
        return []
    lines = Path(str(log)).read_bytes()[start:].decode(errors="replace").splitlines()
    messages = (line.partition("] ")[2] for line in lines)
    errors = (text for text in messages if text.startswith(("error:", "fatal:")))
    return list(dict.fromkeys(errors))[-MAX_ERRORS:]


def wait_ready(module: AnsibleModule, name: str, start: int) -> None:
    """Wait until the unit is active and listens on its port. Fail, with its log, if that takes too
    long.
    """
    port = module.params["port"]
    timeout_s = module.params["timeout_s"]
    deadline = time.monotonic() + timeout_s
    while True:
        state = read_unit(module, name)["ActiveState"]
        if state == "active" and (port is None or listens(port)):
            return
        if state == "failed" or time.monotonic() > deadline:
            fail_with_logs(
                module, name, f"{name} is {state} and not ready after {timeout_s} s", start
            )
        time.sleep(0.05)


def fail_with_logs(module: AnsibleModule, name: str, message: str, start: int) -> None:
    """Fail with a message, the end of the unit's journal, and the errors in its log after byte
    ``start``.
    """
    argv = ["journalctl", "--unit", name, "--lines=20", "--no-pager", "--output=cat"]
    _, journal, _ = module.run_command(argv)
    text = f"{message}; the journal of {name} ends with:\n{journal.strip()}"
    if errors := errors_since(module.params["log"], start):
        text += f"\nerrors in {module.params['log']}:\n" + "\n".join(errors)
    module.fail_json(msg=text)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "config": {"type": "list", "elements": "path", "default": []},
            "port": {"type": "int"},
            "log": {"type": "path"},
            "wait": {"type": "bool", "default": True},
            "timeout_s": {"type": "int", "default": 30},
        },
        supports_check_mode=True,
    )
    name = module.params["name"]
    if os.environ.get("SYSTEMD_OFFLINE") == "1" or not Path(BOOTED).is_dir():
        module.exit_json(changed=enable_offline(module, name), action="none")
    unit = read_unit(module, name)
    masked = unit["LoadState"] == "masked"
    if masked and not module.check_mode:
        unmask(module, name)
        unit = read_unit(module, name)
    if unit["LoadState"] == "not-found" and module.check_mode:
        # An earlier task would install the package.
        module.exit_json(changed=True, action="start")
    if unit["LoadState"] == "not-found":
        module.fail_json(
            msg=f"the unit {name} does not exist, because its package is not installed"
        )
    if unit["ActiveState"] not in ("active", "activating", "reloading"):
        action = "start"
    elif is_stale(unit, module.params["config"], now=time.time(), monotonic=time.monotonic()):
        action = "restart"
    else:
        action = "none"
    enable = unit["UnitFileState"] != "enabled"
    if not module.check_mode:
        apply(module, name, unit, action=action, enable=enable)
    module.exit_json(changed=masked or enable or action != "none", action=action)


def enable_offline(module: AnsibleModule, name: str) -> bool:
    """Enable a unit where systemd is not running, such as in an image. Return whether it was
    disabled.
    """
    environ = {"SYSTEMD_OFFLINE": "1", "SYSTEMCTL_SKIP_SYSV": "1"}
    rc, _, _ = module.run_command(["systemctl", "is-enabled", name], environ_update=environ)
    if rc != 0 and not module.check_mode:
        module.run_command(["systemctl", "enable", name], check_rc=True, environ_update=environ)
    return bool(rc)


def apply(
    module: AnsibleModule, name: str, unit: dict[str, str], *, action: str, enable: bool
) -> None:
    """Enable the unit if ``enable``; start or restart it, as ``action`` says; and wait until it is
    ready.
    """
    if enable:
        # This also reloads the unit files. The hooks for Debian's SysV scripts are slow and
        # skipped.
        environ = {"SYSTEMCTL_SKIP_SYSV": "1"}
        module.run_command(["systemctl", "enable", name], check_rc=True, environ_update=environ)
    elif unit["NeedDaemonReload"] == "yes":
        module.run_command(["systemctl", "daemon-reload"], check_rc=True)
    wait = module.params["wait"]
    start = size(module.params["log"])
    if action != "none":
        rc, _, _ = module.run_command(
            ["systemctl", action, name, *([] if wait else ["--no-block"])]
        )
        if rc != 0:
            fail_with_logs(module, name, f"systemd could not {action} {name}", start)
    if wait:
        wait_ready(module, name, start)


if __name__ == "__main__":
    main()
