"""When a node is sick: `monitoring.health`."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field, field_validator

from clusterctl.spec.base import Model
from clusterctl.spec.units import DurationS, SizeMib, format_duration, format_size

_INTERVAL_S: Final = 60
_LEAST_INTERVAL_S: Final = 5  # checks that follow each other keep slurmctld from asking resumed nodes
_DISK_FREE_MIB: Final = 50
_CLOCK_OFFSET_S: Final = 5


class Health(Model):
    """The check that drains a sick node, and resumes it once it is well. See docs/gpus.md."""

    interval: DurationS = Field(
        _INTERVAL_S,
        description="how often a node looks at itself",
        json_schema_extra={"default": format_duration(_INTERVAL_S)},
    )
    gpu_temperature: Annotated[int, Field(ge=40, le=120, strict=True)] = Field(
        90, description="the hottest that a GPU may be, in °C"
    )
    disk_free: SizeMib = Field(
        _DISK_FREE_MIB,
        description="the least room on each of a node's own file systems",
        json_schema_extra={"default": format_size(_DISK_FREE_MIB)},
    )
    clock_offset: DurationS = Field(
        _CLOCK_OFFSET_S,
        description="the most that a clock may be off, where chrony runs",
        json_schema_extra={"default": format_duration(_CLOCK_OFFSET_S)},
    )

    @field_validator("interval")
    @classmethod
    def _time_between(cls, value: int) -> int:
        if value < _LEAST_INTERVAL_S:
            raise ValueError(f"{format_duration(_LEAST_INTERVAL_S)} is the least between two looks")
        return value
