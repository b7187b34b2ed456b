#!/usr/bin/python
"""Ansible module: accounts, users and qualities of service (QOS) in Slurm's accounting database.

The module adds and modifies entities, but never removes them, because past jobs refer to them.
"""

from __future__ import annotations

import re
import subprocess
from subprocess import PIPE
from typing import Any

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: slurm_accounting
short_description: Accounts, users and qualities of service in Slurm's accounting database
description:
  - Compares the output of C(sacctmgr) with the parameters, and adds or modifies entities that differ.
options:
  cluster:
    description: Slurm's ClusterName.
    type: str
    required: true
  accounts:
    description: Accounts that must exist.
    type: list
    elements: str
    default: []
  users:
    description: Users that must be associated with accounts.
    type: list
    elements: dict
    default: []
    suboptions:
      name:
        description: Login name.
        type: str
        required: true
      accounts:
        description: Accounts; the first is the default.
        type: list
        elements: str
        required: true
  qos:
    description: Qualities of service that every user may request.
    type: list
    elements: dict
    default: []
    suboptions:
      name:
        description: Name.
        type: str
        required: true
      priority:
        description: Added to a job's priority.
        type: int
        default: 0
      max_time_s:
        description: Longest time of a job in seconds, rounded up to minutes. Without it there is no limit.
        type: int
