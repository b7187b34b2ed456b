"""What a spec can't ask for without a scheduler: one finding each, in its place."""

from __future__ import annotations

import pytest

from clusterctl.errors import SpecError
from clusterctl.spec.load import differences, dump_spec, parse_spec
from clusterctl.spec.providers.gcp import image_error

BASE = """\
version: 1
name: demo
scheduler: none
provider: {type: local}
partitions:
  - {name: train, nodes: 2}
"""
ONPREM = """\
version: 1
name: demo
scheduler: none
provider:
  type: onprem
  controller: one
  shared: {kind: none}
  hosts: {one: {address: 10.0.0.1}, two: {address: 10.0.0.2}}
partitions:
  - {name: train, hosts: NODES}
"""


def problems(text: str) -> list[tuple[str, str]]:
    with pytest.raises(SpecError) as caught:
        parse_spec(text, "c.yaml")
    return [(problem.key, problem.code) for problem in caught.value.problems]


def test_scheduler_is_slurm_by_default() -> None:
    assert parse_spec(BASE.replace("scheduler: none\n", ""), "c.yaml").has_slurm
    assert not parse_spec(BASE, "c.yaml").has_slurm


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ("slurm: {qos: [{name: urgent}]}\n", "slurm.qos"),
        ("slurm: {extra: [KillWait=9]}\n", "slurm.extra"),
        ("users: [{name: ada, uid: 2000, accounts: [lab]}]\n", "users[0].accounts"),
    ],
)
def test_setting_of_slurm_without_slurm_is_refused_once(more: str, key: str) -> None:
    assert problems(BASE + more) == [(key, "not-here")]
    parse_spec((BASE + more).replace("scheduler: none", "scheduler: slurm"), "c.yaml")


def test_default_account_without_slurm_is_accepted() -> None:
    parse_spec(BASE + "users: [{name: ada, uid: 2000, accounts: [default]}]\n", "c.yaml")


def test_hosts_without_slurm_need_a_shared_folder_unless_single() -> None:
    (found,) = problems(ONPREM.replace("NODES", "two"))
    assert found[0] == "provider.shared.kind"
    alone = ONPREM.replace("NODES", "one").replace(", two: {address: 10.0.0.2}", "")
    assert not parse_spec(alone, "c.yaml").has_slurm


LOCAL = BASE.replace("scheduler: none\n", "")
OWN = ONPREM.replace("scheduler: none\n", "").replace("NODES", "two")
GCP = LOCAL.replace("type: local", "type: gcp, project: my-project, zone: us-central1-a")


TEN = "controller: {IMAGE}, partitions: {train: {IMAGE}}, zone: us".replace(
    "IMAGE", "image: {project: rocky-linux-cloud, family: rocky-linux-10-optimized-gcp}"
)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (GCP.replace("zone: us", TEN), [("software.nvidia.toolkit", "cuda-toolkit")]),
        (GCP, []),
        (OWN, []),  # their distribution is unknown until `up` probes them
    ],
)
def test_toolkit_older_than_the_repository_is_refused(
    text: str, found: list[tuple[str, str]]
) -> None:
    more = 'software: {nvidia: {toolkit: "12.9"}}\n'
    if found:
        assert problems(text + more) == found
    else:
        parse_spec(text + more, "c.yaml")
    parse_spec(text + more.replace("12.9", "13.0"), "c.yaml")


URL = "{from: 'https://repo.example.org/el9', key: 'https://repo.example.org/KEY'}"


@pytest.mark.parametrize("source", ["openhpc", "{from: openhpc}", URL])
def test_rocky_linux_may_have_slurm_from_elsewhere(source: str) -> None:
    """The former spelling, without `from`, is accepted, and recorded as the present one."""
    more = f"software: {{slurm: {source}}}\n"
    for text in (GCP, OWN):
        spec = parse_spec(text + more, "c.yaml")
        assert parse_spec(dump_spec(spec), "dump.yaml") == spec
        assert "from: " in dump_spec(spec)
        assert differences(parse_spec(text, "c.yaml"), spec)[0].key == "software.slurm.from"
    debian = TEN.replace("rocky-linux-cloud", "debian-cloud").replace(
        "rocky-linux-10-optimized-gcp", "debian-12"
    )
    assert problems(GCP.replace("zone: us", debian) + more) == [
        ("software.slurm.from", "slurm-source")
    ]


def test_image_of_unknown_distribution_has_only_its_own_slurm() -> None:
    image = "image: {project: our-images, name: hpc-7}"
    text = GCP.replace(
        "zone: us", f"controller: {{{image}}}, partitions: {{train: {{{image}}}}}, zone: us"
    )
    refused = image_error(parse_spec(f"{text}software: {{slurm: {{from: openhpc}}}}\n", "c.yaml"))
    assert refused is not None
    assert refused.about == "image-unknown"
    assert refused.where == "software.slurm"
    assert image_error(parse_spec(text, "c.yaml")) is None
