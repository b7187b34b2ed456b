"""Every package, unit and file that roles name exists in a repository, by the records in facts/.

A name that is asked for and not recorded fails. Look it up, and record where it was found; never
take it from a role.
"""

from __future__ import annotations

import fnmatch
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

import clusterctl
from clusterctl.packages.os_packages import package_names, packages_of, upstream_packages
from clusterctl.spec.distributions import Distribution, releases
from clusterctl.spec.software import Software
from clusterctl.util.assets import data_folder
from tests.support.el.packages import base_names, packages

CODE = Path(clusterctl.__file__).parent
FACTS = Path(__file__).with_name("facts")
KNOWN = {release.release: release for release in releases()}
NEWEST = 999  # a branch of NVIDIA's driver
LEAST_ON_10 = 580  # which older ones the repository for EL 10 has is not recorded
REPOSITORIES = {"baseos": "BaseOS", "appstream": "AppStream", "extras": "Extras", "epel": "EPEL"}
REPOSITORIES |= {"cuda": "NVIDIA", "openhpc": "OpenHPC"}  # of the EL-shaped machines of the tests


def software_of(distribution: Distribution) -> list[tuple[Software, int]]:
    """Return each kind of software that a spec may ask for, with the driver branches at which
    package names change.
    """
    toolkit = f"{distribution.oldest_cuda}.0" if distribution.oldest_cuda else "12.9"
    least = LEAST_ON_10 if distribution.release == "rocky-10" else 0
    return [
        (Software.model_validate({"slurm": slurm, "apptainer": True, "nvidia": nvidia}), number)
        for slurm in ("distribution", "openhpc")
        for kind in ("open", "proprietary")
        for branch in (None, "570", "580")
        for nvidia in (
            {"driver": kind, "branch": branch, "toolkit": toolkit, "nccl": True, "dcgm": True},
        )
        if (number := int(branch or NEWEST)) >= least
    ]


UNIT = re.compile(r"(?<![\w./@$-])[a-z][\w@-]*\.(?:service|timer|socket|mount)\b")
PLACE = re.compile(r"/usr/(?:s?bin|lib(?:64|exec)?)/[\w./*+-]+")


@cache
def parsed(path: Path) -> Any:
    """Return the content of a YAML file. Callers must not change it."""
    return yaml.safe_load(path.read_text())


@cache
def facts() -> list[dict[str, Any]]:
    return [tomllib.loads(path.read_text()) for path in sorted(FACTS.glob("*.toml"))]


@dataclass(frozen=True)
class Recorded:
    """The known packages of a repository. names: name -> version; "" if the version is not known."""

    of: tuple[str, ...]
    names: dict[str, str]
    repository: str
    branches: range

    @classmethod
    def read(cls, table: dict[str, Any]) -> Recorded:
        pairs = (word.partition("=") for word in table["names"].split())
        branches = range(table.get("from", 0), table.get("below", NEWEST + 1))
        names = {name: version for name, _, version in pairs}
        return cls(tuple(table["of"]), names, table.get("repository", "NVIDIA"), branches)

    def has(self, wanted: str) -> bool:
        """Return whether apt or dnf finds a package by its name, or by name and pattern of the version."""
        name, equals, pattern = wanted.partition("=")
        if equals:
            return fnmatch.fnmatchcase(self.names.get(name, ""), pattern)
        return any(
            wanted == name or fnmatch.fnmatchcase(f"{name}-{version}", wanted)
            for name, version in self.names.items()
        )


def recorded(*kinds: str) -> list[Recorded]:
    return [Recorded.read(one) for kind in kinds for file in facts() for one in file.get(kind, ())]


def unknown(wanted: set[str], release: str, branch: int) -> set[str]:
    """Return the packages that no repository is known to have."""
    known = [
        package
        for package in recorded("fact", "unconfirmed")
        if release in package.of and branch in package.branches
    ]
    return {name for name in wanted if not any(package.has(name) for package in known)}


