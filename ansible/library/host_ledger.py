#!/usr/bin/python
"""Ansible module: what a host was before clusterctl changed it, and giving that back."""

from __future__ import annotations

from ansible.module_utils.basic import AnsibleModule

from ansible.module_utils.ledger_packages import PackageError, manager
from ansible.module_utils.ledger_record import Recorder
from ansible.module_utils.ledger_restore import Restorer
from ansible.module_utils.ledger_store import LedgerError, Store

DOCUMENTATION = r"""
module: host_ledger
short_description: What a host was before clusterctl changed it, and giving that back
description:
  - C(recorded) notes what is there of all that the roles touch; it comes before they change anything.
    Done again, it takes note of what somebody else has changed since.
  - C(sealed) notes what the roles have left, so that what somebody changes later can be told from it.
  - C(restored) gives back what was, removes what is ours, and says what it left and why.
  - Restoring what was never recorded changes nothing.
options:
  state:
    description: What to do.
    type: str
    choices: [recorded, sealed, restored]
    required: true
  cluster:
    description: Id of the cluster that the host belongs to; a host belongs to one.
    type: str
    required: true
  touches:
    description:
      - What each role touches, by its name. C(files) and C(folders) are what it makes or changes, C(trees)
        folders that are its own with all that is in them. What is in folders in C(spared) another host gives
        back. C(units) are read anew when a file of the role is
        put back; those in C(reloads) need no restart for that. C(accounts) are users, and groups of the same
        name, that it or its packages make.
    type: dict
    default: {}
  path:
    description: Folder of the ledger.
    type: path
    default: /var/lib/clusterctl-ledger
"""


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["recorded", "sealed", "restored"], "required": True},
            "cluster": {"type": "str", "required": True},
            "touches": {"type": "dict", "default": {}},
            "path": {"type": "path", "default": "/var/lib/clusterctl-ledger"},
        },
        supports_check_mode=True,
    )
    try:
        module.exit_json(**act(module))
    except (LedgerError, PackageError, OSError) as exc:
        module.fail_json(msg=str(exc))


def act(module: AnsibleModule) -> dict[str, object]:
    """Do it; what the module returns."""
    store = Store(module.params["path"])
    ledger = store.read()
    ours = module.params["cluster"]
    if ledger["cluster"] not in ("", ours):
        raise LedgerError(
            f"this host belongs to another cluster already (its id is {ledger['cluster']}); "
            "take that one down first"
        )
    packages = manager(module.run_command)
    if module.params["state"] == "restored":
        return Restorer(module, store, ledger, packages).restore()
    recorder = Recorder(module.run_command, store, {**ledger, "cluster": ours}, packages)
    first = not store.is_there
    if not module.check_mode:
        note = recorder.seal if module.params["state"] == "sealed" else recorder.record
        note(module.params["touches"])
    return {"changed": first}


if __name__ == "__main__":
    main()
