"""An Ansible inventory of the user's, read by Ansible itself, as a spec of those machines."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ClusterShell.NodeSet import NodeSet
from ruamel.yaml import YAML

from clusterctl.errors import Problem, SpecError, UsageError
from clusterctl.spec.load import parse_spec
from clusterctl.util.process import run, temporary_folder

_LEADERS: Final = ("controller", "slurmctld", "slurm_controller", "head", "headnode", "master", "manager")
_LOGINS: Final = ("login", "logins", "submit", "frontend")
_NO_GROUPS: Final = ("all", "ungrouped", "_meta")
_TIMEOUT_S: Final = 120
_JUMP: Final = re.compile(r"ProxyJump[= ](\S+)", re.IGNORECASE)
_PROXY: Final = re.compile(r"ProxyCommand[= ]\"?'?ssh\b.*-W\s+\S+(.*)", re.IGNORECASE)
_ARGUMENTS: Final = ("ansible_ssh_args", "ansible_ssh_common_args", "ansible_ssh_extra_args")
_VALUED: Final = tuple(f"-{letter}" for letter in "BbcDEeFIiJLlmOopQRSWw")  # ssh's flags that take a value
_SECRETS: Final = ("ansible_password", "ansible_ssh_pass", "ansible_become_password", "ansible_become_pass")
_SSH: Final = ("ssh", "smart", "paramiko", "paramiko_ssh")
_LOCAL: Final = "local"
_LONGEST_LABEL: Final = 20
_HOST_FIELD: Final = re.compile(r"provider\.(?:hosts\.(?P<host>[^.]+)|access)\.(?P<field>[a-z]+)\b.*")
_VARIABLES: Final[Mapping[str, str]] = {
    "address": "ansible_host",
    "user": "ansible_user",
    "port": "ansible_port",
    "key": "ansible_ssh_private_key_file",
    "jump": "ansible_ssh_common_args",
}
_HEAD: Final = """\
# A clusterctl spec, made of the Ansible inventory {source}.
# Check it with `clusterctl validate --live`; see docs/onprem.md for what else can be said.
"""

Variables = Mapping[str, Any]


@dataclass(slots=True)
class Imported:
    """The text of a spec, and what of the inventory did not come along."""

    text: str = ""
    notes: list[str] = field(default_factory=list)
    _of_hosts: dict[str, list[str]] = field(default_factory=dict)  # note -> the hosts that it is about

    def note(self, host: str, text: str) -> None:
        """Say something of a host, which may be true of others, too."""
        self._of_hosts.setdefault(text, []).append(_name(host))

    def fold(self) -> None:
        """Add what was said of hosts to the notes, each once."""
        self.notes += [f"{NodeSet.fromlist(hosts)}: {text}" for text, hosts in self._of_hosts.items()]


def spec_of_inventory(source: Path) -> Imported:
    """The spec that an inventory comes to: groups become partitions.

    Raises:
        UsageError: Ansible can't read it, or no spec can be made of it.
    """
    said = _listed(source)
    found = Imported()
    variables: dict[str, Variables] = said.get("_meta", {}).get("hostvars", {})
    every = _hosts(said, variables, source, found)
    groups = {
        name: hosts
        for name, one in said.items()
        if name not in _NO_GROUPS and (hosts := [host for host in one.get("hosts", ()) if host in every])
    }
    names = _names(every, source)
    leader = next((h for group in _LEADERS for h in groups.get(group, ())), every[0])
    logins = [host for group in _LOGINS for host in groups.get(group, ())]
    if not any(group in groups for group in _LEADERS):
        found.notes.append(f"no group is called controller: {names[leader]} leads")
    partitions = dict(_partitions(groups, every, leader, logins, found))
    document = {
        "version": 1,
        "name": _label(source.stem) or "cluster",
        "provider": {
            "type": "onprem",
            "controller": names[leader],
            **({"login": [names[host] for host in dict.fromkeys(logins)]} if logins else {}),
            **_machines(every, names, variables, found),
        },
        "partitions": [
            {"name": name, "hosts": str(NodeSet.fromlist([names[host] for host in hosts]))}
            for name, hosts in partitions.items()
        ],
    }
    found.text = _HEAD.format(source=source.name) + _yaml(document)
    try:
        parse_spec(found.text, "")
    except SpecError as exc:
        why = "\n       ".join(map(_wrong, exc.problems))
        raise UsageError("no spec can be made of it", where=str(source), why=why, fix="correct it") from exc
    found.fold()
    return found


def _wrong(problem: Problem) -> str:
    """A problem of the spec, which nobody sees, where the inventory has it."""
    place = problem.key
    if (match := _HOST_FIELD.fullmatch(place)) and match["field"] in _VARIABLES:
        place = f"{match['host'] or 'all hosts'}: {_VARIABLES[match['field']]}"
    return f"{place}: {problem.message}" + (f" ({problem.hint})" if problem.hint else "")


def _listed(source: Path) -> dict[str, Any]:
    """The inventory as `ansible-inventory --list` shows it."""
    if not source.exists():
        raise UsageError(
            f"there is no inventory {source}", fix="name the file or folder that -i of Ansible has"
        )
    program = Path(sys.executable).parent / "ansible-inventory"
    with temporary_folder() as home:
        env = {k: v for k, v in os.environ.items() if not k.startswith("ANSIBLE_")}
        env |= {"ANSIBLE_HOME": str(home), "LC_ALL": "C.UTF-8", "ANSIBLE_NOCOLOR": "1"}
        env |= {"ANSIBLE_INVENTORY_UNPARSED_FAILED": "True", "ANSIBLE_DEPRECATION_WARNINGS": "False"}
        argv = [str(program), "-i", str(source), "--list"]
        try:
            done = run(argv, env=env, timeout_s=_TIMEOUT_S)
        except subprocess.TimeoutExpired as exc:
            raise UsageError("Ansible does not come to an end with the inventory", where=str(source)) from exc
    try:
        found = json.loads(done.stdout)
    except ValueError:
        found = None
    if done.rc != 0 or not isinstance(found, dict):
        why = "\n".join(line for line in done.stderr.splitlines() if line.strip())[-1500:]
        raise UsageError("Ansible can't read the inventory", where=str(source), why=why, fix="correct it")
    return found


def _hosts(
    said: Mapping[str, Any], variables: Mapping[str, Variables], source: Path, found: Imported
) -> tuple[str, ...]:
    """The inventory's hosts that SSH leads to, and this machine."""
    groups = [one.get("hosts", ()) for name, one in said.items() if name not in _NO_GROUPS]
    named = dict.fromkeys(
        host for hosts in (*groups, said.get("ungrouped", {}).get("hosts", ())) for host in hosts
    )
    if not named:
        raise UsageError(
            "the inventory names no hosts", where=str(source), fix="see `ansible-inventory --list`"
        )
    ways = {host: _connection(host, variables, found) for host in named}
    others = {host: way for host, way in ways.items() if way not in (*_SSH, _LOCAL)}
    if len(others) == len(named):
        why = f"ansible_connection is {', '.join(dict.fromkeys(others.values()))}"
        raise UsageError(
            "SSH leads to no host of the inventory", where=str(source), why=why, fix="name such hosts"
        )
    for host, way in others.items():
        found.note(host, f"is left out: ansible_connection is {way}, not ssh")
    return tuple(host for host in named if host not in others)


