"""Ansible vars plugin: the hosts' passwords for sudo, which clusterctl sends to Ansible's stdin.

The input is a JSON object: host -> password. Only clusterctl names this folder to Ansible, so that an
`ansible-playbook` of the user's waits for no input.
"""

from __future__ import annotations

import functools
import json
from typing import Any

from ansible.inventory.host import Host
from ansible.plugins.vars import BaseVarsPlugin

DOCUMENTATION = r"""
name: clusterctl_passwords
short_description: Passwords for sudo
description: Reads the passwords from stdin.
"""


@functools.cache
def read_passwords() -> dict[str, str]:
    with open(0, encoding="utf-8", closefd=False) as stdin:
        passwords: dict[str, str] = json.load(stdin)
    return passwords


class VarsModule(BaseVarsPlugin):  # type: ignore[misc]
    def get_vars(
        self,
        loader: Any,  # noqa: ARG002
        path: str,  # noqa: ARG002
        entities: Any,
        cache: bool = True,  # noqa: ARG002
    ) -> dict[str, str]:
        passwords = read_passwords()
        hosts = entities if isinstance(entities, list) else [entities]
        for host in hosts:
            if isinstance(host, Host) and host.name in passwords:
                return {"ansible_become_password": passwords[host.name]}
        return {}
