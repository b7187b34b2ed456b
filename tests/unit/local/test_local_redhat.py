"""Node images on a machine of the Red Hat family: they are built with dnf from its repositories."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clusterctl.errors import MachineError, UsageError
from clusterctl.providers.local import helper, image
from clusterctl.providers.local.provider import LocalProvider, image_keys
from clusterctl.spec import distributions
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.providers.local import LocalSettings
from tests.support.messages import refused as rejected

SPEC = ClusterSpec.model_validate(
    {"version": 1, "name": "d", "partitions": [{"name": "x", "nodes": 1}]}
)


@pytest.mark.parametrize(
    ("text", "release"),
    [
        ('NAME="Rocky Linux"\nID="rocky"\nVERSION_ID="9.6"\n', "rocky-9"),
        ('ID="almalinux"\nVERSION_ID="10.0"\n', "almalinux-10"),
        ('ID="rhel"\nVERSION_ID="9.4"\n', "rhel-9"),
        ('ID="rocky"\nVERSION_ID="8.10"\n', None),
        ("ID=debian\nVERSION_ID=12\n", None),
        ("ID=fedora\nVERSION_ID=41\n", None),
        ("", None),
    ],
)
def test_redhat_release_is_read_from_os_release(
    tmp_path: Path, text: str, release: str | None
) -> None:
    (tmp_path / "os-release").write_text(text)
    assert distributions.redhat_release(tmp_path / "os-release") == release


Release = Callable[[str | None], None]


@pytest.fixture
def machine_has(monkeypatch: pytest.MonkeyPatch) -> Release:
    """Let the local machine have this release of the Red Hat family. None: it has Debian."""
    return lambda release: monkeypatch.setattr(distributions, "redhat_release", lambda: release)


def test_image_keys_differ_for_each_release(machine_has: Release) -> None:
    keys = set()
    for release, distribution in (
        (None, "debian-13"),
        ("rocky-9", "rocky-9"),
        ("rocky-10", "rocky-10"),
    ):
        machine_has(release)
        assert distributions.of_local_nodes() == distribution
        keys |= set(image_keys(LocalSettings()))
    machine_has(None)
    assert set(image_keys(LocalSettings(distribution="debian-13"))) < keys
    keys |= set(image_keys(LocalSettings(distribution="debian-12")))
    assert len(keys) == 8


Input = Callable[[Any, Path], None]


def _changed_field(field: str) -> Input:
    """Change a field of both tables of base images."""

    def change(replace: Any, _: Path) -> None:
        for name in ("DEBIAN", "REDHAT"):
            base = getattr(image, name)
            had = getattr(base, field)
            more = {**had, "/x": "y"} if isinstance(had, dict) else (*had, "x")
            replace(name, base.model_copy(update={field: more}))

    return change


def _changed_script(replace: Any, folder: Path) -> None:
    (folder / "furnish.sh").write_text(image._FURNISH.read_text() + "true\n")
    replace("_FURNISH", folder / "furnish.sh")


def _changed_options(replace: Any, _: Path) -> None:
    for name in ("_MMDEBSTRAP", "_DNF"):
        replace(name, (*getattr(image, name), "another"))


INPUTS = {
    **{
        field: _changed_field(field)
        for field in ("packages", "masked", "enabled", "mounts", "units")
    },
    "furnish.sh": _changed_script,
    "options": _changed_options,
    "uid": lambda replace, _: replace("ADMIN_ID", 1),
    "machine": lambda replace, _: replace("platform", SimpleNamespace(machine=lambda: "another")),
}


@pytest.fixture
def replace(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Give a constant of the module image another value."""
    return lambda name, value: monkeypatch.setattr(image, name, value)


@pytest.mark.parametrize("release", [None, "rocky-9"])
@pytest.mark.parametrize("name", INPUTS)
def test_image_key_depends_on_every_input_of_the_base(
    tmp_path: Path, machine_has: Release, replace: Any, release: str | None, name: str
) -> None:
    machine_has(release)
    before = image_keys(LocalSettings())
    assert image_keys(LocalSettings()) == before
    INPUTS[name](replace, tmp_path)
    after = image_keys(LocalSettings())
    assert not set(before) & set(after)


def test_boot_parameters_do_not_change_the_image_key(replace: Any, tmp_path: Path) -> None:
    before = image_keys(LocalSettings())
    for field in ("unused", "tmp_in_memory"):
        _changed_field(field)(replace, tmp_path)
    assert image_keys(LocalSettings()) == before


def test_dnf_image_uses_the_repositories_of_the_machine(tmp_path: Path, replace: Any) -> None:
    called: list[Sequence[str]] = []

    def dnf(argv: Sequence[str], **_: Any) -> str:
        if argv[0] == "rpm":
            return "rocky-release\n"
        called.append(argv)
        for folder in ("etc/dnf", "etc/systemd/system", "var/cache/dnf"):
            (tmp_path / "root" / folder).mkdir(parents=True)
        return ""

    repositories = tmp_path / "host"
    (repositories / "etc/yum.repos.d").mkdir(parents=True)
    (repositories / "etc/yum.repos.d/mine.repo").write_text("[mine]\n")
    (repositories / "etc/dnf").mkdir()
    (repositories / "etc/dnf/dnf.conf").write_text("[main]\nproxy=http://proxy\n")
    replace("run", dnf)
    root = tmp_path / "root"
    image.dnf_install(root, "rocky-9", through=("unshare", "--"), host_root=repositories)
    (argv,) = called
    assert argv[:3] == ["unshare", "--", "dnf"]
    assert {f"--installroot={root}", "--releasever=9", "install", "rocky-release"} <= set(argv)
    assert (root / "etc/yum.repos.d/mine.repo").read_text() == "[mine]\n"
    assert "proxy" in (root / "etc/dnf/dnf.conf").read_text()
    assert not (root / "var/cache/dnf").exists()
    (unit,) = image.REDHAT.units
    assert unit in image.REDHAT.enabled
    assert "host0" in (root / "etc/systemd/system" / unit).read_text()


def test_missing_tools_are_named_by_dnf_packages(
    machine_has: Release, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine_has("rocky-9")
    (tmp_path / "dnf").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(helper.TOOL_ENV, "PATH", "/none")
    with pytest.raises(MachineError) as missing:
        helper._check_tools()
    wanted = "dnf install dnf iproute openssh systemd-container util-linux"
    assert missing.value.fix == wanted
    assert missing.value.why.endswith("built with dnf")


@pytest.mark.parametrize(
    ("key", "value"),
    [("mirror", "http://mirror.example.org/debian"), ("distribution", "debian-13")],
)
def test_debian_settings_are_refused_on_red_hat(machine_has: Release, key: str, value: str) -> None:
    machine_has("rocky-9")
    LocalProvider(LocalSettings(type="local")).check(SPEC)
    with rejected("unsupported/distribution", UsageError, where=f"provider.{key}") as refused:
        LocalProvider(LocalSettings.model_validate({"type": "local", key: value})).check(SPEC)
    assert "rocky-9" in refused.value.why


def test_check_refuses_red_hat_enterprise_linux(machine_has: Release) -> None:
    machine_has("rhel-9")
    with rejected("unsupported/rhel", UsageError) as refused:
        LocalProvider(LocalSettings(type="local")).check(SPEC)
    assert "onprem" in refused.value.fix
