#!/usr/bin/python
"""Ansible module: lets firewalld open ports of this host for all hosts of a cluster, regardless of
zones.

The module writes a policy and an ipset, each to a file of its own, and changes no settings of the
user. The files take effect with a reload, which drops runtime settings that are not permanent. If
there are such settings, the module changes nothing and lists the settings.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: firewalld_policy
short_description: Let other hosts reach ports of this host through firewalld
description:
  - Writes an ipset and a policy, and reloads firewalld if they are not in effect.
  - Fails and changes nothing if a reload would drop runtime rules that are not permanent.
options:
  name:
    description: Name of the policy and of the ipset.
    type: str
    required: true
  addresses:
    description: IPv4 addresses that may reach the ports.
    type: list
    elements: str
    required: true
  ports:
    description: Ports or ranges of ports with their protocol, such as C(6817/tcp) and C(61000-64999/tcp).
    type: list
    elements: str
    required: true
  folder:
    description: Folder of firewalld's configuration.
    type: path
    default: /etc/firewalld
"""

# A setting, such as "zone public: services" -> its words or rules.
Sections = dict[str, frozenset[str]]

COMMAND = "firewall-cmd"
SHOWN = 5
# NetworkManager, libvirt and Docker assign interfaces to zones, and a reload keeps that.
KEPT_BY_A_RELOAD = frozenset({"interfaces"})


def ipset_xml(addresses: list[str]) -> str:
    """Return firewalld's XML file for an ipset of these addresses. Raise ValueError unless all are
    IPv4.
    """
    root = ElementTree.Element("ipset", {"type": "hash:ip"})
    ElementTree.SubElement(root, "short").text = "Hosts of this cluster (clusterctl)"
    for address in sorted(set(map(ipaddress.IPv4Address, addresses))):
        ElementTree.SubElement(root, "entry").text = str(address)
    return as_text(root)


def policy_xml(name: str, ports: list[str]) -> str:
    """Return firewalld's XML file for a policy that opens the ports for all addresses in ipset
    ``name``.
    """
    root = ElementTree.Element("policy", {"priority": "-1", "target": "CONTINUE"})
    ElementTree.SubElement(root, "short").text = "Slurm, MPI and the shared folder (clusterctl)"
    ElementTree.SubElement(root, "ingress-zone", {"name": "ANY"})
    ElementTree.SubElement(root, "egress-zone", {"name": "HOST"})
    for port in ports:
        number, _, protocol = port.partition("/")
        rule = ElementTree.SubElement(root, "rule", {"family": "ipv4"})
        ElementTree.SubElement(rule, "source", {"ipset": name})
        ElementTree.SubElement(rule, "port", {"port": number, "protocol": protocol})
        ElementTree.SubElement(rule, "accept")
    return as_text(root)


def as_text(root: ElementTree.Element) -> str:
    ElementTree.indent(root)
    return (
        '<?xml version="1.0" encoding="utf-8"?>\n'
        + ElementTree.tostring(root, encoding="unicode")
        + "\n"
    )


def sections(kind: str, text: str) -> Sections:
    """Parse the output of ``firewall-cmd --list-all-...``. kind: "zone" or "policy".

    Settings that a reload of firewalld does not change are left out.
    """
    words_by_key: dict[str, set[str]] = {}
    name = ""
    key = ""
    for line in text.splitlines():
        if line and not line[0].isspace():
            name = line.split()[0]
            key = ""
        elif line.startswith("\t"):
            words_by_key[key].add(line.strip())
        elif match := re.match(r"  (\S[^:]*): ?(.*)$", line):
            key = f"{kind} {name}: {match[1]}"
            words = match[2].split() if match[1] not in KEPT_BY_A_RELOAD else []
            words_by_key[key] = set(words)
    return {key: frozenset(words) for key, words in words_by_key.items()}


def differences(running: Sections, permanent: Sections) -> Iterator[str]:
    """Yield a text about each setting that a reload of firewalld would drop, or activate."""
    for key in sorted({*running, *permanent}):
        now = running.get(key, frozenset())
        then = permanent.get(key, frozenset())
        yield from (f"{key} {word} (not permanent)" for word in sorted(now - then))
        yield from (f"{key} {word} (not in force)" for word in sorted(then - now))


