#!/usr/bin/python
"""Ansible module: keeps the few files of a host's owner that roles replace, and removes clusterctl from the
host.
"""

from __future__ import annotations

from ansible.module_utils.basic import AnsibleModule

from ansible.module_utils.host_record import Record, RecordError, lock_record
from ansible.module_utils.host_removal import Removal

DOCUMENTATION = r"""
module: host_changes
short_description: Keep what the owner of a host had before a cluster, and remove the cluster from it
description:
  - C(begun), before the roles run, keeps each file of the owner that they replace once, as
    C(NAME.before-clusterctl), and notes which units ran, and which folders existed.
  - C(ended), after the roles have run, notes what they wrote and which packages they installed. Without
    C(begun) before it, it notes nothing.
  - C(removed) removes clusterctl's files, lines and accounts, and gives units their former state. Packages
    stay. It moves a kept file back, unless someone has changed the roles' file since; a file whose kept
    copy is gone stays. If it is repeated, it says the same, and leaves alone what the owner has made since
    then. After roles that did not run to their end, it keeps a changed file as C(NAME.after-clusterctl),
    and names units that someone else may have started, without stopping them.
  - A host without a record is not changed. Only one process works on a host at a time.
options:
  state:
    description: What happens.
    type: str
    choices: [begun, ended, removed]
    required: true
  cluster:
    description: Id of the cluster to which the host belongs. A host belongs to a single cluster.
    type: str
    required: true
  touches:
    description:
      - Role -> items that it changes. C(files) with C(clusterctl) in their path are removed, others
        are kept and moved back. C(links), path -> target, are removed if they have this target. In
        C(blocks), files of the owner, the role's lines stand between markers. C(folders) are
        removed if they are new and empty, C(trees) with their content, or only the content if they were
        empty. Files in C(spared) folders are removed by another host. C(units) read their files again after
        a file of the role is moved back; for units in C(reloads) a reload is enough. C(databases) are
        MariaDB's, with the user of each; those that the role has created, as their comment says, are
        dropped. C(keys) are lines of accounts in C(.ssh/authorized_keys), between comments that end in
        C(key_mark), in their homes and in the folders in C(homes).
    type: dict
    default: {}
  path:
    description: The record.
    type: path
    default: /var/lib/clusterctl-host.json
"""

RETURN = r"""
clusterctl_notes:
  description: What was not removed or moved back, and the command that purges the packages.
  type: list
  returned: removed
"""


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["begun", "ended", "removed"], "required": True},
            "cluster": {"type": "str", "required": True},
            "touches": {"type": "dict", "default": {}},
            "path": {"type": "path", "default": "/var/lib/clusterctl-host.json"},
        },
        supports_check_mode=True,
    )
    try:
        module.exit_json(**act(module))
    except (RecordError, OSError) as exc:
        module.fail_json(msg=str(exc))


def act(module: AnsibleModule) -> dict[str, object]:
    """Do what the parameter ``state`` says, and return the module's result."""
    with lock_record(module.params["path"]):
        return _act(module, Record.read(module.params["path"], module.params["cluster"]))


def _act(module: AnsibleModule, record: Record) -> dict[str, object]:
    if module.params["state"] == "removed":
        if module.check_mode or not record.exists:
            return {"changed": record.exists, "done": [], "clusterctl_notes": []}
        removal = Removal(module.run_command, record)
        removal.run()
        notes = record.content["notes"]
        return {"changed": True, "done": removal.done, "clusterctl_notes": notes}
    if module.params["state"] == "ended":
        if not module.check_mode:
            record.end(module.run_command)
        return {"changed": False}
    is_first = not record.exists
    if not module.check_mode:
        record.begin(module.params["touches"], module.run_command)
    return {"changed": is_first}


if __name__ == "__main__":
    main()
