"""The order in which a repository for dnf is renewed, with doubles of dnf and createrepo_c."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from clusterctl.packages import repository
from clusterctl.packages.repository import RepositoryRequest
from clusterctl.spec.distributions import distribution_of
from tests.support.messages import refused

PROGRAMS = {
    "dnf": """
for word; do
  case "$word" in
    --url) echo "http://m.example.org/$PACKAGE" ;;
    --downloaddir=*) echo new >"${word#*=}/$PACKAGE" ;;
  esac
done
""",
    "rpmkeys": "",
    "createrepo_c": """
[ "$PACKAGE" != refused.rpm ] || exit 1
for word; do
  case "$word" in --pkglist=*) list=${word#*=} ;; esac
done
cp "$list" "$word/indexed"
""",
}


def test_old_packages_and_keys_stay_until_there_is_a_new_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    (tmp_path / "bin").mkdir()
    for name, text in PROGRAMS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "key").write_text("key\n")
    sources = tmp_path / "mine.repo"
    sources.write_text(f"[a]\nbaseurl=http://m.example.org\ngpgkey=file://{tmp_path / 'key'}\n")
    folder = tmp_path / "rocky-9"
    request = RepositoryRequest(distribution_of("rocky-9"), folder, print, sources)

    def packed(package: str) -> list[str]:
        monkeypatch.setenv("PACKAGE", package)
        scratch = tmp_path / f"scratch-{package}"
        scratch.mkdir()
        assert repository.pack(request, ("any",), scratch) == 1
        return sorted(path.name for path in (folder / "Packages").iterdir())

    assert packed("old.rpm") == ["old.rpm"]
    with refused("tool-failed/package-manager"):
        packed("refused.rpm")
    assert (folder / "Packages/old.rpm").is_file()
    assert (folder / "indexed").read_text() == "Packages/old.rpm\n"
    assert packed("new.rpm") == ["new.rpm"]
    assert (folder / "indexed").read_text() == "Packages/new.rpm\n"
    assert (folder / "keys.asc").read_text() == "key\n"
