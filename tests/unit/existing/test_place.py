"""The environment modules with which `attach` searches for an MPI library."""

from __future__ import annotations

from clusterctl.providers.existing.place import mpi_modules, mpi_variants

MODULES = ("mpi/openmpi-x86_64", "openmpi/5.0", "python/3.13", "libopenmpi/1")


def test_chosen_python_module_does_not_end_the_search_for_mpi() -> None:
    names = ["openmpi/5.0", "mpi/openmpi-x86_64"]
    with_mpi = [("python/3.13",), *(("python/3.13", name) for name in names)]
    assert mpi_variants(("python/3.13",), MODULES) == with_mpi
    # A chosen module of MPI, wherever the site keeps it, is the only one.
    for chosen in ("openmpi/4.1", "mpi/openmpi/5.0", "impi"):
        assert mpi_variants((chosen, "python/3.13"), MODULES) == [(chosen, "python/3.13")]
    assert mpi_variants((), MODULES) == [(), *((name,) for name in names)]


def test_newest_version_of_each_library_is_tried_first() -> None:
    versions = [
        f"openmpi/{version}" for version in ("1.8", "2.1.6", "3.1.4", "4.0.7", "4.1.10", "4.1.9")
    ]
    names = ["impi/2019.9", "impi/2021.3", "mpich2/1", "gcc/12", *versions, "python/3.13"]
    assert mpi_modules(names) == [
        *("impi/2021.3", "openmpi/4.1.10"),
        *("impi/2019.9", "openmpi/4.1.9"),
        *("openmpi/4.0.7", "openmpi/3.1.4"),
    ]
