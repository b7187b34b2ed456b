"""Which findings end an `up` before anything is begun."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.hosts.checks import DoctorReport, Finding, Level
from clusterctl.hosts.probe import HostFacts
from clusterctl.providers.onprem.members import members
from clusterctl.providers.onprem.provider import in_the_way
from clusterctl.spec.load import parse_spec
from clusterctl.spec.onprem import OnpremSettings
from clusterctl.state.workspace import Workspace

SPEC = """\
version: 1
name: demo
provider: {type: onprem, controller: a, hosts: {a: 10.0.0.1, b: 10.0.0.2}}
partitions: [{name: train, hosts: b}]
"""


@pytest.mark.parametrize(
    ("finding", "new", "ends"),
    [
        (("error", "port-taken"), ["b"], True),
        (("error", "port-taken"), [], False),  # of a host that is in the cluster already
        (("error", "firewall"), ["a"], True),  # it keeps the new one out
        (("error", "firewall"), [], False),  # nothing changes: the jobs show who gets through
        (("warning", "firewall"), ["b"], False),
        (("error", "release-differs"), [], True),  # no cluster can be made of them
        (("error", "address"), [], True),
        (("error", "slurm-release"), [], True),  # the spec asks for another one, while the cluster is up
    ],
)
def test_errors_of_new_hosts_end_it_and_any_firewall_that_they_meet(
    tmp_path: Path, finding: tuple[Level, str], new: list[str], ends: bool
) -> None:
    spec = parse_spec(SPEC, "cluster.yaml")
    assert isinstance(spec.provider, OnpremSettings)
    facts = dict.fromkeys(("a", "b"), HostFacts.model_construct(texts={}))
    report = DoctorReport((Finding("b", *finding, "what", "why", "fix"),), facts)
    asked = members(spec, spec.provider)
    assert bool(in_the_way(report, asked, new, Workspace(tmp_path), {})) == ends
