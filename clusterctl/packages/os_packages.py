"""The OS packages that Ansible's roles install, read from the variables of the roles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from clusterctl.errors import ClusterctlError
from clusterctl.spec.distributions import Distribution
from clusterctl.spec.software import Nvidia, Software
from clusterctl.util.assets import data_folder, read_table

PLAIN: Final = Software()
# The file of a bundle's repository that apt or dnf reads first, by the family of distributions.
INDEXES: Final[Mapping[str, str]] = {"Debian": "Packages", "RedHat": "repodata/repomd.xml"}
_SUFFIX: Final = "_packages"
# Suffix of variables that replace `_packages` if Slurm is OpenHPC's.
_OPENHPC: Final = "_openhpc"
_APPTAINER: Final = "apptainer"
_CUDA_ROLE: Final = "cuda"
# The driver branch in which NVIDIA renamed the package of the fabric manager.
_RENAMED: Final = 580
# The major CUDA version of CuPy in the job environment.
_CUDA: Final = 12
# The roles for what only rented hosts have: a bucket, and local disks for /scratch.
_OF_RENTED: Final = frozenset({"bucket", "scratch"})
# Packages that Ansible's modules need on a host and would otherwise install themselves.
_OF_MODULES: Final[Mapping[str, tuple[str, ...]]] = {
    "Debian": ("python3-apt",),
    "RedHat": ("python3-libselinux",),
}


@dataclass(frozen=True, slots=True)
class Upstream:
    """An OS package from its developers' site, because no distribution has it."""

    url: str
    sha256: str

    @property
    def file(self) -> str:
        return self.url.rpartition("/")[2]


def package_names(distribution: Distribution, software: Software = PLAIN) -> tuple[str, ...]:
    """Return the OS packages that Ansible's roles install on hosts of all kinds with this
    distribution.

    Raise a ClusterctlError if a role's variables contain templates.
    """
    excluded = _OF_RENTED if software.apptainer else {*_OF_RENTED, _APPTAINER}
    roles = {
        folder.parent.name for folder in data_folder("ansible").glob("roles/*/vars")
    } - excluded
    names = {*_OF_MODULES[distribution.family], *packages_of(roles, distribution, software)}
    for_some_hosts = (
        *_variables("openmpi", distribution).get("openmpi_fabric_parts", ()),
        *_nvidia_packages(software.nvidia, distribution),
    )
    return tuple(sorted(names.union(for_some_hosts, software.packages)))


def packages_of(
    roles: Iterable[str], distribution: Distribution, software: Software
) -> tuple[str, ...]:
    openhpc = software.slurm.origin == "openhpc"
    return tuple(
        sorted({name for role in roles for name in _names(role, distribution, openhpc=openhpc)})
    )


def nvidia_stream(distribution: Distribution, software: Software) -> str | None:
    """Return the dnf module stream of NVIDIA's driver. None: no driver, or a distribution without
    streams.
    """
    nvidia = software.nvidia
    values = _variables(_CUDA_ROLE, distribution)
    kinds = [kind for kind in values.get("cuda_streams", ()) if kind in nvidia.parts]
    if not kinds or not values["cuda_has_streams"]:
        return None
    stream = values["cuda_streams"][kinds[0]]
    branch = nvidia.of_branch
    return f"{branch}{stream['branch']}" if branch else str(stream["newest"])


def nvidia_preference(distribution: Distribution, software: Software) -> str:
    """Return apt preferences that pin NVIDIA's driver to the spec's branch; "" without a branch or
    apt.
    """
    branch = software.nvidia.of_branch or ""
    text: str = _variables(_CUDA_ROLE, distribution).get("cuda_preference", "") if branch else ""
    return text.replace("%s", branch)


def _nvidia_packages(nvidia: Nvidia, distribution: Distribution) -> Iterator[str]:
    """Yield the packages that the role cuda installs, except those with names that depend on the
    GPU.
    """
    values = _variables(_CUDA_ROLE, distribution)
    toolkit = nvidia.toolkit or ""
    branch = nvidia.of_branch or ""
    form = values["cuda_branch_form"].replace("%s", branch) if branch else ""
    cuda = toolkit.partition(".")[0] or str(max(_CUDA, distribution.oldest_cuda))
    filled = {"@branch@": form, "@toolkit@": toolkit.replace(".", "-"), "@cuda@": cuda}
    filled |= {"@version@": "", "@driver_branch@": branch}
    names = [name for part in nvidia.parts for name in values["cuda_names"][part]]
    if nvidia.has_driver:
        manager = (
            "fabric_manager_below_580" if branch and int(branch) < _RENAMED else "fabric_manager"
        )
        names += [*values["cuda_persistence"], *values["cuda_names"][manager]]
    for name in names:
        for placeholder, value in filled.items():
            name = name.replace(placeholder, value)  # noqa: PLW2901
        if "@" not in name:
            yield name


def upstream_packages(distribution: Distribution, software: Software) -> tuple[Upstream, ...]:
    """Return the packages that Ansible's roles download from the developers' sites."""
    variables = _variables(_APPTAINER, distribution) if software.apptainer else {}
    return (
        (Upstream(variables["apptainer_url"], variables["apptainer_sha256"]),)
        if "apptainer_url" in variables
        else ()
    )


def _names(role: str, distribution: Distribution, *, openhpc: bool) -> Iterator[str]:
    variables = _variables(role, distribution)
    for name, packages in variables.items():
        if not name.endswith(_SUFFIX):
            continue
        names = (
            variables.get(name.removesuffix(_SUFFIX) + _OPENHPC, packages) if openhpc else packages
        )
        for package in names:
            if not isinstance(package, str) or "{{" in package:
                message = f"{name} is not a plain list of packages"
                fix = (
                    "write the names without templates, because they are also read without Ansible"
                )
                raise ClusterctlError(message, about="package-list", where=f"role {role}", fix=fix)
            yield package


def _variables(role: str, distribution: Distribution) -> dict[str, Any]:
    """Return a role's variables. Values for a release (debian-12) override values for its family
    (Debian).
    """
    folder = data_folder("ansible") / "roles" / role / "vars"
    paths = [folder / f"{name}.yml" for name in (distribution.family, distribution.release)]
    tables = [read_table(path, dict[str, Any]) for path in paths if path.is_file()]
    return {name: value for values in tables for name, value in values.items()}
