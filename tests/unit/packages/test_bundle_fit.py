"""Bundles of another format, version, spec or distribution are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.errors import BundleError
from clusterctl.packages.bundle import (
    FORMAT,
    Manifest,
    mismatches,
    open_bundle,
    reject_defects,
    write_bundle,
)
from clusterctl.packages.os_packages import asked_packages, package_names
from clusterctl.packages.project_files import content_hash
from clusterctl.packages.repository import RepositoryRequest
from clusterctl.spec.distributions import distribution_of
from clusterctl.spec.load import load_spec
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.software import Software
from clusterctl.util.assets import digest, gpu_lock
from tests.support.messages import refused
from tests.unit.packages.bundles import RELEASE, SPEC, a_bundle, system

GPUS = SPEC.replace("hosts: a}", "hosts: a, gpus: {type: t4, count: 1}}")
ASKING = f"{SPEC}software: {{python: {{requirements: requirements.txt}}}}\n"
CUPY = {"gpu": ("numpy-2.0-py3-none-any.whl",), "gpu_base": digest(gpu_lock().read_bytes())}
MUNGELESS = tuple(name for name in package_names(distribution_of(RELEASE)) if name != "munge")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "requirements.txt").write_text("attrs\n")
    return tmp_path


def spec_of(folder: Path, text: str) -> ClusterSpec:
    (folder / "cluster.yaml").write_text(text)
    return load_spec(folder / "cluster.yaml")


def mismatches_of(path: Path, spec: ClusterSpec | None, *releases: str) -> list[tuple[str, str]]:
    """Return (what does not match, why) of each mismatch."""
    found = mismatches(open_bundle(path), spec, releases)
    return [
        (what.rpartition(" ")[2], why)
        for what, why in (finding.cause.split(": ", 1) for finding in found)
    ]


@pytest.mark.parametrize(
    ("text", "made"),
    [(SPEC, {}), (GPUS, CUPY), (f"{GPUS}software: {{cupy: false}}\n", {}), (ASKING, {})],
)
def test_mismatches_of_a_matching_bundle_is_empty(
    folder: Path, text: str, made: dict[str, object]
) -> None:
    if text == ASKING:
        made = {"requirements": content_hash((folder / "requirements.txt",))}
    path = a_bundle(folder / "b.tar", systems={RELEASE: system(**made)})
    assert mismatches_of(path, spec_of(folder, text), RELEASE) == []


@pytest.mark.parametrize(
    ("text", "made", "fault"),
    [
        (SPEC, {"clusterctl": "0.0.1"}, ("clusterctl", "0.0.1")),
        (SPEC, {"architecture": "aarch64"}, ("architecture", "aarch64")),
        (SPEC, {"asked": MUNGELESS}, (RELEASE, "the bundle lacks the packages munge")),
        (SPEC, {"base": "0" * 16}, (RELEASE, "job environment")),
        (GPUS, {}, (RELEASE, "no CuPy")),
        (GPUS, CUPY | {"gpu_base": "0" * 16}, (RELEASE, "another version of clusterctl")),
        (ASKING, {}, (RELEASE, "created without requirements")),
        (ASKING, {"requirements": "0" * 16}, (RELEASE, "created for other requirements")),
    ],
)
def test_mismatches_names_what_differs(
    folder: Path, text: str, made: dict[str, object], fault: tuple[str, str]
) -> None:
    path = a_bundle(folder / "b.tar", systems={RELEASE: system(**made)}, **made)
    ((what, why),) = mismatches_of(path, spec_of(folder, text))
    assert what == fault[0]
    assert fault[1] in why
    with refused("bundle-mismatch", BundleError, exit_code=2):
        reject_defects(path, mismatches(open_bundle(path), spec_of(folder, text)))


def test_mismatches_names_a_missing_distribution(folder: Path) -> None:
    path = a_bundle(folder / "b.tar")
    ((what, why),) = mismatches_of(path, spec_of(folder, SPEC), "rocky-9")
    assert (what, RELEASE in why) == ("rocky-9", True)


@pytest.mark.parametrize(
    ("release", "software", "lacks"),
    [
        ("rocky-9", "slurm: {from: openhpc}", ["slurm-ohpc", "slurm-slurmd-ohpc"]),
        ("rocky-9", "apptainer: true", ["apptainer"]),
        (RELEASE, "apptainer: true", ["apptainer_1.3.6_amd64.deb"]),
    ],
)
def test_mismatches_names_missing_optional_packages(
    folder: Path, release: str, software: str, lacks: list[str]
) -> None:
    spec = spec_of(folder, SPEC)
    asking = spec_of(folder, f"{SPEC}software: {{{software}}}\n")
    of = distribution_of(release)
    plain, full = (system(asked=asked_packages(of, one.software)) for one in (spec, asking))
    path = a_bundle(folder / "b.tar", systems={release: plain})
    assert mismatches_of(path, spec) == []
    ((where, why),) = mismatches_of(path, asking)
    assert where == release
    assert all(name in why for name in lacks)
    assert mismatches_of(a_bundle(path, systems={release: full}), asking) == []
    assert mismatches_of(path, None) == []


def test_repository_request_has_the_slurm_repository_of_the_spec(folder: Path) -> None:
    slurm = {"from": "https://repo.example.org/el9", "key": "https://repo.example.org/KEY"}
    software = Software.model_validate({"slurm": slurm})
    request = RepositoryRequest(distribution_of("rocky-9"), folder, print, software=software)
    assert request.read_sources()[-1] == {
        "keys": [slurm["key"]],
        "repositories": {"slurm": slurm["from"]},
        "priority": 10,
    }
    plain = RepositoryRequest(distribution_of("rocky-9"), folder, print)
    assert plain.read_sources() == request.read_sources()[:-1]


def test_open_bundle_refuses_another_format_and_ignores_new_fields(folder: Path) -> None:
    path = a_bundle(folder / "b.tar")
    manifest = open_bundle(path).manifest
    assert Manifest.model_validate(manifest.model_dump() | {"later": 1}) == manifest
    with refused("bundle-format"):
        open_bundle(a_bundle(folder / "later.tar", format=FORMAT + 1))


def test_invalid_manifest_raises_with_location(tmp_path: Path) -> None:
    manifest = Manifest.model_construct(
        format=FORMAT, clusterctl="0.1.0", cluster="demo", systems={}
    )
    with refused("not-a-bundle") as caught:
        write_bundle(tmp_path / "b.tar", manifest, {})
    assert "architecture" in caught.value.why
    assert not [*tmp_path.iterdir()]
