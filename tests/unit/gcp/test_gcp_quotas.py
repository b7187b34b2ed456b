"""The quotas that new hosts need, and the findings on quotas that are too small."""

from __future__ import annotations

import pytest

from clusterctl.hosts.checks import Finding
from clusterctl.providers.gcp.api import Api
from clusterctl.providers.gcp.preflight import preflight
from clusterctl.spec.load import parse_spec
from clusterctl.util.progress import Clock
from tests.support.google.api import PROJECT, Google

SPEC = """\
version: 1
name: demo
provider: {{type: gcp, project: {project}, zone: us-central1-a, partitions: {{train: {nodes}}}}}
partitions: [{{name: train, nodes: 2{more}}}]
software: {{nvidia: {{driver: open}}}}
"""
L4 = ", gpus: {type: l4}"
PREEMPTIBLE = "PREEMPTIBLE_NVIDIA_L4_GPUS"
STANDARD = "NVIDIA_L4_GPUS"


def spec_text(nodes: str = "{}", more: str = L4) -> str:
    return SPEC.format(project=PROJECT, nodes=nodes, more=more)


def found(google: Google, text: str, **limits: float | None) -> dict[str, Finding]:
    """Metric -> finding of the quotas. ``limits``: metric -> limit. None: Google does not list it."""
    for metric, limit in limits.items():
        google.project.quotas[metric] = None if limit is None else (limit, 0.0)
    api = Api(PROJECT, clock=Clock(sleep=lambda _: None))
    findings = preflight(parse_spec(text, "cluster.yaml"), None, (), api=api)
    assert {finding.code for finding in findings} <= {"quota"}
    return {finding.what.split()[2]: finding for finding in findings}


@pytest.mark.parametrize("model", ["spot: true", "flex_start: 1d"])
@pytest.mark.parametrize(
    ("limits", "short"),
    [
        ((8, 0), {}),
        ((1, 8), {PREEMPTIBLE: "error"}),
        ((0, 8), {}),
        ((None, 8), {}),
        ((0, 1), {STANDARD: "error"}),
        ((None, 1), {STANDARD: "error"}),
        ((None, None), {"GPUS_PER_GPU_FAMILY": "warning"}),
    ],
)
def test_spot_and_flex_start_count_on_the_preemptible_quota_if_google_has_granted_it(
    google: Google,
    model: str,
    limits: tuple[float | None, float | None],
    short: dict[str, str],
) -> None:
    text = spec_text(f"{{{model}}}")
    findings = found(google, text, **{PREEMPTIBLE: limits[0], STANDARD: limits[1]})
    assert {metric: one.level for metric, one in findings.items()} == short
    if STANDARD in short:
        assert PREEMPTIBLE in findings[STANDARD].why


def test_standard_machines_never_count_on_the_preemptible_quota(google: Google) -> None:
    assert [*found(google, spec_text(), **{PREEMPTIBLE: 8, STANDARD: 1})] == [STANDARD]


def test_spot_and_standard_machines_share_the_standard_quota(google: Google) -> None:
    """Each partition alone would fit."""
    text = spec_text("{spot: true}").replace(
        "partitions: [", "partitions: [{name: more, nodes: 2, gpus: {type: l4}}, "
    )
    assert [*found(google, text, **{PREEMPTIBLE: 0, STANDARD: 3})] == [STANDARD]
    assert "needs 4" in found(google, text)[STANDARD].why


@pytest.mark.parametrize(
    ("granted", "standard", "short"),
    [(0, 20, ""), (0, 4, "CPUS"), (4, 4, "PREEMPTIBLE_CPUS"), (20, 4, "")],
)
def test_spot_processors_count_like_spot_gpus(
    google: Google, granted: float, standard: float, short: str
) -> None:
    """Of 2 nodes with 4 processors; the controller has 4, and is never a spot machine."""
    text = spec_text("{spot: true, machine_type: n1-standard-4}", "")
    findings = found(google, text, PREEMPTIBLE_CPUS=granted, CPUS=standard)
    assert [*findings] == ([short] if short else [])


def test_gpus_of_new_families_are_counted_by_family(google: Google) -> None:
    """Two a3-highgpu-8g."""
    ((metric, one),) = found(google, spec_text("{}", ", gpus: {type: h100, count: 8}")).items()
    assert (metric, one.level) == ("GPUS_PER_GPU_FAMILY", "warning")
    assert "--quota-id=GPUS-PER-GPU-FAMILY-per-project-region" in one.fix
    assert "--preferred-value=16 --dimensions=region=us-central1,gpu_family=NVIDIA_H100`" in one.fix


@pytest.mark.parametrize(
    ("more", "limit", "level"),
    [
        (L4, 12, ""),
        (L4, 8, "warning"),
        # Fewer than the controller has.
        (L4, 3, "error"),
        (", gpus: {type: t4}", 8, "error"),
        ("", 8, "error"),
    ],
)
def test_processors_of_machines_with_gpus_of_their_own_are_only_a_warning(
    google: Google, more: str, limit: float, level: str
) -> None:
    """Three hosts with 4 processors each."""
    findings = found(google, spec_text("{}", more), CPUS_ALL_REGIONS=limit)
    assert [finding.level for finding in findings.values()] == ([level] if level else [])


def test_a100_machines_need_no_quota_of_processors(google: Google) -> None:
    assert found(google, spec_text("{}", ", gpus: {type: a100}"), A2_CPUS=0) == {}


def test_processors_of_new_families_are_counted_by_family(google: Google) -> None:
    ((metric, one),) = found(google, spec_text("{machine_type: c4-standard-8}", "")).items()
    assert (metric, one.level) == ("CPUS_PER_VM_FAMILY", "warning")
    assert "--preferred-value=16 --dimensions=region=us-central1,vm_family=C4`" in one.fix


def test_quota_that_others_exceed_already_does_not_matter(google: Google) -> None:
    google.project.quotas["N2_CPUS"] = (0.0, 8.0)
    assert found(google, spec_text()) == {}