def packages_of_roles(distribution: Distribution, software: Software) -> set[str]:
    """Return the packages that all roles install."""
    found = {
        *package_names(distribution, software),
        *packages_of(("bucket", "scratch"), distribution, software),
    }
    other = {"Debian", "RedHat"} - {distribution.family}
    roles = data_folder("ansible") / "roles"
    ours = [path for path in roles.glob("*/tasks/*.yml") if path.stem not in other]
    if distribution.family != "RedHat":
        ours = [path for path in ours if path.parts[-3] != "repositories"]
    for task in (task for path in ours for task in walk(parsed(path) or [])):
        names = task.get("vars", {}).get("packages_names")
        if isinstance(names, list) and "packages_bundle" not in str(task.get("when", "")):
            found.update(name for name in names if "{{" not in name)
    return found


def named_files(distribution: Distribution) -> set[str]:
    """Return units, paths and programs that roles and programs on hosts expect from packages."""
    ansible = data_folder("ansible")
    other = {"Debian", "RedHat"} - {distribution.family}
    texts = {".yml", ".sh", ".j2", ".py"}
    roles = [
        one
        for one in ansible.rglob("*.*")
        if one.suffix in texts - {".py"} and one.stem not in other
    ]
    sent = [one for part in ("hosts", "cluster") for one in CODE.joinpath(part).rglob("*.*")]
    found = {distribution.python}
    for path in roles:
        found.update(UNIT.findall(path.read_text()))
    for path in (*roles, *(one for one in sent if one.suffix in texts)):
        text = path.read_text().replace("{{ ansible_facts.architecture }}", "x86_64")
        found.update(PLACE.findall(re.sub(r"(?m)^#!.*", "", text)))
    tasks = [role for role in roles if role.parent.name == "tasks"]
    for task in (task for path in tasks for task in walk(parsed(path) or [])):
        found.add(task.get("ansible.builtin.command", {}).get("argv", "{")[0])
    files = [parsed(path) for path in ansible.glob("roles/*/meta/touches.yml")]
    touches = [one for file in files for one in file.values()]
    found.update(
        path for entry in touches for path in entry.get("folders", ()) if path.startswith("/etc/")
    )
    found -= {path for entry in touches for path in entry.get("files", ())}
    return {
        finding for finding in found if not re.search(r"[{]|clusterctl|[.]service[.]d", finding)
    }


def not_in_a_package(named: set[str], release: str) -> set[str]:
    """Return the names that no known package has. Files that only Enterprise Linux has don't count
    for Debian.
    """
    ours = [one for file in facts() for one in file.get("files", ()) if release in one["of"]]
    listed = [said for one in ours for said in one["packages"].values()]
    listed += [one["files"] for file in facts() for one in file.get("unconfirmed_files", ())]
    # The essential package dash has /bin/sh.
    known = [*" ".join(listed).split(), "/usr/bin/sh"]
    places = ["{}", "/usr/bin/{}", "/usr/sbin/{}"]
    return {
        name
        for name in named
        if not any(fnmatch.filter(known, form.format(name)) for form in places)
    }


