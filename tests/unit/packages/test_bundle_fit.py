"""A bundle of another format, version, spec or distribution is refused, and says which."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.errors import BundleError
from clusterctl.packages.bundle import Manifest, open_bundle
from clusterctl.packages.bundle_checks import mismatches, reject_defects
from clusterctl.packages.os_packages import asked_packages
from clusterctl.packages.wheelhouse import content_hash
from clusterctl.spec.distributions import distribution_of
from clusterctl.spec.load import load_spec
from clusterctl.spec.models import ClusterSpec
from clusterctl.util.assets import digest, gpu_lock
from tests.unit.packages.bundles import FILES, RELEASE, a_bundle, a_bundle_with_requirements, manifest, system

SPEC = """\
version: 1
name: demo
provider: {type: onprem, controller: a, hosts: {a: 10.0.0.1}}
partitions: [{name: train, hosts: a}]
"""


@pytest.fixture
def spec(tmp_path: Path) -> ClusterSpec:
    (tmp_path / "plain.yaml").write_text(SPEC)
    return load_spec(tmp_path / "plain.yaml")


@pytest.fixture
def asking(tmp_path: Path) -> ClusterSpec:
    """A spec with requirements."""
    (tmp_path / "requirements.txt").write_text("attrs\n")
    (tmp_path / "asking.yaml").write_text(SPEC + "software: {python: {requirements: requirements.txt}}\n")
    return load_spec(tmp_path / "asking.yaml")


def said(path: Path, spec: ClusterSpec | None, *releases: str) -> list[tuple[str, str]]:
    return [(one.what, one.why) for one in mismatches(open_bundle(path), spec, releases)]


def test_the_one_that_was_made_for_it_fits(tmp_path: Path, spec: ClusterSpec) -> None:
    assert said(a_bundle(tmp_path / "b.tar"), spec, RELEASE) == []


def test_another_format_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = a_bundle(tmp_path / "b.tar", format=7, clusterctl="9.1")
    with pytest.raises(BundleError, match="has format 7, this clusterctl reads format 1") as caught:
        open_bundle(path)
    assert "9.1" in caught.value.why


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("clusterctl", "0.0.1", "clusterctl"),
        ("payload", "0" * 16, "payload.tar"),
        ("architecture", "aarch64", "architecture"),
    ],
)
def test_another_clusterctl_is_named(
    tmp_path: Path, spec: ClusterSpec, field: str, value: str, what: str
) -> None:
    ((found, why),) = said(a_bundle(tmp_path / "b.tar", **{field: value}), spec)
    assert found == what
    assert value in why or what == "payload.tar"


def test_a_distribution_that_is_not_in_it_is_named(tmp_path: Path, spec: ClusterSpec) -> None:
    path = a_bundle(tmp_path / "b.tar")
    assert said(path, spec, "rocky-9") == [
        ("rocky-9", "the bundle has no packages for it, only for debian-12")
    ]


def test_a_package_that_the_roles_ask_for_and_it_lacks_is_named(tmp_path: Path, spec: ClusterSpec) -> None:
    asked = [name for name in system().asked if name != "munge"]
    path = a_bundle(tmp_path / "b.tar", systems={RELEASE: system(asked=asked)})
    assert said(path, spec) == [(RELEASE, "lacks the packages munge")]


def test_wheels_of_another_job_environment_are_named(tmp_path: Path, spec: ClusterSpec) -> None:
    path = a_bundle(tmp_path / "b.tar", systems={RELEASE: system(base="0" * 16)})
    ((what, why),) = said(path, spec)
    assert (what, "job environment" in why) == (RELEASE, True)


def test_a_spec_with_gpus_wants_cupy_unless_it_says_otherwise(tmp_path: Path) -> None:
    text = SPEC.replace("hosts: a}", "hosts: a, gpus: {type: t4, count: 1}}")
    (tmp_path / "gpus.yaml").write_text(text)
    (tmp_path / "without.yaml").write_text(f"{text}software: {{cupy: false}}\n")
    gpus, without = load_spec(tmp_path / "gpus.yaml"), load_spec(tmp_path / "without.yaml")
    lacking = a_bundle(tmp_path / "b.tar")
    assert said(lacking, gpus) == [(RELEASE, "the spec has GPUs, and the bundle has no CuPy for them")]
    assert said(lacking, without) == []
    having = {"gpu": ("numpy-2.0-py3-none-any.whl",), "gpu_base": digest(gpu_lock().read_bytes())}
    assert said(a_bundle(tmp_path / "c.tar", systems={RELEASE: system(**having)}), gpus) == []
    having["gpu_base"] = "0" * 16
    ((_, why),) = said(a_bundle(tmp_path / "d.tar", systems={RELEASE: system(**having)}), gpus)
    assert "from another version of clusterctl" in why


def test_requirements_must_be_those_that_it_was_made_for(tmp_path: Path, asking: ClusterSpec) -> None:
    requirements = asking.software.python.requirements
    assert requirements is not None
    ((_, why),) = said(a_bundle(tmp_path / "b.tar"), asking)
    assert "made for none" in why
    path = a_bundle_with_requirements(tmp_path / "c.tar", "", content_hash((requirements,)))
    assert said(path, asking) == []
    requirements.write_text("attrs>=24\n")
    ((_, why),) = said(path, asking)
    assert "made for other ones" in why


@pytest.mark.parametrize(
    ("release", "software", "lacks"),
    [
        ("rocky-9", "slurm: openhpc", ["slurm-ohpc", "slurm-slurmd-ohpc"]),
        ("rocky-9", "apptainer: true", ["apptainer"]),
        (RELEASE, "apptainer: true", ["apptainer_1.3.6_amd64.deb"]),
    ],
)
def test_what_only_some_specs_ask_for_must_be_in_it_for_these(
    tmp_path: Path, spec: ClusterSpec, release: str, software: str, lacks: list[str]
) -> None:
    plain = system(asked=asked_packages(distribution_of(release), spec.software))
    path = a_bundle(tmp_path / "b.tar", systems={release: plain})
    assert said(path, spec) == []
    (tmp_path / "more.yaml").write_text(f"{SPEC}software: {{{software}}}\n")
    asking = load_spec(tmp_path / "more.yaml")
    ((where, why),) = said(path, asking)
    assert where == release
    assert all(name in why for name in lacks)
    full = system(asked=asked_packages(distribution_of(release), asking.software))
    assert said(a_bundle(tmp_path / "c.tar", systems={release: full}), asking) == []
    assert said(tmp_path / "c.tar", None) == []


def test_only_misfits_are_told_as_such(tmp_path: Path, spec: ClusterSpec) -> None:
    path = a_bundle(tmp_path / "b.tar", clusterctl="0.0.1")
    with pytest.raises(BundleError, match="does not match") as caught:
        reject_defects(path, mismatches(open_bundle(path), spec))
    assert "bundle create" in caught.value.fix


@pytest.mark.parametrize(
    "path",
    [
        "../x",
        "/etc/passwd",
        "a/../b",
        "a//b",
        "-x",
        ".hidden",
        "a/.b",
        "a b",
        "a\nb",
        "a/",
        "",
        "a\\b",
        "x" * 300,
    ],
)
def test_no_path_leads_out_of_a_bundle(path: str) -> None:
    raw = manifest().model_dump(mode="json")
    raw["files"][0]["path"] = path
    with pytest.raises(ValueError, match=r"path|characters"):
        Manifest.model_validate(raw)


@pytest.mark.parametrize(
    "change", [{"size": -1}, {"size": 300 << 30}, {"sha256": "x"}, {"path": "manifest.json"}]
)
def test_sizes_and_hashes_are_bounded(change: dict[str, object]) -> None:
    raw = manifest().model_dump(mode="json")
    raw["files"][0] |= change
    with pytest.raises(ValueError, match=r"files|twice|GiB"):
        Manifest.model_validate(raw)


def test_a_manifest_that_makes_no_sense_is_an_error_with_its_place(tmp_path: Path) -> None:
    raw = manifest().text.replace(f'"{"payload.tar"}"', '"../../payload.tar"').encode()
    with pytest.raises(BundleError, match="not a bundle") as caught:
        Manifest.read(raw, "b.tar")
    assert "files.1" in caught.value.why


def test_what_a_later_version_adds_is_passed_over() -> None:
    raw = manifest().model_dump(mode="json") | {"later": 1}
    assert Manifest.model_validate(raw) == manifest()


def test_files_lie_sorted(tmp_path: Path) -> None:
    assert [entry.path for entry in manifest().files] == sorted(FILES)
