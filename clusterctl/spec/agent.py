"""What agents may do for the user: the section `agent` of the user's configuration."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Final

from pydantic import BeforeValidator, Field, PlainSerializer, WithJsonSchema

from clusterctl.errors import BadValueError
from clusterctl.spec.base import HERE, KeyFile, SlurmName, SpecModel, Toggle
from clusterctl.spec.parse import Document, Filetype, read_text
from clusterctl.spec.units import shown

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


_TEXT: Final = PlainSerializer(lambda value: UNLIMITED if value is None else value)
_SCHEMA: Final = WithJsonSchema(
    {"anyOf": [{"type": "number", "minimum": 0}, {"const": UNLIMITED}], "examples": [8]}
)
Amount = Annotated[float | None, BeforeValidator(_amount), _TEXT, _SCHEMA]
Count = Annotated[int | None, BeforeValidator(_count), _TEXT, _SCHEMA]


class AgentLimits(SpecModel):
    """What agents may do through `clusterctl mcp`. No argument of a call loosens these limits."""

    clusters: tuple[SlurmName, ...] | None = Field(
        None,
        description="clusters that agents may change and submit to. Default: those on this machine "
        "(provider local). Agents may read the others",
    )
    accounts: tuple[SlurmName, ...] = Field(
        (),
        description="Slurm accounts that jobs may name. Without any, jobs name none and run on "
        "your default account; with some, each job names one of them",
    )
    node_hours_per_day: Amount = Field(
        24,
        description="node hours of the jobs of the last 24 hours: nodes times the time limit until "
        "a job has ended, then what it used",
    )
    usd_per_day: Amount = Field(
        0, description="cost of the jobs and clusters of the last 24 hours, in the same way"
    )
    jobs_at_once: Count = Field(
        20,
        description="pending and running jobs; of an array or a sweep, all tasks count until the last "
        "has ended",
    )
    nodes_per_cluster: Count = Field(
        16, description="nodes of a cluster that agents may bring up, in its spec"
    )
    failures_in_a_row: Count = Field(
        5,
        description="failed jobs without a completed job in between, after which agents submit "
        "nothing until you run `clusterctl agent resume`; an array or a sweep is one, and failed if "
        "no task completed",
    )
    commands_per_hour: Count = Field(
        300,
        description="commands of clusterctl on the login node of an attached cluster in the last "
        "hour, yours included",
    )
    verbs_off: tuple[str, ...] = Field(
        (), description="commands that agents may not use, such as `up` or `node remove`"
    )
    discard: Toggle = Field(
        False, description="whether `down --discard` may delete what exists only on the cluster"
    )
    others_jobs: Toggle = Field(
        False, description="whether agents may cancel jobs that no agent has submitted"
    )
    secrets: tuple[str, ...] = Field(
        (),
        description="environment variables of yours whose values jobs may get, by --env NAME or "
        "--secret NAME",
    )
    folders: tuple[KeyFile, ...] = Field(
        (),
        description="folders that may be read, sent and written, beside the project's",
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
