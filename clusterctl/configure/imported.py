"""The conversion of a user's Ansible inventory, read by Ansible, to a cluster spec."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ClusterShell.NodeSet import NodeSet

from clusterctl.errors import SpecError, UsageError
from clusterctl.spec.load import parse_spec, yaml_text
from clusterctl.util.process import run, temporary_folder

_LEADERS: Final = (
    "controller",
    "slurmctld",
    "slurm_controller",
    "head",
    "headnode",
    "master",
    "manager",
)
_LOGINS: Final = ("login", "logins", "submit", "frontend")
_TIMEOUT_S: Final = 120
_ARGUMENTS: Final = ("ansible_ssh_args", "ansible_ssh_common_args", "ansible_ssh_extra_args")
_SECRETS: Final = (
    "ansible_password",
    "ansible_ssh_pass",
    "ansible_become_password",
    "ansible_become_pass",
)
_SSH: Final = ("ssh", "smart", "paramiko", "paramiko_ssh")
_LOCAL: Final = "local"
_LONGEST_LABEL: Final = 20
_HEAD: Final = """\
# A clusterctl spec, created from the Ansible inventory {source}.
# Check it with `clusterctl doctor`; docs/onprem.md describes all settings.
"""

Variables = Mapping[str, Any]


def spec_of_inventory(source: Path) -> tuple[str, list[str]]:
    """Convert an Ansible inventory to a spec, with a partition for each group of hosts.

    Return (the spec's text, notes on everything that could not be converted). Raise UsageError if
    Ansible can't read the inventory, or the spec would be invalid.
    """
    inventory = _Inventory(source)
    text = _HEAD.format(source=source.name) + yaml_text(inventory.document())
    try:
        parse_spec(text, "")
    except SpecError as exc:
        reason = "\n       ".join(f"{p.key}: {p.message} {p.hint}".strip() for p in exc.problems)
        raise inventory.error("the inventory can't be converted to a spec", reason) from exc
    of_hosts = [
        f"{NodeSet.fromlist(hosts)}: {note}" for note, hosts in inventory.notes_of_hosts.items()
    ]
    return text, inventory.notes + of_hosts


class _Inventory:
    def __init__(self, source: Path) -> None:
        listing = _read_inventory(source)
        self.source = source
        self.notes: list[str] = []
        # Note -> the hosts that it concerns.
        self.notes_of_hosts: dict[str, list[str]] = {}
        self.variables: dict[str, Variables] = listing.pop("_meta", {}).get("hostvars", {})
        ungrouped = listing.pop("ungrouped", {}).get("hosts", ())
        listing.pop("all", None)
        groups = {name: group.get("hosts", ()) for name, group in listing.items()}
        host_names = dict.fromkeys(
            host for hosts in (*groups.values(), ungrouped) for host in hosts
        )
        if not host_names:
            raise self.error("the inventory has no hosts", fix="check `ansible-inventory --list`")
        self.connections = {host: self._connection(host) for host in host_names}
        self.hosts = self._reachable()
        reachable = {
            name: [host for host in hosts if host in self.hosts] for name, hosts in groups.items()
        }
        self.groups = {name: hosts for name, hosts in reachable.items() if hosts}
        self.names = {host: _name(host) for host in self.hosts}
        duplicates = [name for name, count in Counter(self.names.values()).items() if count > 1]
        if duplicates:
            raise self.error(
                f"several hosts have the same name: {', '.join(duplicates)}", fix="rename hosts"
            )

    def error(self, text: str, reason: str = "", fix: str = "correct the inventory") -> UsageError:
        return UsageError(
            text, code="inventory-not-importable", where=str(self.source), why=reason, fix=fix
        )

    def note(self, host: str, text: str) -> None:
        """Add a note about a host. The same note about several hosts becomes one line."""
        self.notes_of_hosts.setdefault(text, []).append(_name(host))

    def document(self) -> dict[str, Any]:
        leader = next((h for group in _LEADERS for h in self.groups.get(group, ())), self.hosts[0])
        logins = list(
            dict.fromkeys(host for group in _LOGINS for host in self.groups.get(group, ()))
        )
        if not any(group in self.groups for group in _LEADERS):
            self.notes.append(
                f"there is no group controller, so {self.names[leader]} is the controller"
            )
        return {
            "version": 1,
            "name": _label(self.source.stem) or "cluster",
            "provider": {
                "type": "onprem",
                "controller": self.names[leader],
                **({"login": [self.names[host] for host in logins]} if logins else {}),
                **self._machines(),
            },
            "partitions": [
                {"name": name, "hosts": str(NodeSet.fromlist([self.names[host] for host in hosts]))}
                for name, hosts in self._partitions(leader, logins)
            ],
        }

    def _reachable(self) -> tuple[str, ...]:
        others = {
            host: connection
            for host, connection in self.connections.items()
            if connection not in (*_SSH, _LOCAL)
        }
        if len(others) == len(self.connections):
            reason = f"ansible_connection is {', '.join(dict.fromkeys(others.values()))}"
            raise self.error(
                "the inventory has no host with SSH access", reason, "add hosts with SSH access"
            )
        for host, connection in others.items():
            self.note(host, f"is left out: ansible_connection is {connection}, not ssh")
        return tuple(host for host in self.connections if host not in others)

    def _connection(self, host: str) -> str:
        connection = str(self._variable(host, "ansible_connection") or "ssh")
        return connection.removeprefix("ansible.builtin.").removeprefix("ansible.legacy.")

    def _partitions(self, leader: str, logins: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
        """Yield (partition, hosts) for each group of compute hosts. A host belongs to its first
        group.
        """
        assigned: set[str] = set()
        for group, hosts in self.groups.items():
            if group in (*_LEADERS, *_LOGINS):
                continue
            members = [host for host in hosts if host not in assigned]
            if skipped := [host for host in hosts if host in assigned]:
                self.notes.append(
                    f"group {group}: {', '.join(skipped)} is already in another partition"
                )
            if members:
                assigned.update(members)
                yield _label(group), members
        if not assigned:
            yield (
                "train",
                [host for host in self.hosts if host not in (leader, *logins)] or [leader],
            )

    def _machines(self) -> dict[str, Any]:
        """Return the spec's keys `access` (SSH settings of all hosts) and `hosts` (settings of each
        host).
        """
        local_hosts = [host for host in self.hosts if self.connections[host] == _LOCAL]
        all_local = len(local_hosts) == len(self.hosts)
        access = {host: {} if all_local else self._access(host) for host in self.hosts}
        first, *rest = access.values()
        common = {key: v for key, v in first.items() if all(other.get(key) == v for other in rest)}
        hosts = {}
        for host, name in self.names.items():
            differing = {key: value for key, value in access[host].items() if key not in common}
            address = self.variables.get(host, {}).get("ansible_host") or (
                host if host != name else None
            )
            if host in local_hosts and all_local:
                address = "localhost"
            elif host in local_hosts:
                self.note(
                    host, "is this machine; set the address by which the other hosts reach it"
                )
            hosts[name] = {**({"address": str(address)} if address else {}), **differing}
        return {**({"access": common} if common else {}), "hosts": hosts}

    def _access(self, host: str) -> dict[str, Any]:
        variables = self.variables.get(host, {})
        user = self._variable(host, "ansible_user", "ansible_ssh_user")
        port = self._variable(host, "ansible_port", "ansible_ssh_port")
        key = self._variable(host, "ansible_ssh_private_key_file", "ansible_private_key_file")
        if ignored := " ".join(
            str(value) for name in _ARGUMENTS if (value := self._variable(host, name))
        ):
            self.note(
                host, f"arguments of ssh are not converted; ~/.ssh/config may have them: {ignored}"
            )
        if any(secret in variables for secret in _SECRETS):
            self.note(
                host, "passwords are not converted: SSH uses keys, -K asks for the sudo password"
            )
        if variables.get("ansible_become_method", "sudo") != "sudo":
            self.note(
                host, f"uses {variables['ansible_become_method']}, but only sudo is supported"
            )
        access = {
            "user": str(user or ""),
            "port": int(port) if port and str(port).isdigit() else None,
            "key": str(key or ""),
            "become": "none" if user == "root" else "",
        }
        return {name: value for name, value in access.items() if value not in (None, "", [])}

    def _variable(self, host: str, *keys: str) -> Any:
        """Return the value of the first variable in ``keys`` that is set, or None. Only note
        templates.
        """
        for key in keys:
            if (value := self.variables.get(host, {}).get(key)) in (None, ""):
                continue
            if "{{" in str(value):
                self.note(host, f"{key} is a template: {value}")
                continue
            return value
        return None


def _read_inventory(source: Path) -> dict[str, Any]:
    if not source.exists():
        message = f"there is no inventory {source}"
        raise UsageError(
            message, code="no-such-file", fix="pass the file or folder of an inventory"
        )
    program = Path(sys.executable).parent / "ansible-inventory"
    with temporary_folder() as home:
        env = {k: v for k, v in os.environ.items() if not k.startswith("ANSIBLE_")}
        env |= {"ANSIBLE_HOME": str(home), "LC_ALL": "C.UTF-8", "ANSIBLE_NOCOLOR": "1"}
        env |= {
            "ANSIBLE_INVENTORY_UNPARSED_FAILED": "True",
            "ANSIBLE_DEPRECATION_WARNINGS": "False",
        }
        argv = [str(program), "-i", str(source), "--list"]
        try:
            result = run(argv, env=env, timeout_s=_TIMEOUT_S)
        except subprocess.TimeoutExpired as exc:
            message = f"Ansible did not read the inventory within {_TIMEOUT_S} s"
            fix = "check how long `ansible-inventory --list` takes for this inventory"
            raise UsageError(message, code="inventory-timeout", where=str(source), fix=fix) from exc
    try:
        listing = json.loads(result.stdout)
    except ValueError:
        listing = None
    if result.rc != 0 or not isinstance(listing, dict):
        reason = "\n".join(line for line in result.stderr.splitlines() if line.strip())[-1500:]
        message = "Ansible can't read the inventory"
        fix = "correct the inventory until `ansible-inventory --list` can read it"
        raise UsageError(
            message, code="inventory-unreadable", where=str(source), why=reason, fix=fix
        )
    return listing


def _name(host: str) -> str:
    """Return the spec's name for a host: the first label of a domain name, in lower case."""
    plain = host if re.fullmatch(r"[0-9.]+|.*:.*", host) else host.partition(".")[0]
    return re.sub(r"[^a-z0-9-]", "-", plain.lower()).strip("-")


def _label(text: str) -> str:
    """Return a valid name of a partition or cluster, derived from this text. "" if that is
    impossible.
    """
    label = re.sub(r"[^a-z0-9-]+", "-", text.lower()).strip("-")[:_LONGEST_LABEL].strip("-")
    return label if re.match(r"[a-z]", label) else (f"p-{label}"[:_LONGEST_LABEL] if label else "")