def _connection(host: str, variables: Mapping[str, Variables], found: Imported) -> str:
    """What Ansible reaches a host by."""
    said = _plain(host, variables.get(host, {}), found, "ansible_connection") or "ssh"
    return str(said).removeprefix("ansible.builtin.").removeprefix("ansible.legacy.")


def _name(host: str) -> str:
    """An inventory's host in the spec: the first label, in lower case, where it is a domain name."""
    plain = host if re.fullmatch(r"[0-9.]+|.*:.*", host) else host.partition(".")[0]
    return re.sub(r"[^a-z0-9-]", "-", plain.lower()).strip("-")


def _names(hosts: Sequence[str], source: Path) -> Mapping[str, str]:
    """Inventory's host -> its name in the spec."""
    found = {host: _name(host) for host in hosts}
    twice = [name for name, count in Counter(found.values()).items() if count > 1]
    if twice:
        raise UsageError(
            f"hosts of one name: {', '.join(twice)}", where=str(source), fix="give them names that differ"
        )
    return found


def _partitions(
    groups: Mapping[str, list[str]],
    every: Sequence[str],
    leader: str,
    logins: Sequence[str],
    found: Imported,
) -> Iterator[tuple[str, list[str]]]:
    """Every other group of hosts; a host of several belongs to the first."""
    placed: set[str] = set()
    for group, hosts in groups.items():
        if group in (*_LEADERS, *_LOGINS):
            continue
        mine = [host for host in hosts if host not in placed]
        if left := [host for host in hosts if host in placed]:
            found.notes.append(f"group {group}: {', '.join(left)} stayed in another partition")
        if mine:
            placed.update(mine)
            yield _label(group), mine
    if not placed:
        rest = [host for host in every if host != leader and host not in logins]
        yield "train", rest or [leader]


