"""The table of distributions: what it says, and what it refuses."""

from __future__ import annotations

import pytest

from clusterctl.errors import ProvisionError
from clusterctl.spec.distributions import common_distribution, distribution_of, supported


@pytest.mark.parametrize(
    ("name", "release", "python"),
    [
        ("debian-12", "debian-12", "3.11"),
        ("debian-13", "debian-13", "3.13"),
        ("ubuntu-24.04", "ubuntu-24.04", "3.12"),
        ("rocky-9.6", "rocky-9", "3.11"),
        ("rocky-10", "rocky-10", "3.12"),
        ("almalinux-9.5", "rocky-9", "3.11"),
        ("rhel-10.0", "rocky-10", "3.12"),
    ],
)
def test_host_is_known_by_its_os_release(name: str, release: str, python: str) -> None:
    found = distribution_of(name)
    assert (found.release, found.python_version) == (release, python)


def test_distribution_family_determines_its_traits() -> None:
    debian = distribution_of("debian-12")
    rocky = distribution_of("rocky-9.6")
    assert (debian.mpi_module, rocky.mpi_module) == (None, "mpi/openmpi-x86_64")
    assert rocky.openmpi_conf == "/etc/openmpi-x86_64/openmpi-mca-params.conf"
    assert rocky.mariadb_socket == "/var/lib/mysql/mysql.sock"


@pytest.mark.parametrize(
    "name", ["rocky-8.10", "ubuntu-22.04", "fedora-41", "debian-14", "arch", ""]
)
def test_unknown_distribution_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(ProvisionError) as refused:
        distribution_of(name)
    assert all(title in refused.value.fix for title in supported())


def test_rocky_8_is_refused_with_its_reason() -> None:
    with pytest.raises(ProvisionError) as refused:
        distribution_of("rocky-8.10")
    assert "Python is 3.6" in refused.value.why


def test_hosts_of_one_release_make_a_cluster() -> None:
    assert (
        common_distribution({"a": "rocky-9.5", "b": "rocky-9.6", "c": "almalinux-9.6"}).release
        == "rocky-9"
    )


def test_distributions_that_differ_are_refused_with_every_host() -> None:
    with pytest.raises(ProvisionError) as refused:
        common_distribution(
            {"a": "rocky-9.5", "b": "rocky-10.0", "c": "rocky-9.5", "d": "debian-12"}
        )
    assert [failure.host for failure in refused.value.failures] == ["b", "d"]
    assert "Rocky Linux 10" in refused.value.failures[0].cause


def test_unknown_distributions_are_refused_with_every_host() -> None:
    with pytest.raises(ProvisionError) as refused:
        common_distribution({"a": "fedora-41", "b": "rocky-10.0", "c": "rocky-8.10"})
    assert [failure.host for failure in refused.value.failures] == ["a", "c"]
