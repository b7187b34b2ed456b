"""`down` purges the packages that `up` installed, unless other packages need them by then."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.unit.host_snapshot.conftest import Machine

Util = Callable[[str], ModuleType]
Snapshot = Callable[..., dict[str, Any]]

LISTED = ("dpkg-query", "-W", "-f", "${db:Status-Status} ${binary:Package} ${Version}\n")
BEFORE = "installed adduser 3.134\ninstalled procps 2:4.0.2-3\nconfig-files chrony 4.3-2\n"
# As dpkg printed it for `--dry-run --purge openssl libssl3`.
NEEDED = """\
dpkg: dependency problems prevent removal of libssl3:amd64:
 systemd depends on libssl3 (>= 3.0.0).

dpkg: error processing package libssl3:amd64 (--purge):
 dependency problems - not removing
Errors were encountered while processing:
 libssl3:amd64
"""

_NEEDED = "error: Failed dependencies:\n\t"


@pytest.fixture
def dpkg(util: Util, machine: Machine) -> Any:
    return util("snapshot_packages").Dpkg(machine.run)


@pytest.fixture
def rpm(util: Util, machine: Machine) -> Any:
    return util("snapshot_packages").Rpm(machine.run)


def commands(machine: Machine, first: str) -> list[list[str]]:
    return [argv for argv in machine.ran if argv[0] == first]


def record_up(snapshot: Snapshot, machine: Machine, packages: Any, *, then: str) -> None:
    """Record an `up` that finds the packages BEFORE and installs ``then``."""
    machine.answers[LISTED] = 0, BEFORE, ""
    machine.answers["apt-mark", "showauto"] = 0, "procps\n", ""
    snapshot("recorded", packages=packages)
    machine.answers[LISTED] = 0, BEFORE.replace("config-files", "installed") + then, ""
    machine.answers["apt-mark", "showauto"] = 0, "", ""
    snapshot("sealed", packages=packages)


def test_restore_purges_only_packages_installed_by_up(
    snapshot: Snapshot, machine: Machine, dpkg: Any
) -> None:
    record_up(
        snapshot, machine, dpkg, then="installed munge 0.5.15\ninstalled libssl3:amd64 3.0.19\n"
    )
    # Somebody's, later.
    machine.answers[LISTED] = (
        0,
        machine.answers[LISTED][1] + "installed htop 3.2\n",
        "",
    )
    machine.answers["dpkg", "--dry-run", "--purge", "chrony", "libssl3:amd64", "munge"] = (
        1,
        "",
        NEEDED,
    )
    machine.answers["apt-mark", "showmanual"] = 0, "adduser\nprocps\n", ""
    result = snapshot("restored", packages=dpkg)
    purged, removed = commands(machine, "apt-get")
    assert purged[-2:] == ["purge", "munge"]
    assert removed[-2:] == ["remove", "chrony"]  # its settings were there before
    (note,) = result["clusterctl_notes"]
    assert note.endswith("need: libssl3:amd64")
    assert ["apt-mark", "auto", "procps"] in machine.ran


def test_restore_without_an_earlier_package_list_purges_nothing(
    snapshot: Snapshot, machine: Machine, dpkg: Any
) -> None:
    machine.answers[LISTED] = 0, "", ""
    snapshot("recorded", packages=dpkg)
    machine.answers[LISTED] = 0, BEFORE, ""
    snapshot("sealed", packages=dpkg)
    snapshot("restored", packages=dpkg)
    assert not commands(machine, "apt-get")


def test_package_installed_by_a_user_between_two_ups_is_kept(
    snapshot: Snapshot, machine: Machine, dpkg: Any
) -> None:
    record_up(snapshot, machine, dpkg, then="installed munge 0.5.15\n")
    with_htop = machine.answers[LISTED][1] + "installed htop 3.2\n"
    machine.answers[LISTED] = 0, with_htop, ""
    snapshot("recorded", packages=dpkg)
    machine.answers[LISTED] = 0, with_htop + "installed slurmd 22.05\n", ""
    snapshot("sealed", packages=dpkg)
    snapshot("restored", packages=dpkg)
    assert commands(machine, "apt-get")[0][-3:] == ["purge", "munge", "slurmd"]


def test_restore_purges_packages_of_a_killed_up_and_names_upgrades(
    snapshot: Snapshot, machine: Machine, dpkg: Any
) -> None:
    machine.answers[LISTED] = 0, BEFORE, ""
    snapshot("recorded", packages=dpkg)
    newer = BEFORE.replace("3.134", "3.135") + "installed munge 0.5.15\n"
    machine.answers[LISTED] = 0, newer, ""
    snapshot("recorded", packages=dpkg)
    result = snapshot("restored", packages=dpkg)
    assert commands(machine, "apt-get")[0][-2:] == ["purge", "munge"]
    (note,) = result["clusterctl_notes"]
    assert note.endswith("before: adduser")


def test_restore_keeps_edited_configuration_files_of_purged_packages(
    snapshot: Snapshot, machine: Machine, dpkg: Any, tmp_path: Path
) -> None:
    conf = tmp_path / "50-server.cnf"
    same = tmp_path / "same.cnf"
    record_up(snapshot, machine, dpkg, then="installed mariadb-server 10.11\n")
    conf.write_text("theirs")
    same.write_text("as it came")
    sums = {conf: "0" * 32, same: hashlib.md5(same.read_bytes()).hexdigest()}  # noqa: S324
    listed = "".join(f" {path} {md5}\n" for path, md5 in sums.items())
    machine.answers["dpkg-query", "-W", "-f", "${Conffiles}\n"] = 0, listed, ""
    result = snapshot("restored", packages=dpkg)
    assert [path.name for path in tmp_path.glob("*kept*")] == ["50-server.cnf.clusterctl-kept"]
    assert len(result["clusterctl_notes"]) == 1


def test_restore_keeps_mariadb_packages_with_foreign_databases(
    snapshot: Snapshot,
    machine: Machine,
    dpkg: Any,
    tmp_path: Path,
    *,
    util: Util,
) -> None:
    data = tmp_path / "mysql"
    paths = util("snapshot_host").HostPaths(databases=str(data))
    snapshot("recorded", trees=[str(data)])
    (data / "payroll").mkdir(parents=True)
    names = ("mariadb-server", "munge", "mysql-common")
    record_up(snapshot, machine, dpkg, then="".join(f"installed {name} 1.0\n" for name in names))
    snapshot("restored", packages=dpkg, on=paths)
    # The configuration files of chrony were there before.
    removals = [argv[-2:] for argv in commands(machine, "apt-get")]
    assert removals == [["purge", "munge"], ["remove", "chrony"]]
    assert (data / "payroll").is_dir()


def test_rpm_removable_keeps_required_packages_and_their_dependencies(
    rpm: Any, machine: Machine
) -> None:
    test = ("rpm", "-e", "--test")
    machine.answers[*test, "hwloc-libs.x86_64", "munge.x86_64", "openmpi.x86_64"] = (
        1,
        "",
        _NEEDED + "libmpi.so.40()(64bit) is needed by (installed) theirs-1.0-1.el9.x86_64\n",
    )
    machine.answers[*test, "hwloc-libs.x86_64", "munge.x86_64"] = (
        1,
        "",
        _NEEDED + "hwloc-libs(x86-64) >= 2.4 is needed by (installed) openmpi-4.1.1-7.x86_64\n",
    )
    ask = ("rpm", "-q", "--qf", "%{NAME}.%{ARCH}\n", "--whatprovides")
    machine.answers[*ask, "libmpi.so.40()(64bit)"] = 0, "openmpi.x86_64\n", ""
    machine.answers[*ask, "hwloc-libs(x86-64)"] = 0, "hwloc-libs.x86_64\n", ""
    names = ["openmpi.x86_64", "munge.x86_64", "hwloc-libs.x86_64"]
    assert rpm.removable(names) == ["munge.x86_64"]


def test_rpm_removable_with_another_failure_is_an_error(
    rpm: Any, machine: Machine, util: Util
) -> None:
    machine.answers["rpm", "-e", "--test", "a.x86_64"] = (
        1,
        "",
        "error: can't create transaction lock\n",
    )
    with pytest.raises(util("snapshot_packages").PackageError) as caught:
        rpm.removable(["a.x86_64"])
    assert "transaction lock" in str(caught.value)


def test_gpg_keys_of_repositories_are_listed_as_packages(rpm: Any, machine: Machine) -> None:
    listed = "gpg-pubkey 3228467c-613798eb (none)\nbash 5.1.8-9.el9 x86_64\n"
    machine.answers["rpm", "-qa"] = 0, listed, ""
    assert set(rpm.installed()) == {"gpg-pubkey-3228467c-613798eb", "bash.x86_64"}
    rpm.remove(["bash.x86_64", "gpg-pubkey-3228467c-613798eb"])
    assert commands(machine, "dnf")[0][-2:] == ["remove", "bash.x86_64"]
    assert machine.ran[-1] == ["rpm", "-e", "gpg-pubkey-3228467c-613798eb"]


def test_purged_folders_are_read_from_the_postrm_script(
    machine: Machine, tmp_path: Path, util: Util
) -> None:
    dpkg = util("snapshot_packages").Dpkg(machine.run, info=str(tmp_path))
    (tmp_path / "munge.postrm").write_text("rm -rf /var/lib/munge\n")
    folders = ["/var/lib/munge", "/var/lib/mysql"]
    assert dpkg.purged(["munge:amd64", "procps"], folders) == ["/var/lib/munge"]
