"""`up` with a bundle needs no package index, and records the bundle."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

import pytest

from clusterctl.packages.bundle import (
    WHEELS_LOCK,
    cluster_bundle,
    missing_bundle,
    use_bundle,
)
from clusterctl.packages.node_platform import NodePlatform
from clusterctl.packages.project_files import PackageList, content_hash
from clusterctl.packages.resolution import Requirements, resolve
from clusterctl.packages.wheelhouse import Pip, Wheel, wheel_path, wheelhouse
from clusterctl.spec.distributions import distribution_of
from clusterctl.spec.load import load_spec
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.software import Software
from clusterctl.state.workspace import Workspace
from clusterctl.util.assets import digest, gpu_lock, job_lock
from tests.support.messages import refused
from tests.unit.packages.bundles import FILES, RELEASE, SPEC, a_bundle, damage, system

ATTRS = b"a wheel of attrs"
NODE = NodePlatform.of(distribution_of(RELEASE))
WHEEL = Wheel.of("attrs-25.1-py3-none-any.whl", hashlib.sha256(ATTRS).hexdigest())


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """A workspace and a wheel cache of the test's own, without a package index."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    workspace = Workspace(tmp_path / "home" / "demo")
    workspace.create()
    return workspace


@pytest.fixture
def spec(tmp_path: Path) -> ClusterSpec:
    (tmp_path / "requirements.txt").write_text("attrs\n")
    asking = "software: {python: {requirements: requirements.txt}}\n"
    (tmp_path / "cluster.yaml").write_text(SPEC + asking)
    return load_spec(tmp_path / "cluster.yaml")


@pytest.fixture
def path(tmp_path: Path, spec: ClusterSpec) -> Path:
    """A bundle for the spec, as `bundle create` writes it."""
    requirements_file = spec.software.python.requirements
    assert requirements_file is not None
    files = {
        **FILES,
        WHEELS_LOCK.format(RELEASE): f"{WHEEL}\n".encode(),
        f"wheels/{WHEEL.file}": ATTRS,
    }
    return a_bundle(
        tmp_path / "b.tar",
        files,
        systems={RELEASE: system(requirements=content_hash((requirements_file,)))},
    )


def test_use_bundle_takes_wheels_from_the_bundle(
    workspace: Workspace, spec: ClusterSpec, path: Path
) -> None:
    use_bundle(path, spec, workspace)
    assert [wheel.name for wheel in wheelhouse(job_lock(), NODE).iterdir()] == [
        "numpy-2.0-py3-none-any.whl"
    ]
    requirements_file = spec.software.python.requirements
    assert requirements_file is not None
    lists = (PackageList.read(requirements_file, NODE),)
    lock = resolve(Requirements(lists, job_lock(), node=NODE, gpus=False), Pip(NODE))
    assert lock.wheels == (WHEEL,)
    assert wheel_path(WHEEL).read_bytes() == ATTRS


def test_use_bundle_unpacks_wheels_in_the_cache(
    tmp_path: Path,
    workspace: Workspace,
    spec: ClusterSpec,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Wheels have many gigabytes, and a file system of temporary files may be too small for them."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "not there"))
    use_bundle(path, spec, workspace)
    assert wheel_path(WHEEL).read_bytes() == ATTRS


def test_use_bundle_takes_cupy_from_the_bundle(
    tmp_path: Path, workspace: Workspace, spec: ClusterSpec
) -> None:
    plain = spec.model_copy(update={"software": Software()})
    files = {**FILES, "wheels/cupy-14-py3-none-any.whl": b"cupy"}
    having = system(gpu=("cupy-14-py3-none-any.whl",), gpu_base=digest(gpu_lock().read_bytes()))
    use_bundle(
        a_bundle(tmp_path / "c.tar", files, systems={RELEASE: having}),
        plain,
        workspace,
    )
    assert [wheel.name for wheel in wheelhouse(gpu_lock(), NODE).iterdir()] == [
        "cupy-14-py3-none-any.whl"
    ]


def test_use_bundle_checks_a_changed_bundle_again(
    workspace: Workspace, spec: ClusterSpec, path: Path
) -> None:
    use_bundle(path, spec, workspace)
    known = cluster_bundle(workspace)
    assert known is not None
    assert known.file == path
    assert str(path) in str(missing_bundle(workspace))
    damage(path)
    with refused("bundle-corrupted"):
        use_bundle(path, spec, workspace)
    assert cluster_bundle(workspace) == known


def test_use_bundle_does_not_record_a_damaged_bundle(
    workspace: Workspace, spec: ClusterSpec, path: Path
) -> None:
    damage(path)
    with refused("bundle-corrupted"):
        use_bundle(path, spec, workspace)
    assert cluster_bundle(workspace) is None
    assert not (Path(os.environ["XDG_CACHE_HOME"]) / "clusterctl").exists()
    workspace.bundle.write_text("{")
    assert cluster_bundle(workspace) is None
