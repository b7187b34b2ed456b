#!/usr/bin/python
"""Ansible module: records on a host which files the roles want there."""

from __future__ import annotations

from ansible.module_utils.basic import AnsibleModule

from ansible.module_utils.remote_wanted import WANTED, update_wanted

DOCUMENTATION = r"""
module: wanted_files
short_description: Record which files the roles want on a host
description:
  - Adds marks to the record with which clusterctl compares the host later. It is no change of the host's
    configuration, so check mode and the recap do not mention it.
options:
  marks:
    description: Mark of each file, as C(clusterctl_linear) makes them of the results of the roles' tasks.
    type: dict
    required: true
  path:
    description: The record.
    type: path
    default: /opt/clusterctl/wanted.json
"""


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "marks": {"type": "dict", "required": True},
            "path": {"type": "path", "default": WANTED},
        },
        supports_check_mode=True,
    )
    if not module.check_mode:
        try:
            update_wanted({"marks": module.params["marks"]}, module.params["path"])
        except OSError as exc:
            module.fail_json(msg=str(exc))
    module.exit_json(changed=False)


if __name__ == "__main__":
    main()
