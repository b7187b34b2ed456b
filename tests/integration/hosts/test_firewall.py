"""The active firewall of a host, and findings on ports that it closes."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from clusterctl.hosts.checks import Finding
from clusterctl.hosts.pairs import Peer, examine_ports
from clusterctl.hosts.probe import PROGRAM, Firewall, HostFacts, ProbeRequest, parse_report
from clusterctl.transport.base import Conversation
from tests.support.plays import program
from tests.support.scripted import ScriptedTransport, Step
from tests.unit.hosts.test_doctor import NOTHING

UFW = "Status: active\n\nTo                         Action      From\n"
SAVED = "*filter\n:INPUT ACCEPT [0:0]\n{}\nCOMMIT\n"
RULESET = "table inet filter {{\n}}\n"
ASKED = {"ufw": "status", "iptables-save": "", "nft": "list ruleset"}


def looked(tmp_path: Path, *, firewalld: str = "", **commands: str) -> HostFacts:
    """Return the facts of a host whose firewall commands print this. firewalld: its state."""
    program(
        tmp_path,
        "systemctl",
        f'[ "$*" = "is-active --quiet firewalld" ] && exit {0 if firewalld else 4}; exit 9',
    )
    program(tmp_path, "firewall-cmd", '[ "$*" = --get-default-zone ] && echo public')
    for name, asked in ASKED.items():
        (tmp_path / name).write_text(commands.get(name.replace("-", "_"), ""))
        more = '[ "$LC_ALL" = C ] || exit 9; ' if name == "ufw" else ""
        program(tmp_path, name, f'[ "$*" = "{asked}" ] || exit 9; {more}cat {tmp_path / name}')
    env = {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "LC_ALL": "de_DE.UTF-8"}
    argv = ProbeRequest(host=NOTHING, node=False).argv()
    done = subprocess.run(argv, input=PROGRAM, env=env, capture_output=True, check=True)
    facts = parse_report(done.stdout.decode()).host
    assert facts is not None
    return facts


@pytest.mark.parametrize(
    ("commands", "name"),
    [
        ({}, "none"),
        ({"firewalld": "running", "nft": RULESET}, "firewalld (public)"),
        ({"ufw": UFW, "iptables_save": SAVED.format("-A INPUT -j ufw-before-input")}, "ufw"),
        ({"ufw": UFW.replace("active", "inactive")}, "none"),
        ({"iptables_save": SAVED.format("-A INPUT -j REJECT"), "nft": RULESET}, "iptables"),
        ({"iptables_save": SAVED.format(":FORWARD DROP [0:0]")}, "iptables"),
        ({"iptables_save": SAVED.format("")}, "none"),
        ({"nft": RULESET}, "nftables"),
    ],
)
def test_active_firewall_is_the_first_with_rules(
    tmp_path: Path, commands: dict[str, Any], name: str
) -> None:
    assert str(looked(tmp_path, **commands).firewall) == name


PEERS = {f"n{one}": Peer(f"10.0.0.{one}", (6817, 6819)) for one in (1, 2, 3)}


def findings(*, firewalls: dict[str, str], unreached: dict[str, Any]) -> list[Finding]:
    """Return the findings of three hosts. unreached: host -> the hosts and ports that it can't
    reach.
    """

    def start(host: str, _: Sequence[str]) -> AbstractContextManager[Conversation]:
        commands = f"[40000]\n{json.dumps(unreached.get(host, {}))}\n"
        return ScriptedTransport([Step(("python3",), commands)]).converse(["python3"])

    facts = {
        name: HostFacts.model_construct(firewall=Firewall(name=firewalls.get(name, "none")))
        for name in PEERS
    }
    # Which is away.
    members = {name: peer.address for name, peer in PEERS.items()} | {"n4": "10.0.0.4"}
    return list(examine_ports(PEERS, members, facts, start))


DROPPED = {"6817": "no answer within 2 s", "6819": "no answer within 2 s"}


@pytest.mark.parametrize(
    ("firewall", "command"),
    [
        ("ufw", "`for host in 10.0.0.2 10.0.0.3 10.0.0.4; do sudo ufw allow from $host; done`"),
        ("iptables", "`sudo iptables -I INPUT -s 10.0.0.2,10.0.0.3,10.0.0.4 -j ACCEPT`"),
        (
            "nftables",
            (
                "`sudo nft insert rule inet filter input ip saddr { 10.0.0.2,10.0.0.3,10.0.0.4 "
                "} accept`"
            ),
        ),
        ("firewalld", "`clusterctl up`"),
    ],
)
def test_closed_port_finding_has_the_command_that_opens_it(firewall: str, command: str) -> None:
    unreached = {"n2": {"n1": DROPPED}, "n3": {"n1": DROPPED}}
    (one,) = findings(firewalls={"n1": firewall}, unreached=unreached)
    assert (one.host, one.level, one.code) == ("n1", "error", "firewall")
    assert one.why == (
        "n2, n3 can't reach 10.0.0.1, port 6817, 6819: no answer within 2 s; "
        f"the firewall in force on n1 is {firewall}"
    )
    assert one.fix.startswith(command)
    assert "`traceroute -T -p 6817 10.0.0.1` on n2" in one.fix


def test_closed_port_without_firewall_names_the_route() -> None:
    (one,) = findings(firewalls={"n3": "nftables"}, unreached={"n3": {"n1": DROPPED}})
    assert (one.host, one.level, one.code) == ("n1", "error", "network")
    assert one.why.endswith("none, on n3 nftables")
    assert one.fix.startswith("`traceroute -T -p 6817 10.0.0.1` on n3")


def test_findings_are_grouped_by_cause_and_port() -> None:
    mixed = {"6817": "no answer within 2 s", "40000": "No route to host"}
    found = findings(firewalls={}, unreached={"n2": {"n1": DROPPED, "n3": mixed}})
    assert [(finding.host, finding.why.partition("; ")[0]) for finding in found] == [
        ("n1", "n2 can't reach 10.0.0.1, port 6817, 6819: no answer within 2 s"),
        ("n3", "n2 can't reach 10.0.0.3, port 6817: no answer within 2 s"),
        ("n3", "n2 can't reach 10.0.0.3, port 40000: No route to host"),
    ]


def test_hosts_that_reach_each_other_have_no_findings() -> None:
    assert findings(firewalls={"n1": "ufw"}, unreached={}) == []