def walk(tasks: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for task in tasks:
        yield task
        yield from walk(task.get("block", []))


@pytest.mark.parametrize("release", KNOWN)
def test_packages_of_roles_are_in_a_repository(release: str) -> None:
    missing = set[str]()
    for software, branch in software_of(KNOWN[release]):
        names = packages_of_roles(KNOWN[release], software)
        slurm = "slurmctld" if KNOWN[release].family == "Debian" else "slurm-slurmctld"
        assert {"chrony", "gcsfuse", "munge", "mariadb-server"} < names
        assert {slurm, f"{slurm}-ohpc"} & names
        assert any(name.startswith("python3") for name in names)
        upstream = [package.file for package in upstream_packages(KNOWN[release], software)]
        assert any(name.startswith("apptainer") for name in (*names, *upstream))
        missing |= unknown(names, release, branch)
    assert missing == set()


@pytest.mark.parametrize("release", ["debian-12", "debian-13"])
def test_units_and_files_of_roles_are_in_debian_packages(release: str) -> None:
    named = named_files(KNOWN[release])
    assert {"munge.service", "/usr/sbin/slurmd", "/usr/lib/*/slurm*/mpi_*.so", "chronyc"} < named
    assert not_in_a_package(named, release) == set()


def holders(release: str) -> dict[str, set[str]]:
    """Return (unit, or path of settings) -> the packages that contain it."""
    found = dict[str, set[str]]()
    if KNOWN[release].family == "RedHat":
        for package in packages():
            units = [path.name for path in package.own.glob("usr/lib/systemd/system/*")]
            for name in (*units, *package.holds.config):
                found.setdefault(name, set()).add(package.name)
        return found
    for package, files in (
        pair
        for file in facts()
        for one in file.get("files", ())
        if release in one["of"]
        for pair in one["packages"].items()
    ):
        for name in files.split():
            found.setdefault(name, set()).add(package)
    return found


@pytest.mark.parametrize(
    ("release", "slurm"),
    [
        ("debian-12", "distribution"),
        ("debian-13", "distribution"),
        ("rocky-9", "distribution"),
        ("rocky-9", "openhpc"),
    ],
)
def test_each_role_asks_for_the_packages_of_its_units(release: str, slurm: str) -> None:
    """The packages of another role may stop installing them."""
    distribution = KNOWN[release]
    software = Software.model_validate({"slurm": slurm})
    known = holders(release)
    seen = set()
    lacking = set()
    for path in data_folder("ansible").glob(f"roles/*/vars/{distribution.family}.yml"):
        role = path.parts[-3]
        if not any(name.endswith("_packages") for name in parsed(path)):
            continue
        touches = parsed(path.parents[1] / "meta/touches.yml")[f"{role}_touches"]
        settings = {*touches.get("files", ()), *touches.get("folders", ())} - {"/etc/slurm"}
        names = {*touches.get("units", ()), *(one for one in settings if one.startswith("/etc/"))}
        asked = {*packages_of((role,), distribution, software)}
        for name in names & known.keys():
            seen.add(name)
            if not asked & known[name]:
                lacking.add((role, name))
    assert {"munge.service", "mariadb.service", "chronyd.service", "slurmd.service"} < seen
    assert lacking == set()


def test_each_package_fact_has_source_and_date() -> None:
    for path in FACTS.glob("*.toml"):
        table = tomllib.loads(path.read_text())
        assert all(
            len(one["source"]) > 10 and one["date"].year >= 2025
            for kind in ("fact", "files", "repository", "codeready")
            for one in table.get(kind, ())
        )
        doubtful = [*table.get("unconfirmed", ()), *table.get("unconfirmed_files", ())]
        assert all(len(one["why"]) > 10 for one in doubtful)


def test_machines_have_exactly_the_packages_of_the_facts() -> None:
    """Otherwise, a wrong name in a role could also be wrong in the machines of the tests."""
    facts = [
        package
        for package in recorded("fact")
        if "rocky-9" in package.of and 580 in package.branches
    ]
    known = {(fact.repository, name) for fact in facts for name in fact.names}
    guessed = {
        name
        for package in recorded("unconfirmed")
        if "rocky-9" in package.of
        for name in package.names
    }
    wanted = [
        software for software, branch in software_of(KNOWN["rocky-9"]) if branch >= LEAST_ON_10
    ]
    names = {name for software in wanted for name in packages_of_roles(KNOWN["rocky-9"], software)}
    # NVIDIA's DOCA, which no role installs, has packages under the distribution's names.
    played = [package for package in packages() if package.name in names and package.repo != "doca"]
    assert len(played) > 30
    wrong = {
        (package.repo, package.name)
        for package in played
        if (REPOSITORIES[package.repo], package.name) not in known
    }
    assert {name for _, name in wrong} <= guessed
    patterns = {name for name in names if "*" in name}
    elsewhere = {"apptainer", "gcsfuse"}  # no test installs them there
    assert names - patterns - elsewhere - base_names() <= {package.name for package in packages()}
