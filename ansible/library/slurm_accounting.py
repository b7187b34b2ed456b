#!/usr/bin/python
"""Ansible module: accounts, users and qualities of service in Slurm's accounting database.

Adds and corrects what is named; never removes: past jobs refer to these entities.
"""

from __future__ import annotations

from typing import Any

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: slurm_accounting
short_description: Accounts, users and qualities of service in Slurm's accounting database
description:
  - Reads what C(sacctmgr) shows and adds or corrects what differs, in one task.
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
      admin:
        description: May do everything in Slurm.
        type: bool
        default: false
  qos:
    description: Qualities of service that every user may ask for.
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
        description: Longest time of a job in seconds, rounded up to minutes; none when absent.
        type: int
author:
  - clusterctl
"""

EXAMPLES = r"""
- name: Enter the users
  slurm_accounting:
    cluster: demo
    accounts: [default]
    users:
      - {name: ada, accounts: [default]}
"""

RETURN = r"""
commands:
  description: The commands that were run, without C(sacctmgr).
  type: list
  elements: list
  returned: always
"""

Rows = list[list[str]]
DEFAULT_QOS = "normal"  # Slurm makes it itself
NO_LIMIT = "-1"


def wall_time(seconds: int | None) -> str:
    """Seconds, rounded up to minutes, as sacctmgr prints a time limit: `1-02:30:00`; nothing for no limit."""
    if seconds is None:
        return ""
    days, rest = divmod(-(-seconds // 60), 24 * 60)
    text = f"{rest // 60:02}:{rest % 60:02}:00"
    return f"{days}-{text}" if days else text


def plan_qos(wanted: list[dict[str, Any]], rows: Rows) -> Rows:
    """Commands for qualities of service. Rows of the present: name, priority, MaxWall."""
    present = {name: (int(priority or 0), wall) for name, priority, wall in rows}
    commands = []
    for qos in wanted:
        name, priority = qos["name"], qos["priority"]
        wall = wall_time(qos["max_time_s"])
        if present.get(name) == (priority, wall):
            continue
        values = [f"priority={priority}", f"maxwall={wall or NO_LIMIT}"]
        if name in present:
            commands.append(["modify", "qos", "where", f"name={name}", "set", *values])
        else:
            commands.append(["add", "qos", name, *values])
    return commands


def plan_allowed_qos(cluster: str, wanted: list[dict[str, Any]], rows: Rows) -> Rows:
    """Commands that let everybody ask for every quality. Rows: account, user, comma list of qualities."""
    names = {DEFAULT_QOS, *(qos["name"] for qos in wanted)}
    root = next((row[2] for row in rows if row[:2] == ["root", ""]), "")
    if names <= set(root.split(",")):
        return []
    value = ",".join(sorted(names | set(filter(None, root.split(",")))))
    return [["modify", "account", "where", "name=root", f"cluster={cluster}", "set", f"qos={value}"]]


def plan_users(cluster: str, wanted: list[dict[str, Any]], associations: Rows, users: Rows) -> Rows:
    """Commands for users. Rows: account, user, ...; and user, default account, admin level."""
    pairs = {(account, user) for account, user, *_ in associations}
    present = {name: (default, admin) for name, default, admin in users}
    commands = []
    for user in wanted:
        name, accounts = user["name"], user["accounts"]
        admin = "Administrator" if user["admin"] else "None"
        missing = [account for account in accounts if (account, name) not in pairs]
        if missing:
            commands.append(["add", "user", name, f"account={','.join(missing)}", f"cluster={cluster}"])
        changes = []
        default, level = present.get(name, (missing[0] if missing else "", "None"))
        if default != accounts[0]:
            changes.append(f"defaultaccount={accounts[0]}")
        if level != admin:
            changes.append(f"adminlevel={admin}")
        if changes:
            commands.append(["modify", "user", "where", f"name={name}", "set", *changes])
    return commands


def plan_accounts(cluster: str, wanted: list[str], associations: Rows) -> Rows:
    """Commands for accounts. Rows: account, user, ..."""
    present = {account for account, user, *_ in associations if not user}
    return [["add", "account", name, f"cluster={cluster}"] for name in wanted if name not in present]


class Sacctmgr:
    """Runs sacctmgr, and keeps what it ran."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.commands: Rows = []

    def show(self, *words: str) -> Rows:
        """Rows of `sacctmgr show`."""
        argv = ["sacctmgr", "--noheader", "--parsable2", "show", *words]
        _, stdout, _ = self.module.run_command(argv, check_rc=True)
        return [line.split("|") for line in stdout.splitlines() if line]

    def apply(self, commands: Rows) -> None:
        """Run commands that change something."""
        for words in commands:
            if not self.module.check_mode:
                self.module.run_command(["sacctmgr", "--immediate", *words], check_rc=True)
            self.commands.append(words)


def main() -> None:
    """Entry point."""
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
                    "admin": {"type": "bool", "default": False},
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
    manager = Sacctmgr(module)
    enter(manager, module.params)
    module.exit_json(changed=bool(manager.commands), commands=manager.commands)


def enter(manager: Sacctmgr, wanted: dict[str, Any]) -> None:
    """Compare and correct; qualities first, since associations name them."""
    cluster = wanted["cluster"]
    if [cluster] not in manager.show("cluster", "format=cluster"):
        manager.apply([["add", "cluster", cluster]])
    manager.apply(plan_qos(wanted["qos"], manager.show("qos", "format=name,priority,maxwall")))
    associations = manager.show("associations", f"cluster={cluster}", "format=account,user,qos")
    users = manager.show("user", "format=user,defaultaccount,adminlevel")
    manager.apply(plan_allowed_qos(cluster, wanted["qos"], associations))
    manager.apply(plan_accounts(cluster, wanted["accounts"], associations))
    manager.apply(plan_users(cluster, wanted["users"], associations, users))


if __name__ == "__main__":
    main()
