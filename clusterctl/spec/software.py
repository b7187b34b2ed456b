"""The software on the nodes in a spec: the source of Slurm's packages, mirrors, NVIDIA's
software.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from clusterctl.errors import BadValueError
from clusterctl.spec.base import PATTERNS, FileName, SpecModel, Toggle, Url

# The last driver branch for Maxwell, Pascal and Volta; the first branch without proprietary kernel
# modules.
LAST_FOR_VOLTA: Final = 580
_OPEN_ALONE: Final = 620


class Nvidia(SpecModel):
    """The software for hosts with NVIDIA GPUs. An installed driver is never changed. See
    docs/gpus.md.
    """

    driver: Literal["present", "open", "proprietary"] = Field(
        "present",
        description="the NVIDIA driver to install on hosts without a driver: with open kernel modules "
        "(for Turing and newer: RTX 20, T4, A100, H100), or proprietary; present: install "
        "no driver",
    )
    branch: Annotated[str, PATTERNS["branch"]] | None = Field(
        None,
        description="branch of the driver to install; by default the newest, or 580 if proprietary",
        examples=["580"],
    )
    toolkit: Annotated[str, PATTERNS["toolkit"]] | None = Field(
        None,
        description="version of the CUDA toolkit to install; by default none: CuPy includes CUDA's "
        "libraries",
        examples=["12.9"],
    )
    nccl: Toggle = Field(
        False, description="install NCCL as a package, for programs not written in Python"
    )
    dcgm: Toggle = Field(False, description="install and run NVIDIA's data center GPU manager")

    @model_validator(mode="after")
    def _of_a_driver(self) -> Self:
        if self.branch and self.driver == "present":
            raise BadValueError("driver-branch", "branch needs driver: open or driver: proprietary")
        if self.driver == "proprietary" and int(self.branch or 0) >= _OPEN_ALONE:
            raise BadValueError(
                "driver-branch",
                f"branch {_OPEN_ALONE} and later have no proprietary driver: write driver: open",
            )
        return self

    @property
    def of_branch(self) -> str | None:
        """The branch of NVIDIA's driver to install. None: the newest branch."""
        return self.branch or (str(LAST_FOR_VOLTA) if self.driver == "proprietary" else None)

    @property
    def has_driver(self) -> bool:
        """Whether clusterctl installs NVIDIA's driver on hosts without a driver."""
        return self.driver != "present"

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of the Ansible role cuda that some host may need. The role selects each host's
        parts.
        """
        chosen = {
            self.driver: self.has_driver,
            "toolkit": self.toolkit is not None,
            "nccl": self.nccl,
            "dcgm": self.dcgm,
        }
        return tuple(part for part, is_wanted in chosen.items() if is_wanted)

    @property
    def installs(self) -> bool:
        return self != Nvidia()


class PythonSettings(SpecModel):
    """The Python environment of jobs."""

    requirements: FileName | None = Field(
        None,
        description="a pip requirements file with more packages for jobs; its path is relative to this "
        "file",
    )


class Repository(SpecModel):
    """A mirror of a project's package repository."""

    url: Url = Field(description="the mirror's address")
    key: Url | None = Field(
        None,
        description="address of its signing key, if the key or its address is not the project's",
    )


class Mirrors(SpecModel):
    """Mirrors of package repositories."""

    bundle: Annotated[str, PATTERNS["folder_url"]] | None = Field(
        None,
        description="a folder of `clusterctl bundle`, at the address where the hosts find it: "
        "http://mirror.example.org/demo.bundle or file:///srv/demo.bundle. All packages then come from "
        "it, and other repositories are not read",
    )
    epel: Repository | None = Field(
        None, description="EPEL, which has Slurm for Rocky Linux and RHEL"
    )
    openhpc: Repository | None = Field(
        None,
        description="OpenHPC for Rocky Linux and RHEL, up to its version: "
        "http://mirror.example.org/OpenHPC/3",
    )
    nvidia: Repository | None = Field(
        None,
        description="NVIDIA's for the distribution: http://mirror.example.org/cuda/repos/rhel9/x86_64",
    )

    def bundled(self, release: str) -> str:
        """Return the URL of a bundle's repository for a release such as debian-12. "": no bundle."""
        return f"{self.bundle.rstrip('/')}/{release}" if self.bundle else ""


class SlurmSource(SpecModel):
    """The source of Slurm's packages. See docs/distributions.md."""

    origin: Annotated[str, PATTERNS["slurm_source"]] = Field(
        "distribution",
        alias="from",
        description="distribution (on Rocky Linux: EPEL); for Rocky Linux and RHEL also openhpc, or the "
        "address of a repository with SchedMD's names of packages, such as slurm-slurmd",
    )
    key: Url | None = Field(
        None, description="address of the key that signs the repository at an address"
    )

    @model_validator(mode="after")
    def _signed(self) -> Self:
        if ("://" in self.origin) != (self.key is not None):
            raise BadValueError("slurm-key", "an address in from, and key, need each other")
        return self

    @property
    def kind(self) -> str:
        """``distribution``, ``openhpc`` or ``address``."""
        return "address" if self.key else self.origin

    @property
    def repository(self) -> Repository | None:
        """The repository at an address. None: Slurm comes from the distribution or OpenHPC."""
        return Repository(url=self.origin, key=self.key) if self.key else None


class Software(SpecModel):
    """The software on the nodes."""

    # Formerly, the key had the value of `from`.
    slurm: Annotated[
        SlurmSource,
        BeforeValidator(
            lambda raw: {"from": raw} if isinstance(raw, str) else raw,
            json_schema_input_type=SlurmSource | Literal["distribution", "openhpc"],
        ),
    ] = Field(SlurmSource(), description="the source of Slurm's packages")
    packages: tuple[Annotated[str, PATTERNS["package"]], ...] = Field(
        (),
        description="more packages of the distribution on all hosts, such as git; `up` installs those "
        "that are added later",
    )
    mirrors: Mirrors = Field(Mirrors(), description="mirrors of package repositories")
    python: PythonSettings = Field(PythonSettings(), description="the Python environment of jobs")
    apptainer: Toggle = Field(
        False,
        description="install Apptainer, for `submit --container`, on hosts without it; not on local "
        "nodes, which have Charliecloud",
    )
    cupy: Toggle = Field(
        True,
        description="install CuPy and CUDA's libraries (2.1 GB) for jobs, on nodes with NVIDIA GPUs",
    )
    nvidia: Nvidia = Field(
        Nvidia(), description="software for hosts with NVIDIA GPUs; not on local nodes"
    )
