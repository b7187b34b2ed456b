"""What is installed on the nodes (`software`), and how they are monitored (`monitoring`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal, Self

from pydantic import Field, StringConstraints, field_validator, model_validator

from clusterctl.spec.base import FileName, Model, Toggle, Url
from clusterctl.spec.units import DurationS, SizeMib, format_duration, format_size

_TOOLKIT: Final = r"^1[1-9]\.[0-9]{1,2}$"
_BRANCH: Final = r"^[1-9][0-9]{2}$"
_BRANCH_ALONE: Final = "a branch is of a driver that is to be installed: write driver: open, too"
NVIDIA_PATTERN_TEXTS: Final[Mapping[str, str]] = {
    _TOOLKIT: 'a version of CUDA in quotes, such as "12.9"',
    _BRANCH: 'a branch of the driver in quotes, such as "580"',
}


class Nvidia(Model):
    """What hosts with NVIDIA's cards get; a driver that is there is left alone. See docs/gpus.md."""

    driver: Literal["present", "open", "proprietary"] = Field(
        "present",
        description="install a driver where there is none: NVIDIA's with open kernel modules (for Turing and "
        "newer: RTX 20, T4, A100, H100), or its proprietary one; present: install none",
    )
    branch: Annotated[str, StringConstraints(pattern=_BRANCH)] | None = Field(
        None, description="of that driver; by default NVIDIA's newest", examples=["580"]
    )
    toolkit: Annotated[str, StringConstraints(pattern=_TOOLKIT)] | None = Field(
        None,
        description="the CUDA toolkit of this version; by default none: CuPy brings CUDA's libraries",
        examples=["12.9"],
    )
    nccl: Toggle = Field(False, description="NCCL as a package, for programs that are not Python's")
    dcgm: Toggle = Field(False, description="NVIDIA's data center GPU manager, and run it")

    @model_validator(mode="after")
    def _of_a_driver(self) -> Self:
        if self.branch is not None and self.driver == "present":
            raise ValueError(_BRANCH_ALONE)
        return self

    @property
    def has_driver(self) -> bool:
        """Whether a driver is installed where there is none."""
        return self.driver != "present"

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of the role cuda whose packages a host may need; which of them, it decides itself."""
        chosen = {
            self.driver: self.has_driver,
            "fabric_manager": self.has_driver,
            "toolkit": self.toolkit is not None,
            "nccl": self.nccl,
            "dcgm": self.dcgm,
        }
        return tuple(part for part, is_wanted in chosen.items() if is_wanted)

    @property
    def installs(self) -> bool:
        """Whether anything is."""
        return self != Nvidia()


_SAMPLE_INTERVAL_S: Final = 2
_INTERVAL_S: Final = 60
_LEAST_INTERVAL_S: Final = 5  # checks that follow each other keep slurmctld from asking resumed nodes
_DISK_FREE_MIB: Final = 50
_CLOCK_OFFSET_S: Final = 5


class Health(Model):
    """The health check: a node that fails it is drained, and resumed once it passes. See docs/gpus.md."""

    interval: DurationS = Field(
        _INTERVAL_S,
        description="time between two checks of a node",
        json_schema_extra={"default": format_duration(_INTERVAL_S)},
    )
    gpu_temperature: Annotated[int, Field(ge=40, le=120, strict=True)] = Field(
        90, description="highest GPU temperature that passes, in °C"
    )
    disk_free: SizeMib = Field(
        _DISK_FREE_MIB,
        description="least free space on each local file system of a node",
        json_schema_extra={"default": format_size(_DISK_FREE_MIB)},
    )
    clock_offset: DurationS = Field(
        _CLOCK_OFFSET_S,
        description="largest clock offset, where chrony runs",
        json_schema_extra={"default": format_duration(_CLOCK_OFFSET_S)},
    )

    @field_validator("interval")
    @classmethod
    def _time_between(cls, value: int) -> int:
        if value < _LEAST_INTERVAL_S:
            raise ValueError(f"{format_duration(_LEAST_INTERVAL_S)} is the least between two checks")
        return value


class PythonSettings(Model):
    """The Python environment of jobs."""

    requirements: FileName | None = Field(
        None,
        description="a requirements file, as pip reads it; relative to this file; "
        "jobs find these packages beside those that every cluster has",
    )


class Repository(Model):
    """A mirror of a project's package repository."""

    url: Url = Field(description="where it is")
    key: Url | None = Field(
        None, description="its signing key, where the key or its URL is not the project's"
    )


class Mirrors(Model):
    """Mirrors of the repositories that are not the distribution's own."""

    epel: Repository | None = Field(None, description="EPEL, which has Slurm for Rocky Linux and RHEL")
    openhpc: Repository | None = Field(
        None,
        description="OpenHPC for Rocky Linux and RHEL, up to its version: http://mirror.example.org/OpenHPC/3",
    )
    nvidia: Repository | None = Field(
        None, description="NVIDIA's for this distribution: http://mirror.example.org/cuda/repos/rhel9/x86_64"
    )


class Software(Model):
    """What is installed on the nodes."""

    slurm: Literal["distribution", "openhpc"] = Field(
        "distribution",
        description="whose packages of Slurm: the distribution's (on Rocky Linux EPEL's), or OpenHPC's, "
        "which are for Rocky Linux and RHEL",
    )
    mirrors: Mirrors = Field(Mirrors(), description="mirrors of package repositories")
    python: PythonSettings = Field(PythonSettings(), description="the Python environment of jobs")
    apptainer: Toggle = Field(
        False,
        description="install Apptainer on hosts that have none, for `submit --container`; not on local nodes",
    )
    cupy: Toggle = Field(
        True,
        description="CuPy and CUDA's libraries (2.1 GB) for jobs, on nodes that show NVIDIA GPUs",
    )
    nvidia: Nvidia = Field(
        Nvidia(), description="what is installed on hosts with NVIDIA's cards; not on local nodes"
    )


class Monitoring(Model):
    """The telemetry step that runs beside every job, and the health of nodes."""

    interval: DurationS = Field(
        _SAMPLE_INTERVAL_S,
        description="time between two samples of a node",
        json_schema_extra={"default": format_duration(_SAMPLE_INTERVAL_S)},
    )
    health: Health = Field(Health(), description="the limits and the interval of the nodes' health check")
