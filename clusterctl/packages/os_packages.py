"""The OS packages that the roles install, read from the roles' own variables: there is no second list."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from clusterctl.errors import ClusterctlError
from clusterctl.spec.common import Nvidia, Software
from clusterctl.spec.distributions import Distribution
from clusterctl.util.assets import asset, table

PLAIN: Final = Software()
_SUFFIX: Final = "_packages"
_OPENHPC: Final = "_openhpc"  # what takes their place where Slurm is OpenHPC's
_APPTAINER: Final = "apptainer"  # the role
_CUDA_ROLE: Final = "cuda"
_RENAMED: Final = 580  # the fabric manager's package, with this branch
_CUDA: Final = "12"  # that of the job environment's CuPy
_AT_GOOGLE: Final = frozenset({"bucket", "scratch"})  # roles for machines at Google alone
# What Ansible's modules need on a host, and would fetch themselves.
_OF_MODULES: Final[Mapping[str, tuple[str, ...]]] = {
    "Debian": ("python3-apt",),
    "RedHat": ("python3-libselinux",),
}


@dataclass(frozen=True, slots=True)
class Upstream:
    """A package that its makers release and no distribution has."""

    url: str
    sha256: str

    @property
    def file(self) -> str:
        return self.url.rpartition("/")[2]


def package_names(distribution: Distribution, software: Software = PLAIN) -> tuple[str, ...]:
    """What the roles ask for on a host of this distribution, whichever of its roles it has.

    Raises:
        ClusterctlError: a role's data can't be read without Ansible.
    """
    unwanted = _AT_GOOGLE if software.apptainer else {*_AT_GOOGLE, _APPTAINER}
    roles = {folder.parent.name for folder in asset("ansible").glob("roles/*/vars")} - unwanted
    found = {*_OF_MODULES[distribution.family], *packages_of(roles, distribution, software)}
    return tuple(sorted(found.union(_of_nvidia(software.nvidia, distribution))))


def asked_packages(distribution: Distribution, software: Software) -> tuple[str, ...]:
    """What a bundle must hold for hosts of a distribution: packages by name, and the files of upstream's."""
    upstream = upstream_packages(distribution, software)
    return (*package_names(distribution, software), *(one.file for one in upstream))


def packages_of(roles: Iterable[str], distribution: Distribution, software: Software) -> tuple[str, ...]:
    """What these roles of Ansible's ask for on a host of this distribution."""
    openhpc = software.slurm == "openhpc"
    return tuple(sorted({name for role in roles for name in _names(role, distribution, openhpc=openhpc)}))


def nvidia_stream(distribution: Distribution, software: Software) -> str | None:
    """The stream of the module that the driver is in, where dnf has one and a driver is asked for."""
    nvidia = software.nvidia
    values = _variables(_CUDA_ROLE, distribution)
    kinds = [kind for kind in values.get("cuda_streams", ()) if kind in nvidia.parts]
    if not kinds or not values["cuda_has_streams"]:
        return None
    stream = values["cuda_streams"][kinds[0]]
    branch = nvidia.of_branch
    return f"{branch}{stream['branch']}" if branch else str(stream["newest"])


def nvidia_preference(distribution: Distribution, software: Software) -> str:
    """What keeps apt to the driver's branch; "" where none is asked for, or apt is not used."""
    branch = software.nvidia.of_branch or ""
    text: str = _variables(_CUDA_ROLE, distribution).get("cuda_preference", "") if branch else ""
    return text.replace("%s", branch)


def _of_nvidia(nvidia: Nvidia, distribution: Distribution) -> Iterator[str]:
    """What hosts with its cards get, as the role cuda fills in the names; none that only a host can tell."""
    values = _variables(_CUDA_ROLE, distribution)
    toolkit = nvidia.toolkit or ""
    branch = nvidia.of_branch or ""
    form = values["cuda_branch_form"].replace("%s", branch) if branch else ""
    cuda = toolkit.partition(".")[0] or _CUDA
    filled = {"@branch@": form, "@toolkit@": toolkit.replace(".", "-"), "@cuda@": cuda}
    filled |= {"@version@": "", "@driver_branch@": branch}  # the bundle's driver, and what it has of that
    names = [name for part in nvidia.parts for name in values["cuda_names"][part]]
    if nvidia.has_driver:
        manager = "fabric_manager_below_580" if branch and int(branch) < _RENAMED else "fabric_manager"
        names += [*values["cuda_persistence"], *values["cuda_names"][manager]]
    for name in names:
        for placeholder, value in filled.items():
            name = name.replace(placeholder, value)  # noqa: PLW2901
        if "@" not in name:
            yield name


def upstream_packages(distribution: Distribution, software: Software) -> tuple[Upstream, ...]:
    """What the roles fetch from its makers on a host of this distribution."""
    said = _variables(_APPTAINER, distribution) if software.apptainer else {}
    return (Upstream(said["apptainer_url"], said["apptainer_sha256"]),) if "apptainer_url" in said else ()


def _names(role: str, distribution: Distribution, *, openhpc: bool) -> Iterator[str]:
    said = _variables(role, distribution)
    for name, usual in said.items():
        if not name.endswith(_SUFFIX):
            continue
        value = said.get(name.removesuffix(_SUFFIX) + _OPENHPC, usual) if openhpc else usual
        for package in value:
            if not isinstance(package, str) or "{{" in package:
                what = f"{name} is no plain list of packages"
                fix = "write the names out: they are read without Ansible, too"
                raise ClusterctlError(what, code="package-list-unreadable", where=f"the role {role}", fix=fix)
            yield package


def _variables(role: str, distribution: Distribution) -> dict[str, Any]:
    """The variables of a role on this distribution: those of its family, then those of its release."""
    folder = asset("ansible") / "roles" / role / "vars"
    paths = [folder / f"{name}.yml" for name in (distribution.family, distribution.release)]
    found = [table(path, dict[str, Any]) for path in paths if path.is_file()]
    return {name: value for one in found for name, value in one.items()}