"""

Rows = list[list[str]]
# Slurm creates this quality of service itself.
DEFAULT_QOS = "normal"
NO_LIMIT = "-1"
# Slurm then rejects a job beyond the limit instead of leaving it in the queue for ever.
REFUSE = "DenyOnLimit"
WORD = re.compile(r"[A-Za-z0-9_.,:=-]+")


def wall_time(seconds: int | None) -> str:
    """Format a time limit like sacctmgr, rounded up to minutes: `1-02:30:00`; "" if there is no
    limit.
    """
    if seconds is None:
        return ""
    days, rest = divmod(-(-seconds // 60), 24 * 60)
    text = f"{rest // 60:02}:{rest % 60:02}:00"
    return f"{days}-{text}" if days else text


def plan_qos(qualities: list[dict[str, Any]], rows: Rows) -> Rows:
    """Return the sacctmgr commands for QOS. rows: the existing QOS as name, priority, MaxWall,
    flags.
    """
    present = {name: (int(priority or 0), wall, flags) for name, priority, wall, flags in rows}
    commands = []
    for qos in qualities:
        name = qos["name"]
        priority = qos["priority"]
        wall = wall_time(qos["max_time_s"])
        if present.get(name) == (priority, wall, REFUSE):
            continue
        values = [f"priority={priority}", f"maxwall={wall or NO_LIMIT}", f"flags={REFUSE}"]
        if name in present:
            commands.append(["modify", "qos", "where", f"name={name}", "set", *values])
        else:
            commands.append(["add", "qos", name, *values])
    return commands


def plan_allowed_qos(cluster: str, qualities: list[dict[str, Any]], rows: Rows) -> Rows:
    """Return the sacctmgr commands that let all users request all QOS. rows: account, user, allowed
    QOS.
    """
    names = {DEFAULT_QOS, *(qos["name"] for qos in qualities)}
    root = next((row[2] for row in rows if row[:2] == ["root", ""]), "")
    if names <= set(root.split(",")):
        return []
    value = ",".join(sorted(names | set(filter(None, root.split(",")))))
    return [
        ["modify", "account", "where", "name=root", f"cluster={cluster}", "set", f"qos={value}"]
    ]


def plan_users(
    cluster: str, wanted_users: list[dict[str, Any]], associations: Rows, users: Rows
) -> Rows:
    """Return the sacctmgr commands for users. associations: account, user, QOS.

    users: the existing users as name, default account.
    """
    pairs = {(account, user) for account, user, *_ in associations}
    present = dict(users)
    commands = []
    for user in wanted_users:
        name = user["name"]
        accounts = user["accounts"]
        missing = [account for account in accounts if (account, name) not in pairs]
        if missing:
            commands.append(
                ["add", "user", name, f"account={','.join(missing)}", f"cluster={cluster}"]
            )
        if present.get(name, missing[0] if missing else "") != accounts[0]:
            change = f"defaultaccount={accounts[0]}"
            commands.append(["modify", "user", "where", f"name={name}", "set", change])
    return commands


def plan_accounts(cluster: str, names: list[str], associations: Rows) -> Rows:
    """Return the sacctmgr command that adds missing accounts. associations: account, user, QOS."""
    present = {account for account, user, *_ in associations if not user}
    missing = [name for name in names if name not in present]
    return [["add", "account", ",".join(missing), f"cluster={cluster}"]] if missing else []


def plan(params: dict[str, Any], tables: dict[str, Rows]) -> Rows:
    """Return all sacctmgr commands, in an order in which each can be executed."""
    cluster = params["cluster"]
    associations = tables["associations"]
    # Each registered cluster has a root account.
    is_registered = any(row[:2] == ["root", ""] for row in associations)
    return [
        *([] if is_registered else [["add", "cluster", cluster]]),
        *plan_qos(params["qos"], tables["qos"]),
        *plan_allowed_qos(cluster, params["qos"], associations),
        *plan_accounts(cluster, params["accounts"], associations),
        *plan_users(cluster, params["users"], associations, tables["user"]),
    ]


def answers(module: AnsibleModule) -> bool:
    """Return whether sacctmgr is installed, and slurmdbd answers it."""
    if module.get_bin_path("sacctmgr") is None:
        return False
    rc, _, _ = module.run_command(["sacctmgr", "--noheader", "show", "cluster"])
    return bool(rc == 0)


def read_tables(module: AnsibleModule, cluster: str) -> dict[str, Rows]:
    """Read "associations", "user" and "qos". The queries run in parallel, because they mostly
    wait.
    """
    queries = {
        "associations": ["associations", f"cluster={cluster}", "format=account,user,qos"],
        "user": ["user", "format=user,defaultaccount"],
        "qos": ["qos", "format=name,priority,maxwall,flags"],
    }
    argv = ["sacctmgr", "--noheader", "--parsable2", "show"]
    running = {
        name: subprocess.Popen([*argv, *words], stdout=PIPE, stderr=PIPE, text=True)
        for name, words in queries.items()
    }
    tables = {}
    for name, process in running.items():
        stdout, stderr = process.communicate()
        if process.returncode != 0:
            module.fail_json(msg=f"sacctmgr could not show {name}", stderr=stderr)
        tables[name] = [line.split("|") for line in stdout.splitlines() if line]
    return tables


def apply(module: AnsibleModule, commands: Rows) -> None:
    """Run all sacctmgr commands in a single process, because connecting to slurmdbd is slow."""
    for word in (word for words in commands for word in words):
        if not WORD.fullmatch(word):
            module.fail_json(msg=f"{word!r} has characters that sacctmgr can't read")
    script = "".join(" ".join(words) + "\n" for words in [*commands, ["exit"]])
    rc, stdout, stderr = module.run_command(["sacctmgr", "--immediate"], data=script)
    if rc != 0:
        module.fail_json(msg="sacctmgr rejected a command", stdout=stdout, stderr=stderr)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "cluster": {"type": "str", "required": True},
            "accounts": {"type": "list", "elements": "str", "default": []},
            "users": {
                "type": "list",
                "elements": "dict",
                "default": [],
                "options": {
                    "name": {"type": "str", "required": True},
                    "accounts": {"type": "list", "elements": "str", "required": True},
                },
            },
            "qos": {
                "type": "list",
                "elements": "dict",
                "default": [],
                "options": {
                    "name": {"type": "str", "required": True},
                    "priority": {"type": "int", "default": 0},
                    "max_time_s": {"type": "int"},
                },
            },
        },
        supports_check_mode=True,
    )
    if module.check_mode and not answers(module):
        # In check mode, the earlier tasks have not installed and started the accounting.
        module.exit_json(changed=True, commands=[])
    commands = plan(module.params, read_tables(module, module.params["cluster"]))
    if commands and not module.check_mode:
        apply(module, commands)
    module.exit_json(changed=bool(commands), commands=commands)


if __name__ == "__main__":
    main()
