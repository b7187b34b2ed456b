"""Tables and lists of the pages for administrators equal those in the code."""

from __future__ import annotations

import re

from clusterctl.cli.agent_tools import TOOLS
from clusterctl.spec.distributions import releases
from clusterctl.spec.job_options import OPTIONS
from tests.support.plays import role_data
from tests.support.processes import ROOT

CODE = re.compile(r"`([^`]+)`")


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def column(name: str, head: str) -> list[str]:
    """Return the first column of the table whose head begins so."""
    table = page(name).partition(f"\n| {head} |")[2].partition("\n\n")[0]
    return [line.split(" | ")[0].strip("| ") for line in table.splitlines()[2:]]


def test_page_of_configuration_has_each_role() -> None:
    listed = CODE.findall(" ".join(column("configuration.md", "role")))
    assert sorted(listed) == sorted(role.name for role in (ROOT / "ansible/roles").iterdir())


def test_page_of_the_network_has_the_ports_that_the_firewall_role_opens() -> None:
    opened = {
        port.replace("/tcp", "").replace("/udp", " (UDP)")
        for ports in role_data("firewall").values()
        for port in ports
    }
    assert {
        port for cell in column("onprem-network.md", "port") for port in cell.split(", ")
    } == opened


def test_page_of_distributions_has_their_slurm_and_python() -> None:
    text = page("distributions.md")
    for each in releases():
        (row,) = re.findall(rf"^\| {each.title}(?:,.*?)? \| (.*) \|$", text, re.MULTILINE)[:1]
        slurm, _, python = row.split(" | ")
        assert slurm.startswith(each.slurm or "")
        assert python.startswith(each.python_version)


def test_page_of_agents_has_each_tool() -> None:
    listed = CODE.findall(" ".join(column("agents.md", "tools")))
    assert sorted(listed) == sorted(verb.replace(" ", "_") for verb in TOOLS)
    refused = page("agents.md").partition("neither are ")[2].partition(".\n")[0]
    options = {flag.strip("-").replace("-", "_") for flag in CODE.findall(refused)}
    assert len(options) > 4
    assert not options & {*TOOLS["submit"], *TOOLS["down"], *TOOLS["wait"]}


def test_page_without_a_scheduler_has_each_option_that_needs_slurm() -> None:
    listed = page("no-scheduler.md").partition("**Rejected options**: ")[2].partition("; also")[0]
    flags = [flag.removesuffix("TIME").removesuffix("...") for flag in CODE.findall(listed)]
    assert sorted(flags) == sorted(one.flag for one in OPTIONS.values() if one.needs_slurm)


def test_pages_for_contributors_name_targets_of_make() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for name in ("AGENTS.md", "CONTRIBUTING.md", "docs/architecture.md"):
        targets = re.findall(r"`make ([a-z-]+)", (ROOT / name).read_text())
        assert [target for target in targets if f"\n{target}:" not in makefile] == []
