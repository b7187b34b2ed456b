"""The active firewall of a host."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from clusterctl.hosts.probe import PROGRAM, HostFacts, ProbeRequest, parse_report
from tests.support.plays import program
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
