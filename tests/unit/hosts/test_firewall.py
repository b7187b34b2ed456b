"""Which firewall a host has in force, told by the true programs' words, and when that is in the way."""

from __future__ import annotations

import os
import subprocess
from ipaddress import IPv4Network
from pathlib import Path

import pytest

from clusterctl.hosts.checks import Examined, Finding, check_hosts
from clusterctl.hosts.expected import Expected
from clusterctl.hosts.firewall import Firewall, firewall_of
from clusterctl.hosts.probe import PROGRAM, HostFacts, ProbeRequest, parse_report
from tests.support.plays import program
from tests.unit.hosts.test_doctor import NOTHING

CAPTURES = Path(__file__).parent / "captures"
UFW, SAVED = CAPTURES / "ufw-0.36.2-status-verbose.txt", CAPTURES / "iptables-1.8.9-save.txt"
RULESET, OF_IPTABLES = CAPTURES / "nft-1.0.6-ruleset.json", CAPTURES / "nft-1.0.6-of-iptables.json"
# Says what a file says, where it is asked as it should be.
SAYS = '[ "$*" = "{asked}" ] || exit 9; {more}cat {file}'
ADDRESSES = """\
[{"ifname": "lo", "addr_info": [{"local": "127.0.0.1", "prefixlen": 8}]},
 {"ifname": "eth0", "addr_info": [{"local": "10.0.0.5", "prefixlen": 8}]},
 {"ifname": "eth1", "addr_info": [{"local": "10.7.0.1", "prefixlen": 24}]}]"""
AT_ETH0 = IPv4Network("10.0.0.0/8")
ROUTED = "192.168.5.1"  # at no interface
NETWORK = "10.9.0.0/16"


def looked(tmp_path: Path, *, firewalld: str = "", **said: Path) -> HostFacts:
    """What a host says whose firewalls' commands say this; firewalld is running, enabled or not there."""
    (tmp_path / "addresses").write_text(ADDRESSES)
    rcs = {"running": (0, 0), "enabled": (3, 0), "": (4, 1)}[firewalld]
    units = "".join(
        f'[ "$*" = "{verb} --quiet firewalld" ] && exit {rc}\n'
        for verb, rc in zip(("is-active", "is-enabled"), rcs, strict=True)
    )
    program(tmp_path, "systemctl", f"{units}exit 9")
    program(tmp_path, "firewall-cmd", '[ "$*" = --get-default-zone ] && echo public')
    asked = {
        "ufw": "status verbose",
        "iptables_save": "",
        "nft": "-j list ruleset",
        "ip": "-json -4 address show",
    }
    for name, file in {**said, "ip": tmp_path / "addresses"}.items():
        more = '[ "$LC_ALL" = C ] || exit 9; ' if name == "ufw" else ""
        script = SAYS.format(asked=asked[name], more=more, file=file)
        program(tmp_path, name.replace("_", "-"), script)
    env = {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "LC_ALL": "de_DE.UTF-8"}
    argv = ProbeRequest(host=NOTHING, node=False).argv()
    done = subprocess.run(argv, input=PROGRAM, env=env, capture_output=True, check=True)
    facts = parse_report(done.stdout.decode()).host
    assert facts is not None
    return facts


def lets(firewall: Firewall) -> dict[str, str]:
    """Of what is at an interface other than loopback."""
    return {
        f"{chain.by} {chain.name}".strip(): " ".join(str(n) for n in chain.lets if n.subnet_of(AT_ETH0))
        for chain in firewall.closed
    }


def findings(facts: HostFacts, *others: str) -> list[Finding]:
    """What is found of such a host, but for what is true of the machine that the test is on."""
    there = Expected("10.7.0.1", {}, {}, {"/": 0}, others=tuple(map(IPv4Network, others)))
    found = check_hosts({"a": Examined(facts, 0.0)}, {"a": there}, leader="a")
    return [finding for finding in found if finding.code == "firewall"]


def test_where_no_firewall_is_in_force_nothing_is_said(tmp_path: Path) -> None:
    facts = looked(tmp_path)
    assert str(firewall_of(facts)) == "none"
    assert findings(facts, NETWORK) == []


def test_firewalld_is_shown_with_its_zone_and_left_to_the_role(tmp_path: Path) -> None:
    facts = looked(tmp_path, firewalld="running", nft=RULESET)
    assert str(firewall_of(facts)) == "firewalld (public)"
    assert findings(facts, NETWORK) == []


