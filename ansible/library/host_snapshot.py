#!/usr/bin/python
"""Ansible module: records the state of a host before clusterctl changes the host, and restores this
state.
"""

from __future__ import annotations

from ansible.module_utils.basic import AnsibleModule

from ansible.module_utils.snapshot_host import HostPaths
from ansible.module_utils.snapshot_packages import Dpkg, PackageError, Rpm, manager
from ansible.module_utils.snapshot_record import Recorder
from ansible.module_utils.snapshot_restore import Restorer
from ansible.module_utils.snapshot_store import SnapshotError, Store

DOCUMENTATION = r"""
module: host_snapshot
short_description: Record the state of a host before clusterctl changes it, and restore it
description:
  - C(recorded) records the state of everything that the roles change, before they change it. Run again, it
    records changes that others have made since.
  - C(sealed) records the state that the roles have left, so that later changes by others are recognized.
  - C(restored) restores the recorded state, removes additions of clusterctl, and reports exceptions.
  - Restoring a host that was never recorded changes nothing.
options:
  state:
    description: Action.
    type: str
    choices: [recorded, sealed, restored]
    required: true
  cluster:
    description: Id of the cluster to which the host belongs. A host belongs to a single cluster.
    type: str
    required: true
  touches:
    description:
      - Role -> items that it changes. C(files) and C(folders) are created or changed by the role. C(trees)
        are folders that belong to the role with their content, or files that its programs create. Files in
        C(spared) folders are restored by another host. C(units) read their files again after a file of the
        role is restored; for units in C(reloads) a reload is enough. C(accounts) are users, and groups of
        the same name, that the role or its packages create.
    type: dict
    default: {}
  path:
    description: Folder of the snapshot.
    type: path
    default: /var/lib/clusterctl-ledger
"""

RETURN = r"""
accounts:
  description: The users that clusterctl has created on the host, unless the host is restored.
  type: list
  returned: not restored
"""


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {
                "type": "str",
                "choices": ["recorded", "sealed", "restored"],
                "required": True,
            },
            "cluster": {"type": "str", "required": True},
            "touches": {"type": "dict", "default": {}},
            "path": {"type": "path", "default": "/var/lib/clusterctl-ledger"},
        },
        supports_check_mode=True,
    )
    try:
        module.exit_json(**act(module, manager(module.run_command), HostPaths()))
    except (SnapshotError, PackageError, OSError) as exc:
        module.fail_json(msg=str(exc))


def act(module: AnsibleModule, packages: Dpkg | Rpm | None, paths: HostPaths) -> dict[str, object]:
    """Record or restore the host's state, as the parameter ``state`` says, and return the module's
    result.

    packages: the host's package manager. None if it has neither dnf nor apt-get.
    """
    store = Store(module.params["path"])
    snapshot = store.read()
    cluster_id = module.params["cluster"]
    if snapshot["cluster"] not in ("", cluster_id):
        raise SnapshotError(
            f"this host belongs to another cluster (its id is {snapshot['cluster']})\n"
            "fix: take that cluster down first"
        )
    if module.params["state"] == "restored":
        return Restorer(module, store, snapshot, packages, paths).restore()
    snapshot["cluster"] = cluster_id
    recorder = Recorder(module.run_command, store, snapshot, packages, paths)
    is_first = not store.is_there
    if not module.check_mode:
        write = recorder.seal if module.params["state"] == "sealed" else recorder.record
        write(module.params["touches"])
    return {"changed": is_first, "accounts": snapshot["users"]["ours"]}


if __name__ == "__main__":
    main()
