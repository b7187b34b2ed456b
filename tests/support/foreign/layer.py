"""The layer over Debian from which the hosts of a foreign Slurm site start.

It has the packages and configuration of the site, and nothing of clusterctl. The cache keeps it
until this module or the folder ``data`` changes.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from clusterctl.providers.local import system
from clusterctl.providers.local.system import run
from tests.support.el.build import inputs_of, open_to_apt

DATA: Final = Path(__file__).with_name("data")
_PACKAGES: Final = (
    "munge slurm-wlm openmpi-bin tcsh fish libpam-systemd procps openssh-client".split()
)


@dataclass(frozen=True)
class Kind:
    """A kind of site. ``is_newer``: it has Debian 13, not 12. ``module``: its Open MPI."""

    name: str
    is_newer: bool
    module: str
    packages: tuple[str, ...]


# Slurm 22.05 loads libpmix.so, which only libpmix-dev has.
SITES: Final = {
    "campus": Kind("campus", False, "openmpi/4.1", ("environment-modules", "libpmix-dev")),
    "national": Kind("national", True, "openmpi/5.0", ("lmod", "slurmdbd", "mariadb-server")),
}


def inputs() -> tuple[bytes, ...]:
    """Everything that decides how a host of a site looks."""
    return (*inputs_of(DATA), Path(__file__).read_bytes())


def build(kind: Kind, base: Path, folder: Path) -> None:
    """Make ``folder/upper``, the layer of a site."""
    root = system.mount_overlay((base,), folder)
    try:
        open_to_apt(root)
        for name in ("both", kind.name):
            shutil.copytree(DATA / name, root, dirs_exist_ok=True)
        words = [kind.module, *_PACKAGES, *kind.packages]
        install = (DATA / "install.sh").read_text()
        run(
            ["chroot", str(root), "sh", "-s", "--", *words],
            stdin=install,
            action="installing a site",
        )
    finally:
        for point in system.mounted_under(root):
            run(["umount", str(point)], action="unmounting the tree")
    shutil.rmtree(folder / "work")
