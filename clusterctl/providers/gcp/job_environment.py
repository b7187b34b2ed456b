"""What jobs find in their environment, by machine type; the values are data."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Final

from ruamel.yaml import YAML

from clusterctl.spec.base import Model
from clusterctl.spec.gcp_machines import Machine

_NAME_PARTS: Final = 2  # of a machine type, that name its family: a3-highgpu


class _Data(Model):
    gpu: Mapping[str, str]
    gvnic: Mapping[str, str]
    notes: Mapping[str, str]


def job_environment(machine: Machine, *, gvnic: bool) -> dict[str, str]:
    """The variables of all jobs on such a machine; none where there is no GPU."""
    if machine.gpu is None:
        return {}
    return {**_data().gpu, **(_data().gvnic if gvnic else {})}


def note(machine: Machine) -> str | None:
    """What its network could do beyond plain sockets, and what that takes."""
    family = "-".join(machine.name.split("-")[:_NAME_PARTS])
    said = _data().notes.get(family)
    return f"{family}: jobs talk over gVNIC's sockets; {said} (docs/gcp.md)" if said else None


@cache
def _data() -> _Data:
    text = (files("clusterctl.providers.gcp") / "data" / "jobs.yaml").read_text("utf-8")
    return _Data.model_validate(YAML(typ="safe").load(text))
