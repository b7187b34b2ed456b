#!/usr/bin/python
"""Ansible module: firewalld lets the hosts of a cluster reach some ports of this one, whatever their zone.

One policy and one set of addresses, each a file of its own: nothing of the user's is changed, and both are
gone when the files are. Such objects come into force by a reload, which drops what is in force but not
permanent: where there is such, nothing is done and it is named.
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
short_description: firewalld lets hosts reach ports of this one
description:
  - Writes an ipset and a policy, and reloads firewalld where they are not in force.
  - Fails, and changes nothing, where a reload would drop rules that are in force but not permanent.
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
    description: Where firewalld's own configuration lies.
    type: path
    default: /etc/firewalld
"""

Sections = dict[str, frozenset[str]]  # "zone public: services" -> its words or rules

COMMAND = "firewall-cmd"
SHOWN = 5
# NetworkManager, libvirt and Docker put interfaces into zones as they come, and a reload keeps them there.
KEPT_BY_A_RELOAD = frozenset({"interfaces"})


def ipset_xml(addresses: list[str]) -> str:
    """firewalld's file of the addresses. Raises ValueError for what is none."""
    root = ElementTree.Element("ipset", {"type": "hash:ip"})
    ElementTree.SubElement(root, "short").text = "Hosts of this cluster (clusterctl)"
    for address in sorted({ipaddress.IPv4Address(one) for one in addresses}):
        ElementTree.SubElement(root, "entry").text = str(address)
    return as_text(root)


def policy_xml(name: str, ports: list[str]) -> str:
    """firewalld's file of what those addresses may reach here, beside what they may already."""
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
    """The document as firewalld writes it."""
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def sections(kind: str, text: str) -> Sections:
    """What ``firewall-cmd --list-all-...`` printed, a section a setting, without what a reload keeps."""
    found: dict[str, set[str]] = {}
    name, key = "", ""
    for line in text.splitlines():
        if line and not line[0].isspace():
            name, key = line.split()[0], ""
        elif line.startswith("\t"):
            found[key].add(line.strip())
        elif match := re.match(r"  (\S[^:]*): ?(.*)$", line):
            key = f"{kind} {name}: {match[1]}"
            words = match[2].split() if match[1] not in KEPT_BY_A_RELOAD else []
            found[key] = set(words)
    return {key: frozenset(words) for key, words in found.items()}


def unsaved(running: Sections, permanent: Sections) -> Iterator[str]:
    """What is in force and would be gone after a reload, or the other way round, in words."""
    for key in sorted({*running, *permanent}):
        now, then = running.get(key, frozenset()), permanent.get(key, frozenset())
        yield from (f"{key} {word} (not permanent)" for word in sorted(now - then))
        yield from (f"{key} {word} (not in force)" for word in sorted(then - now))


class Firewalld:
    """The daemon, asked by its command."""

    def __init__(self, module: AnsibleModule) -> None:
        self._module = module

    def run_command(self, *words: str, check: bool = True) -> str:
        """Run firewall-cmd; its standard output."""
        _, stdout, _ = self._module.run_command([COMMAND, *words], check_rc=check)
        return str(stdout)

    def look(self, *, permanent: bool, without: str) -> Sections:
        """All that it does, or will do after a reload, but for what is ours."""
        where = ("--permanent",) if permanent else ()
        found = sections("zone", self.run_command(*where, "--list-all-zones"))
        found |= sections("policy", self.run_command(*where, "--list-all-policies"))
        for what in ("chains", "rules", "passthroughs"):
            lines = self.run_command(*where, "--direct", f"--get-all-{what}").splitlines()
            found[f"direct {what}:"] = frozenset(line for line in lines if line.strip())
        for name in self.run_command(*where, "--get-ipsets").split():
            if name != without:
                found[f"ipset {name}:"] = self.entries(name, *where)
        return {key: words for key, words in found.items() if not key.startswith(f"policy {without}: ")}

    def entries(self, ipset: str, *where: str) -> frozenset[str]:
        """The addresses of a set; none where there is no such set."""
        return frozenset(self.run_command(*where, f"--ipset={ipset}", "--get-entries", check=False).split())

    def rules(self, policy: str, *where: str) -> frozenset[str]:
        """The rules of a policy; none where there is no such policy."""
        listed = self.run_command(*where, f"--policy={policy}", "--list-rich-rules", check=False)
        return frozenset(line.strip() for line in listed.splitlines() if line.strip())

    def has(self, name: str, addresses: list[str], ports: list[str]) -> bool:
        """Whether the policy is in force as it is wanted."""
        rules = self.rules(name)
        numbers = [port.partition("/") for port in ports]
        wanted = all(
            any(f'port="{number}" protocol="{protocol}"' in rule for rule in rules)
            for number, _, protocol in numbers
        )
        return wanted and len(rules) == len(ports) and self.entries(name) == frozenset(addresses)


def refuse_unsaved(module: AnsibleModule, firewalld: Firewalld, name: str) -> None:
    """End the module where a reload would change what is not ours."""
    running = firewalld.look(permanent=False, without=name)
    lost = list(unsaved(running, firewalld.look(permanent=True, without=name)))
    if lost:
        more = f" and {len(lost) - SHOWN} more" if len(lost) > SHOWN else ""
        module.fail_json(
            msg="firewalld must be reloaded to open the cluster's ports, and that would change what is not "
            f"ours: {'; '.join(lost[:SHOWN])}{more}. Keep what is in force with `firewall-cmd "
            "--runtime-to-permanent`, or give it up with `firewall-cmd --reload`; then run `clusterctl up` "
            "again"
        )


def write(module: AnsibleModule, path: Path, text: str) -> None:
    """Put a file in place, whole, with the labels that belong there."""
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
    name, ports, folder = module.params["name"], module.params["ports"], Path(module.params["folder"])
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
        refuse_unsaved(module, firewalld, name)
    if reload and not module.check_mode:
        for path, text in texts.items():
            write(module, path, text)
        firewalld.run_command("--check-config")
        firewalld.run_command("--reload")
    diff = [
        {"before": before[path], "after": text, "before_header": str(path), "after_header": str(path)}
        for path, text in texts.items()
        if before[path] != text
    ]
    module.exit_json(changed=reload, files=[str(path) for path in texts], diff=diff)


if __name__ == "__main__":
    main()