def _machines(
    every: Sequence[str], names: Mapping[str, str], variables: Mapping[str, Variables], found: Imported
) -> dict[str, Any]:
    """`access` with what most hosts have in common, and `hosts` with the rest."""
    here = [host for host in every if _connection(host, variables, Imported()) == _LOCAL]
    alone = here == list(every)
    said = {h: {} if alone else _access(h, variables.get(h, {}), found) for h in every}
    common: dict[str, Any] = {}
    for key in ("user", "port", "key", "jump", "become"):
        (value, count), *_ = Counter(json.dumps(one.get(key)) for one in said.values()).most_common()
        if value != "null" and count == len(every):
            common[key] = json.loads(value)
    hosts = {}
    for host in every:
        own = {key: value for key, value in said[host].items() if common.get(key) != value}
        address = variables.get(host, {}).get("ansible_host") or (host if host != names[host] else None)
        if host in here and alone:
            address = "localhost"
        elif host in here:
            found.note(host, "is this machine: the others need its address on their network")
        hosts[names[host]] = {**({"address": str(address)} if address else {}), **own}
    return {**({"access": common} if common else {}), "hosts": hosts}


def _access(host: str, variables: Variables, found: Imported) -> dict[str, Any]:
    """How Ansible reaches a host, in the words of the spec."""
    user = _plain(host, variables, found, "ansible_user", "ansible_ssh_user")
    port = _plain(host, variables, found, "ansible_port", "ansible_ssh_port")
    key = _plain(host, variables, found, "ansible_ssh_private_key_file", "ansible_private_key_file")
    said = (_plain(host, variables, found, name) for name in _ARGUMENTS)
    jump, others = _jump(" ".join(str(one) for one in said if one))
    if others:
        found.note(host, f"arguments of ssh do not come along: {' '.join(others)}")
    if any(one in variables for one in _SECRETS):
        found.note(host, "passwords do not come along: keys log in, and sudo's is asked for by -K")
    if variables.get("ansible_become_method", "sudo") != "sudo":
        found.note(host, f"becomes root by {variables['ansible_become_method']}; only sudo is known")
    return {
        **({"user": str(user)} if user else {}),
        **({"port": int(port)} if port and str(port).isdigit() else {}),
        **({"key": str(key)} if key else {}),
        **({"jump": jump} if jump else {}),
        **({"become": "none"} if user == "root" else {}),
    }


def _plain(host: str, variables: Variables, found: Imported, *keys: str) -> Any:
    """The first of these variables; one that Ansible would still have to work out does not come along."""
    for key in keys:
        if (value := variables.get(key)) in (None, ""):
            continue
        if "{{" in str(value):
            found.note(host, f"{key} is a template: {value}")
            continue
        return value
    return None


def _jump(arguments: str) -> tuple[list[str], list[str]]:
    """The hosts that ssh's arguments jump through, and the arguments that say something else."""
    try:
        words = iter(shlex.split(arguments))
    except ValueError:
        words = iter(arguments.split())
    jump: list[str] = []
    others: list[str] = []
    for word in words:
        flag, value = word[:2], word[2:]
        if flag in _VALUED and not value:
            value = next(words, "")
            word = f"{word} {value}"  # noqa: PLW2901
        found = _hosts_on_the_way(flag, value)
        if found and not jump:
            jump = found
        else:
            others.append(word)
    return jump, others


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


def _yaml(document: Mapping[str, Any]) -> str:
    yaml = YAML()
    yaml.indent(mapping=2, sequence=4, offset=2)
    yaml.width = 110
    stream = io.StringIO()
    yaml.dump(document, stream)
    return stream.getvalue()
