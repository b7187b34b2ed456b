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
    elements: dict
    default: []
    suboptions:
      name:
        description: Name.
        type: str
        required: true
      limits:
        description: Limits of the account, by the names of sacctmgr. Slurm's other limits of it are lifted.
        type: dict
        default: {}
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
      limits:
        description: Limits of the user, as those of accounts, by account.
        type: dict
        default: {}
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
      limits:
        description: Limits of its jobs, as those of accounts.
        type: dict
        default: {}
"""

Rows = list[list[str]]
# Slurm creates this quality of service itself.
DEFAULT_QOS = "normal"
NO_LIMIT = "-1"
# Slurm then rejects a job that alone is beyond a limit of its QOS, account or user instead of leaving
# it in the queue for ever.
REFUSE = "DenyOnLimit"
# Lines of sacctmgr that say what it rejects.
REFUSAL = re.compile(r"error|Unknown|Bad|Invalid|must|not ")
WORD = re.compile(r"[A-Za-z0-9_.,:=/-]+")
# The limits that sacctmgr shows, by names with which it also sets them.
LIMITS = (
    "GrpJobs",
    "GrpJobsAccrue",
    "GrpSubmitJobs",
    "GrpTRES",
    "GrpTRESMins",
    "GrpTRESRunMins",
    "GrpWall",
    "MaxTRES",
    "MaxTRESMins",
    "MaxTRESPerNode",
    "MaxWall",
    "MinPrioThresh",
)
OF_ASSOCIATION = (*LIMITS, "MaxJobs", "MaxJobsAccrue", "MaxSubmitJobs", "MaxTRESRunMins")
OF_QOS = (
    *LIMITS,
    "MaxJobsAccruePerAccount",
    "MaxJobsAccruePerUser",
    "MaxJobsPerAccount",
    "MaxJobsPerUser",
    "MaxSubmitJobsPerAccount",
    "MaxSubmitJobsPerUser",
    "MaxTRESPerAccount",
    "MaxTRESPerUser",
    "MaxTRESRunMinsPerAccount",
    "MaxTRESRunMinsPerUser",
    "MinTRES",
)
# The other names that sacctmgr's manual gives to limits.
ALIASES = (
    (re.compile(r"PU$", re.IGNORECASE), "PerUser"),
    (re.compile(r"PA$", re.IGNORECASE), "PerAccount"),
    (re.compile(r"Submit(?!Jobs)", re.IGNORECASE), "SubmitJobs"),
    (re.compile(r"WallDurationPerJob$", re.IGNORECASE), "Wall"),
    (re.compile(r"(?<=TRES)(PerJob|PJ)$|(?<=TRESMins)(PerJob|PJ)$", re.IGNORECASE), ""),
)
# sacctmgr takes these for limits of each user of a QOS.
PER_USER = {"MaxJobs", "MaxJobsAccrue", "MaxSubmitJobs"}
AMOUNT = re.compile(r"(\d+(?:\.\d+)?)([KMGTP]?)")
CLOCK = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


def wanted_limits(limits: dict[str, Any], known: tuple[str, ...]) -> dict[str, str]:
    """Return limits by the names in ``known``; names that are not there are kept. Like sacctmgr, this
    ignores case.
    """
    names = {name.lower(): name for name in (*known, *PER_USER)}
    wanted = {}
    for given, value in limits.items():
        name = given
        for pattern, text in ALIASES:
            name = pattern.sub(text, name)
        name = names.get(name.lower(), name)
        is_per_user = known is OF_QOS and name in PER_USER
        wanted[f"{name}PerUser" if is_per_user else name] = str(value)
    return wanted


def amounts(value: str) -> dict[str, float | str]:
    """Return the amounts of a limit, by resource ("" if it has none), in a form in which equal limits
    are equal: sacctmgr shows other units and another order than were written. Times are in minutes.
    """
    found: dict[str, float | str] = {}
    for part in filter(None, value.split(",")):
        resource, _, amount = part.rpartition("=")
        number = AMOUNT.fullmatch(amount.upper())
        if number:
            # Memory without a unit is in MiB.
            unit = number[2] or ("M" if resource.lower() == "mem" else "")
            found[resource.lower()] = float(number[1]) * 1024 ** " KMGTP".index(unit or " ")
        else:
            found[resource.lower()] = minutes(amount)
    return found


def minutes(text: str) -> float | str:
    """Return a time such as 1-12, 2:30:00 or 90:00 in minutes, rounded up; another text as it is."""
    match = CLOCK.fullmatch(text)
    if not match:
        return text
    days, first, second, third = match.groups()
    if days or third:
        hours, mins, seconds = first, second or 0, third or 0
    else:
        hours, mins, seconds = 0, first, second or 0
    return int(days or 0) * 1440 + int(hours) * 60 + int(mins) + (int(seconds) > 0)


def changes(wanted: dict[str, str], shown: dict[str, str]) -> list[str]:
    """Return the words after `set` that give an entity its limits. shown: limits that Slurm has."""
    words = []
    for name in {**shown, **wanted}:
        old = amounts(shown.get(name, ""))
        new = amounts(wanted.get(name, ""))
        if old == new:
            continue
        # sacctmgr keeps the amounts of resources that it is not told.
        lifted = [
            f"{resource}={NO_LIMIT}" if resource else NO_LIMIT for resource in old.keys() - new
        ]
        words.append(f"{name}={','.join(filter(None, [wanted.get(name), *sorted(lifted)]))}")
    return words


def plan_qos(qualities: list[dict[str, Any]], rows: Rows, fields: list[str]) -> Rows:
    """Return the sacctmgr commands for QOS. rows: the existing QOS as name, priority, flags, and its
    limits, which ``fields`` names.
    """
    present = {name: (int(priority or 0), flags, values) for name, priority, flags, *values in rows}
    commands = []
    for qos in qualities:
        name = qos["name"]
        priority, flags, values = present.get(name, (None, "", []))
        wanted = wanted_limits(qos["limits"], OF_QOS)
        words = changes(wanted, dict(zip(fields, values)))
        if (priority, flags) != (qos["priority"], REFUSE):
            words = [f"priority={qos['priority']}", f"flags={REFUSE}", *words]
        if name not in present:
            commands.append(["add", "qos", name, *words])
        elif words:
            commands.append(["modify", "qos", "where", f"name={name}", "set", *words])
    return commands


def plan_limits(
    cluster: str,
    accounts: list[dict[str, Any]],
    users: list[dict[str, Any]],
    associations: Rows,
    fields: list[str],
) -> Rows:
    """Return the sacctmgr commands that change limits of accounts, and of users in their accounts.

    associations: account, user, QOS, and the association's own limits, which ``fields`` names.
    """
    shown = {
        (account, user): dict(zip(fields, values)) for account, user, _, *values in associations
    }
    entities = [(account["name"], "", account["limits"]) for account in accounts]
    entities += [
        (name, user["name"], user["limits"].get(name, {}))
        for user in users
        for name in user["accounts"]
    ]
    commands = []
    for account, user, limits in entities:
        words = changes(wanted_limits(limits, OF_ASSOCIATION), shown.get((account, user), {}))
        if words:
            names = [f"name={user}", f"account={account}"] if user else [f"name={account}"]
            kind = "user" if user else "account"
            commands.append(["modify", kind, "where", *names, f"cluster={cluster}", "set", *words])
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
    accounts = params["accounts"]
    users = params["users"]
    of_qos, of_associations = limit_fields(params)
    qualities = params["qos"]
    if DEFAULT_QOS not in {qos["name"] for qos in qualities}:
        qualities = [{"name": DEFAULT_QOS, "priority": 0, "limits": {}}, *qualities]
    # Each registered cluster has a root account.
    is_registered = any(row[:2] == ["root", ""] for row in associations)
    return [
        *([] if is_registered else [["add", "cluster", cluster]]),
        *plan_qos(qualities, tables["qos"], of_qos),
        *plan_allowed_qos(cluster, params["qos"], associations),
        *plan_accounts(cluster, [account["name"] for account in accounts], associations),
        *plan_users(cluster, users, associations, tables["user"]),
        *plan_limits(cluster, accounts, users, associations, of_associations),
    ]


def limit_fields(params: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return the limits of QOS, and those of associations, that are compared: sacctmgr refuses a name
    that it does not know.
    """
    of_qos = dict.fromkeys(OF_QOS)
    for qos in params["qos"]:
        of_qos.update(dict.fromkeys(wanted_limits(qos["limits"], OF_QOS)))
    of_associations = dict.fromkeys(OF_ASSOCIATION)
    of_users = [limits for user in params["users"] for limits in user["limits"].values()]
    for limits in [*(account["limits"] for account in params["accounts"]), *of_users]:
        of_associations.update(dict.fromkeys(wanted_limits(limits, OF_ASSOCIATION)))
    return [*of_qos], [*of_associations]


