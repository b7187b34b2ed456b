"""What agents may do for the user: the section `agent` of the user's configuration."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Final

from pydantic import BeforeValidator, Field, PlainSerializer, WithJsonSchema

from clusterctl.errors import BadValueError
from clusterctl.spec.base import HERE, KeyFile, SpecModel, spelled
from clusterctl.spec.parse import Document, Filetype, read_text
from clusterctl.spec.units import parse_slurm_time_s, shown
from clusterctl.util import formatting

UNLIMITED: Final = "unlimited"
# What a file with a value of its own would be, in the sections of other programs.
_EXAMPLE: Final = "write `agent:`, and its keys below it, or remove the file"


def _amount(value: object) -> float | None:
    """Parse a limit. None: there is no limit."""
    if value == UNLIMITED:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0:  # type: ignore[operator, arg-type]
        raise BadValueError(
            "not-a-limit", f"{shown(value)} is not a limit; write a number such as 8, or unlimited"
        )
    return float(value)  # type: ignore[arg-type]


def _count(value: object) -> int | None:
    amount = _amount(value)
    if amount is not None and amount != int(amount):
        raise BadValueError("not-a-limit", f"{shown(value)} is not a whole number")
    return None if amount is None else int(amount)


def _time(value: object) -> int | None:
    """Parse a limit of time. None: there is no limit."""
    return None if value == UNLIMITED else parse_slurm_time_s(value)


_TEXT: Final = PlainSerializer(lambda value: UNLIMITED if value is None else value)
_SCHEMA: Final = WithJsonSchema(
    {"anyOf": [{"type": "number", "minimum": 0}, {"const": UNLIMITED}], "examples": [8]}
)
Amount = Annotated[float | None, BeforeValidator(_amount), _TEXT, _SCHEMA]
Count = Annotated[int | None, BeforeValidator(_count), _TEXT, _SCHEMA]
Time = Annotated[
    int | None,
    BeforeValidator(_time),
    PlainSerializer(lambda value: UNLIMITED if value is None else formatting.duration(value)),
    WithJsonSchema({"type": "string", "examples": ["12h"]}),
]


class AgentLimits(SpecModel):
    """What agents may do through `clusterctl mcp`. No argument of a call loosens these limits."""

    node_hours: Amount = Field(
        24,
        description="node hours of the jobs that agents submit in 24 hours: nodes times time limit, "
        "for all tasks of an array or sweep",
    )
    nodes: Count = Field(
        16,
        description="nodes of a job, of each task of an array or sweep, and of a cluster that "
        "agents bring up",
    )
    time: Time = spelled("24h", "time limit of a job, with all its restarts")
    folders: tuple[KeyFile, ...] = Field(
        (), description="folders that may be read, sent and written, beside the project's"
    )
    verbs_off: tuple[str, ...] = Field(
        ("down", "node remove"), description="commands that agents may not use; `[]`: none"
    )


def _section(value: object) -> object:
    # A section whose keys are all comments is empty.
    return {} if value is None else value


class UserConfiguration(SpecModel):
    """The user's configuration file."""

    agent: Annotated[AgentLimits, BeforeValidator(_section)] = Field(
        AgentLimits(), description="what agents may do through `clusterctl mcp`"
    )


CONFIGURATION: Final = Filetype(
    name="configuration",
    model=UserConfiguration,
    faults=lambda _: (),
    missing="create it",
    empty=_EXAMPLE,
    may_be_empty=True,
)


def read_limits(path: Path) -> AgentLimits:
    """Read the limits of agents from the user's configuration. Without the file, or if it is empty:
    the defaults.

    Raises:
        UsageError: the file can't be read.
        SpecError: the content of the file is wrong.
    """
    # A link to nowhere is an error, not a missing file: its limits would be lost silently.
    if not path.exists() and not path.is_symlink():
        return AgentLimits()
    text = read_text(path, CONFIGURATION)
    return Document(text, str(path), CONFIGURATION).model({HERE: path.parent}).agent
