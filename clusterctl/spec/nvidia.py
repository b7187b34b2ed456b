"""What of NVIDIA's software is installed on hosts with its cards: `software.nvidia`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from clusterctl.spec.base import Model, Toggle

_TOOLKIT: Final = r"^1[1-9]\.[0-9]{1,2}$"
_BRANCH: Final = r"^[1-9][0-9]{2}$"
_BRANCH_ALONE: Final = "a branch is of a driver that is to be installed: write driver: open, too"
NVIDIA_PATTERN_WORDS: Final[Mapping[str, str]] = {
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