def answers(module: AnsibleModule) -> bool:
    """Return whether sacctmgr is installed, and slurmdbd answers it."""
    if module.get_bin_path("sacctmgr") is None:
        return False
    rc, _, _ = module.run_command(["sacctmgr", "--noheader", "show", "cluster"])
    return bool(rc == 0)


def read_tables(module: AnsibleModule) -> dict[str, Rows]:
    """Read "associations", "user" and "qos". The queries run in parallel, because they mostly
    wait.
    """
    of_qos, of_associations = limit_fields(module.params)
    associations = f"format=account,user,qos,{','.join(of_associations)}"
    queries = {
        # Of limits, an association shows those of its parents, too, without WOPLimits.
        "associations": [
            "associations",
            f"cluster={module.params['cluster']}",
            "WOPLimits",
            associations,
        ],
        "user": ["user", "format=user,defaultaccount"],
        "qos": ["qos", f"format=name,priority,flags,{','.join(of_qos)}"],
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
            module.fail_json(msg=f"sacctmgr could not show {name}: {stderr.strip()}")
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
        words = [*stdout.splitlines(), *stderr.splitlines()]
        said = "; ".join(line.strip() for line in words if REFUSAL.search(line))
        module.fail_json(msg=f"sacctmgr rejected a command: {said}", stdout=stdout, stderr=stderr)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "cluster": {"type": "str", "required": True},
            "accounts": {
                "type": "list",
                "elements": "dict",
                "default": [],
                "options": {
                    "name": {"type": "str", "required": True},
                    "limits": {"type": "dict", "default": {}},
                },
            },
            "users": {
                "type": "list",
                "elements": "dict",
                "default": [],
                "options": {
                    "name": {"type": "str", "required": True},
                    "accounts": {"type": "list", "elements": "str", "required": True},
                    "limits": {"type": "dict", "default": {}},
                },
            },
            "qos": {
                "type": "list",
                "elements": "dict",
                "default": [],
                "options": {
                    "name": {"type": "str", "required": True},
                    "priority": {"type": "int", "default": 0},
                    "limits": {"type": "dict", "default": {}},
                },
            },
        },
        supports_check_mode=True,
    )
    if module.check_mode and not answers(module):
        # In check mode, the earlier tasks have not installed and started the accounting.
        module.exit_json(changed=True, commands=[])
    commands = plan(module.params, read_tables(module))
    if commands and not module.check_mode:
        apply(module, commands)
    module.exit_json(changed=bool(commands), commands=commands)


if __name__ == "__main__":
    main()