class Firewalld:
    """The firewalld daemon, through firewall-cmd."""

    def __init__(self, module: AnsibleModule) -> None:
        self._module = module

    def run_command(self, *words: str, check: bool = True) -> str:
        _, stdout, _ = self._module.run_command([COMMAND, *words], check_rc=check)
        return str(stdout)

    def read_settings(self, *, permanent: bool, exclude: str) -> Sections:
        """Return firewalld's runtime or permanent settings, without the policy and ipset
        ``exclude``.
        """
        options = ("--permanent",) if permanent else ()
        settings = sections("zone", self.run_command(*options, "--list-all-zones"))
        settings |= sections("policy", self.run_command(*options, "--list-all-policies"))
        for kind in ("chains", "rules", "passthroughs"):
            lines = self.run_command(*options, "--direct", f"--get-all-{kind}").splitlines()
            settings[f"direct {kind}:"] = frozenset(line for line in lines if line.strip())
        for name in self.run_command(*options, "--get-ipsets").split():
            if name != exclude:
                settings[f"ipset {name}:"] = self.entries(name, *options)
        return {
            key: words
            for key, words in settings.items()
            if not key.startswith(f"policy {exclude}: ")
        }

    def entries(self, ipset: str, *options: str) -> frozenset[str]:
        """Return the addresses of an ipset; empty if it does not exist."""
        return frozenset(
            self.run_command(*options, f"--ipset={ipset}", "--get-entries", check=False).split()
        )

    def rules(self, policy: str, *options: str) -> frozenset[str]:
        """Return the rules of a policy; empty if it does not exist."""
        listed = self.run_command(*options, f"--policy={policy}", "--list-rich-rules", check=False)
        return frozenset(line.strip() for line in listed.splitlines() if line.strip())

    def has(self, name: str, addresses: list[str], ports: list[str]) -> bool:
        """Return whether policy and ipset ``name``, with these addresses and ports, are in
        effect.
        """
        rules = self.rules(name)
        numbers = [port.partition("/") for port in ports]
        has_all_ports = all(
            any(f'port="{number}" protocol="{protocol}"' in rule for rule in rules)
            for number, _, protocol in numbers
        )
        return (
            has_all_ports
            and len(rules) == len(ports)
            and self.entries(name) == frozenset(addresses)
        )


def reject_unsaved(module: AnsibleModule, firewalld: Firewalld, name: str) -> None:
    """Fail if a reload would change settings of the user: all except the policy and the ipset
    ``name``.
    """
    running = firewalld.read_settings(permanent=False, exclude=name)
    lost = list(differences(running, firewalld.read_settings(permanent=True, exclude=name)))
    if lost:
        more = f" and {len(lost) - SHOWN} more" if len(lost) > SHOWN else ""
        module.fail_json(
            msg="firewalld must be reloaded to open the cluster's ports, but a reload would "
            f"change other settings: {'; '.join(lost[:SHOWN])}{more}\nfix: keep the runtime "
            "settings with `firewall-cmd --runtime-to-permanent`, or drop them with "
            "`firewall-cmd --reload`; then run `clusterctl up` again"
        )


def write(module: AnsibleModule, path: Path, text: str) -> None:
    """Write a file atomically, with the default SELinux label of its path."""
    path.parent.mkdir(mode=0o750, exist_ok=True)
    fresh = Path(module.tmpdir) / path.name
    fresh.write_text(text, encoding="utf-8")
    module.atomic_move(str(fresh), str(path))
    module.set_mode_if_different(str(path), "0644", changed=True)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "addresses": {"type": "list", "elements": "str", "required": True},
            "ports": {"type": "list", "elements": "str", "required": True},
            "folder": {"type": "path", "default": "/etc/firewalld"},
        },
        supports_check_mode=True,
    )
    name = module.params["name"]
    ports = module.params["ports"]
    folder = Path(module.params["folder"])
    try:
        ipset = ipset_xml(module.params["addresses"])
    except ValueError as exc:
        module.fail_json(msg=f"firewalld needs the hosts' IPv4 addresses: {exc}")
    texts = {
        folder / "ipsets" / f"{name}.xml": ipset,
        folder / "policies" / f"{name}.xml": policy_xml(name, ports),
    }
    before = {path: path.read_text(encoding="utf-8") if path.exists() else "" for path in texts}
    firewalld = Firewalld(module)
    changed = before != texts
    reload = changed or not firewalld.has(name, module.params["addresses"], ports)
    if reload:
        reject_unsaved(module, firewalld, name)
    if reload and not module.check_mode:
        for path, text in texts.items():
            write(module, path, text)
        firewalld.run_command("--check-config")
        firewalld.run_command("--reload")
    diff = [
        {
            "before": before[path],
            "after": text,
            "before_header": str(path),
            "after_header": str(path),
        }
        for path, text in texts.items()
        if before[path] != text
    ]
    module.exit_json(changed=reload, files=[str(path) for path in texts], diff=diff)


if __name__ == "__main__":
    main()