def test_a_firewalld_that_starts_with_the_next_boot_is_named(tmp_path: Path) -> None:
    facts = looked(tmp_path, firewalld="enabled")
    (finding,) = findings(facts, NETWORK)
    assert (finding.level, finding.what) == ("warning", "firewalld is enabled but stopped")
    assert "systemctl start firewalld" in finding.fix
    assert findings(facts) == [], "nobody else is in the cluster"


def test_who_may_go_to_any_port_through_ufw(tmp_path: Path) -> None:
    facts = looked(tmp_path, ufw=UFW, iptables_save=SAVED)
    assert firewall_of(facts).as_dict() == {"name": "ufw", "zone": "", "closed": ["ufw"]}
    assert lets(firewall_of(facts)) == {"ufw": "10.7.0.0/24 10.9.0.1/32 10.9.1.0/24 10.9.2.0/24"}
    assert findings(facts, "10.9.0.1", "10.9.1.7", "10.7.0.2", ROUTED) == []
    (finding,) = findings(facts, "10.9.0.1", "10.9.3.1", "10.9.5.0/24")
    assert (finding.level, finding.host) == ("error", "a")  # the role firewall would end the `up`
    assert "10.9.3.1, 10.9.5.0/24" in finding.why
    assert finding.fix == "`sudo ufw allow from 10.9.3.1 && sudo ufw allow from 10.9.5.0/24`"


@pytest.mark.parametrize(
    ("changed", "to", "shown"),
    [
        ("Status: active", "Status: inactive", "none"),
        ("Default: deny", "Default: allow", "ufw"),
    ],
)
def test_a_ufw_that_refuses_nothing_keeps_nobody_out(
    tmp_path: Path, changed: str, to: str, shown: str
) -> None:
    said = tmp_path / "said"
    said.write_text(UFW.read_text().replace(changed, to))
    facts = looked(tmp_path, ufw=said)
    assert firewall_of(facts) == Firewall(shown)


def test_who_may_go_to_any_port_through_nftables(tmp_path: Path) -> None:
    facts = looked(tmp_path, nft=RULESET)
    assert firewall_of(facts).name == "nftables"
    assert lets(firewall_of(facts)) == {
        "nftables inet filter input": "10.7.0.0/24 10.9.0.1/32 10.9.0.2/32 10.9.0.8/30 10.9.1.0/24 "
        "10.9.2.1/32 10.9.2.2/31 10.9.2.4/31 10.9.2.6/32 10.9.3.0/24",
        "nftables inet late in": NETWORK,
    }
    assert not firewall_of(facts).closed[0].keeps_out([IPv4Network("192.0.2.1"), IPv4Network(ROUTED)])
    assert findings(facts, "10.9.1.1", "10.9.3.1") == []
    (finding,) = findings(facts, "10.9.1.1", "10.9.8.1", "10.9.8.2")
    assert (finding.level, finding.what) == ("warning", "a firewall keeps the cluster's hosts out")
    assert "`inet filter input` drops" in finding.why
    assert "`sudo nft insert rule inet filter input ip saddr { 10.9.8.1, 10.9.8.2 } accept`" in finding.fix


def test_who_may_go_to_any_port_through_iptables(tmp_path: Path) -> None:
    facts = looked(tmp_path, iptables_save=SAVED, nft=OF_IPTABLES)
    assert lets(firewall_of(facts)) == {"iptables INPUT": "10.7.0.0/24 10.9.0.0/24 10.9.3.1/32"}
    assert findings(facts, "10.9.0.9", ROUTED) == []
    (finding,) = findings(facts, "10.66.0.1", "10.67.0.1", "10.9.0.9")
    assert "`sudo iptables -I INPUT -s 10.66.0.1,10.67.0.1 -j ACCEPT`" in finding.fix


def test_a_mask_that_is_no_prefix_lets_nobody_in_for_sure(tmp_path: Path) -> None:
    said = tmp_path / "said"
    said.write_text(SAVED.read_text().replace("10.9.0.0/24", "10.9.0.0/255.0.255.0"))
    assert lets(firewall_of(looked(tmp_path, iptables_save=said))) == {
        "iptables INPUT": "10.7.0.0/24 10.9.3.1/32"
    }


def ufw_with(rules: str) -> str:
    """A ufw with these rules alone."""
    head, line, _ = UFW.read_text().partition("--                         ------      ----\n")
    return head + line + rules


def nft_with(*statements: str) -> str:
    """An nftables whose input drops what no rule of these matches lets in; each is a rule's own."""
    there = '"family": "inet", "table": "t", "chain": "in"'
    rules = [f'{{"rule": {{{there}, "expr": [{one}, {{"accept": null}}]}}}}' for one in statements]
    chain = '{"chain": {"family": "inet", "table": "t", "name": "in", "hook": "input", "policy": "drop"}}'
    return f'{{"nftables": [{", ".join([chain, *rules])}]}}'


