"""An Ansible inventory of the user's, read by Ansible itself, as a spec of those machines."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from getopt import GetoptError, getopt
from pathlib import Path
from typing import Any, Final

from ClusterShell.NodeSet import NodeSet

from clusterctl.errors import SpecError, UsageError
from clusterctl.spec.load import parse_spec
from clusterctl.util.assets import yaml_text
from clusterctl.util.process import run, temporary_folder

_LEADERS: Final = ("controller", "slurmctld", "slurm_controller", "head", "headnode", "master", "manager")
_LOGINS: Final = ("login", "logins", "submit", "frontend")
_TIMEOUT_S: Final = 120
_JUMP: Final = re.compile(r"ProxyJump[= ](\S+)", re.IGNORECASE)
_PROXY: Final = re.compile(r"ProxyCommand[= ]\"?'?ssh\b.*-W\s+\S+(.*)", re.IGNORECASE)
_ARGUMENTS: Final = ("ansible_ssh_args", "ansible_ssh_common_args", "ansible_ssh_extra_args")
_FLAGS: Final = "46AaCfGgKkMNnqsTtVvXxYyB:b:c:D:E:e:F:I:i:J:L:l:m:O:o:p:Q:R:S:W:w:"  # of ssh
_SECRETS: Final = ("ansible_password", "ansible_ssh_pass", "ansible_become_password", "ansible_become_pass")
_SSH: Final = ("ssh", "smart", "paramiko", "paramiko_ssh")
_LOCAL: Final = "local"
_LONGEST_LABEL: Final = 20
_HEAD: Final = """\
# A clusterctl spec, made of the Ansible inventory {source}.
# Check it with `clusterctl validate --live`; see docs/onprem.md for what else can be said.
"""

Variables = Mapping[str, Any]


def spec_of_inventory(source: Path) -> tuple[str, list[str]]:
    """The spec that an inventory comes to, and what did not come along: groups become partitions.

    Raises:
        UsageError: Ansible can't read it, or no spec can be made of it.
    """
    read = _Inventory(source)
    text = _HEAD.format(source=source.name) + yaml_text(read.document(), offset=2)
    try:
        parse_spec(text, "")
    except SpecError as exc:
        why = "\n       ".join(f"{one.key}: {one.message} {one.hint}".strip() for one in exc.problems)
        raise read.error("no spec can be made of it", why) from exc
    of_hosts = [f"{NodeSet.fromlist(hosts)}: {note}" for note, hosts in read.notes_of_hosts.items()]
    return text, read.notes + of_hosts


class _Inventory:
    """An inventory of the user's: the hosts that SSH leads to, and this machine."""

    def __init__(self, source: Path) -> None:
        said = _listed(source)
        self.source = source
        self.notes: list[str] = []
        self.notes_of_hosts: dict[str, list[str]] = {}  # note -> the hosts that it is about
        self.variables: dict[str, Variables] = said.pop("_meta", {}).get("hostvars", {})
        alone = said.pop("ungrouped", {}).get("hosts", ())
        said.pop("all", None)
        listed = {name: one.get("hosts", ()) for name, one in said.items()}
        named = dict.fromkeys(host for hosts in (*listed.values(), alone) for host in hosts)
        if not named:
            raise self.error("the inventory names no hosts", fix="see `ansible-inventory --list`")
        self.connections = {host: self._connection(host) for host in named}
        self.hosts = self._reachable()
        kept = {name: [host for host in hosts if host in self.hosts] for name, hosts in listed.items()}
        self.groups = {name: hosts for name, hosts in kept.items() if hosts}
        self.names = {host: _name(host) for host in self.hosts}
        twice = [name for name, count in Counter(self.names.values()).items() if count > 1]
        if twice:
            raise self.error(f"hosts of one name: {', '.join(twice)}", fix="give them names that differ")

    def error(self, what: str, why: str = "", fix: str = "correct it") -> UsageError:
        return UsageError(what, code="inventory-not-importable", where=str(self.source), why=why, fix=fix)

    def note(self, host: str, text: str) -> None:
        """Say something of a host, which may be true of others, too."""
        self.notes_of_hosts.setdefault(text, []).append(_name(host))

    def document(self) -> dict[str, Any]:
        leader = next((h for group in _LEADERS for h in self.groups.get(group, ())), self.hosts[0])
        logins = list(dict.fromkeys(host for group in _LOGINS for host in self.groups.get(group, ())))
        if not any(group in self.groups for group in _LEADERS):
            self.notes.append(f"no group is called controller: {self.names[leader]} is the controller")
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
        others = {host: way for host, way in self.connections.items() if way not in (*_SSH, _LOCAL)}
        if len(others) == len(self.connections):
            why = f"ansible_connection is {', '.join(dict.fromkeys(others.values()))}"
            raise self.error("SSH leads to no host of the inventory", why, "name such hosts")
        for host, way in others.items():
            self.note(host, f"is left out: ansible_connection is {way}, not ssh")
        return tuple(host for host in self.connections if host not in others)

    def _connection(self, host: str) -> str:
        said = str(self._plain(host, "ansible_connection") or "ssh")
        return said.removeprefix("ansible.builtin.").removeprefix("ansible.legacy.")

    def _partitions(self, leader: str, logins: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
        """Every other group of hosts; a host of several belongs to the first."""
        placed: set[str] = set()
        for group, hosts in self.groups.items():
            if group in (*_LEADERS, *_LOGINS):
                continue
            mine = [host for host in hosts if host not in placed]
            if left := [host for host in hosts if host in placed]:
                self.notes.append(f"group {group}: {', '.join(left)} stayed in another partition")
            if mine:
                placed.update(mine)
                yield _label(group), mine
        if not placed:
            yield "train", [host for host in self.hosts if host not in (leader, *logins)] or [leader]

    def _machines(self) -> dict[str, Any]:
        """`access` with what all hosts have in common, and `hosts` with the rest."""
        here = [host for host in self.hosts if self.connections[host] == _LOCAL]
        alone = len(here) == len(self.hosts)
        said = {host: {} if alone else self._access(host) for host in self.hosts}
        first, *others = said.values()
        common = {key: it for key, it in first.items() if all(one.get(key) == it for one in others)}
        hosts = {}
        for host, name in self.names.items():
            own = {key: value for key, value in said[host].items() if key not in common}
            address = self.variables.get(host, {}).get("ansible_host") or (host if host != name else None)
            if host in here and alone:
                address = "localhost"
            elif host in here:
                self.note(host, "is this machine: the others need its address on their network")
            hosts[name] = {**({"address": str(address)} if address else {}), **own}
        return {**({"access": common} if common else {}), "hosts": hosts}

    def _access(self, host: str) -> dict[str, Any]:
        """How Ansible reaches a host, in the words of the spec."""
        variables = self.variables.get(host, {})
        user = self._plain(host, "ansible_user", "ansible_ssh_user")
        port = self._plain(host, "ansible_port", "ansible_ssh_port")
        key = self._plain(host, "ansible_ssh_private_key_file", "ansible_private_key_file")
        jump, others = _jump(" ".join(str(self._plain(host, name) or "") for name in _ARGUMENTS))
        if others:
            self.note(host, f"arguments of ssh do not come along: {' '.join(others)}")
        if any(one in variables for one in _SECRETS):
            self.note(host, "passwords do not come along: keys log in, and sudo's is asked for by -K")
        if variables.get("ansible_become_method", "sudo") != "sudo":
            self.note(host, f"becomes root by {variables['ansible_become_method']}; only sudo is known")
        said = {
            "user": str(user or ""),
            "port": int(port) if port and str(port).isdigit() else None,
            "key": str(key or ""),
            "jump": jump,
            "become": "none" if user == "root" else "",
        }
        return {name: value for name, value in said.items() if value not in (None, "", [])}

    def _plain(self, host: str, *keys: str) -> Any:
        """The first of these variables; one that Ansible would still have to work out does not come along."""
        for key in keys:
            if (value := self.variables.get(host, {}).get(key)) in (None, ""):
                continue
            if "{{" in str(value):
                self.note(host, f"{key} is a template: {value}")
                continue
            return value
        return None


def _listed(source: Path) -> dict[str, Any]:
    """The inventory as `ansible-inventory --list` shows it."""
    if not source.exists():
        what = f"there is no inventory {source}"
        raise UsageError(what, code="no-such-file", fix="name the file or folder that -i of Ansible has")
    program = Path(sys.executable).parent / "ansible-inventory"
    with temporary_folder() as home:
        env = {k: v for k, v in os.environ.items() if not k.startswith("ANSIBLE_")}
        env |= {"ANSIBLE_HOME": str(home), "LC_ALL": "C.UTF-8", "ANSIBLE_NOCOLOR": "1"}
        env |= {"ANSIBLE_INVENTORY_UNPARSED_FAILED": "True", "ANSIBLE_DEPRECATION_WARNINGS": "False"}
        argv = [str(program), "-i", str(source), "--list"]
        try:
            done = run(argv, env=env, timeout_s=_TIMEOUT_S)
        except subprocess.TimeoutExpired as exc:
            endless = "Ansible does not come to an end with the inventory"
            raise UsageError(endless, code="inventory-timeout", where=str(source)) from exc
    try:
        found = json.loads(done.stdout)
    except ValueError:
        found = None
    if done.rc != 0 or not isinstance(found, dict):
        why = "\n".join(line for line in done.stderr.splitlines() if line.strip())[-1500:]
        what = "Ansible can't read the inventory"
        raise UsageError(what, code="inventory-unreadable", where=str(source), why=why, fix="correct it")
    return found


def _name(host: str) -> str:
    """An inventory's host in the spec: the first label, in lower case, where it is a domain name."""
    plain = host if re.fullmatch(r"[0-9.]+|.*:.*", host) else host.partition(".")[0]
    return re.sub(r"[^a-z0-9-]", "-", plain.lower()).strip("-")


def _jump(arguments: str) -> tuple[list[str], list[str]]:
    """The hosts that ssh's arguments jump through, and the arguments that say something else."""
    try:
        flags, others = getopt(shlex.split(arguments), _FLAGS)
    except (ValueError, GetoptError):
        return [], [arguments]
    ways = [(_hosts_on_the_way(flag, value), f"{flag} {value}".strip()) for flag, value in flags]
    jump = next((hosts for hosts, _ in ways if hosts), [])
    return jump, [*(word for hosts, word in ways if hosts is not jump or not hosts), *others]


def _hosts_on_the_way(flag: str, value: str) -> list[str]:
    """Those that one argument of ssh's names."""
    if flag == "-J":
        return value.split(",")
    if flag == "-o" and (match := _JUMP.match(value)):
        return match[1].split(",")
    if flag == "-o" and (match := _PROXY.match(value)):
        return [one for one in match[1].strip("\"' ").split() if not one.startswith("-")][:1]
    return []


def _label(text: str) -> str:
    """A name for a partition, or a cluster, out of a group's."""
    label = re.sub(r"[^a-z0-9-]+", "-", text.lower()).strip("-")[:_LONGEST_LABEL].strip("-")
    return label if re.match(r"[a-z]", label) else (f"p-{label}"[:_LONGEST_LABEL] if label else "")