def match(left: str, right: str) -> str:
    return f'{{"match": {{"op": "==", "left": {left}, "right": {right}}}}}'


SADDR, DADDR = (f'{{"payload": {{"protocol": "ip", "field": "{one}addr"}}}}' for one in "sd")
DAYS = match('{"meta": {"key": "day"}}', '{"range": ["Monday", "Friday"]}')


@pytest.mark.parametrize(
    ("kind", "said", "inside", "outside"),
    [
        ("ufw", "10.7.0.1                   ALLOW IN    10.9.0.0/24\n", "10.9.0.7", "10.9.1.7"),
        ("ufw", "10.7.0.0/24/tcp            ALLOW IN    10.9.0.0/24/tcp\n", "10.9.0.7", "10.9.1.7"),
        ("ufw", "10.7.0.1 on eth1           ALLOW IN    Anywhere\n", ROUTED, "10.9.1.7"),
        ("ufw", "10.6.0.1                   ALLOW IN    10.9.0.0/24\n", "", "10.9.0.7"),  # not its own
        ("ufw", "Anywhere on lo             ALLOW IN    Anywhere\n", "", ROUTED),
        ("ufw", "Anywhere on bond0          ALLOW IN    Anywhere\n", "", ROUTED),  # there is none
        (
            "ufw",
            "Anywhere                   ALLOW IN    10.9.0.0/25\n"
            "Anywhere                   ALLOW IN    10.9.0.128/25              # the other half\n",
            "10.9.0.0/24",
            "10.9.0.0/23",
        ),
        (
            "ufw",
            "Anywhere                   ALLOW IN    10.9.0.0/24                (log) # ours\n"
            "Anywhere                   ALLOW IN    10.9.1.0/24                (log-all)\n",
            "10.9.0.0/23",
            "10.9.2.1",
        ),
        ("iptables_save", "-A INPUT -d 10.7.0.1/32 -s 10.9.0.0/24 -j ACCEPT\n", "10.9.0.7", "10.9.1.7"),
        ("iptables_save", "-A INPUT -d 10.6.0.1/32 -s 10.9.0.0/24 -j ACCEPT\n", "", "10.9.0.7"),
        ("iptables_save", "-A INPUT -d 127.0.0.1/32 -j ACCEPT\n", "", "10.9.0.7"),
        ("iptables_save", "-A INPUT -i eth+ -j ACCEPT\n", "10.9.0.7", "127.0.0.1"),
        ("nft", nft_with(match(DADDR, '"10.7.0.1"') + ", " + match(SADDR, '"10.9.0.7"')), "10.9.0.7", ROUTED),
        ("nft", nft_with(match(SADDR, '"10.9.0.7"'), DAYS), "10.9.0.7", ROUTED),
    ],
)
def test_a_rule_lets_in_whom_it_names_or_who_comes_by_its_interface(
    tmp_path: Path, kind: str, said: str, inside: str, outside: str
) -> None:
    said = {"ufw": ufw_with(said), "iptables_save": f"*filter\n:INPUT DROP [0:0]\n{said}COMMIT\n"}.get(
        kind, said
    )
    (tmp_path / "said").write_text(said)
    (chain,) = firewall_of(looked(tmp_path, **{kind: tmp_path / "said"})).closed
    assert chain.keeps_out([IPv4Network(one) for one in (inside, outside) if one]) == (IPv4Network(outside),)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("nft", "# Warning: a table of another's\n"),
        ("nft", '{"nftables": [{"rule": {"table": "t"}}]}'),
        ("iptables_save", "*filter\n:INPUT DROP [0:0]\n-A INPUT -m string --string \"it's\nCOMMIT\n"),
    ],
)
def test_words_that_are_not_understood_stop_nothing(tmp_path: Path, kind: str, said: str) -> None:
    (tmp_path / "said").write_text(said)
    assert firewall_of(looked(tmp_path, **{kind: tmp_path / "said"})) == Firewall("none")


@pytest.mark.parametrize(
    ("policy", "rejects", "closed"), [("DROP", False, 1), ("ACCEPT", True, 1), ("ACCEPT", False, 0)]
)
def test_iptables_refuses_by_its_policy_or_by_its_last_rule(
    tmp_path: Path, policy: str, rejects: bool, closed: int
) -> None:
    text = SAVED.read_text().replace(":INPUT DROP", f":INPUT {policy}")
    said = tmp_path / "said"
    said.write_text("".join(line for line in text.splitlines(True) if rejects or "REJECT" not in line))
    assert len(firewall_of(looked(tmp_path, iptables_save=said)).closed) == closed
