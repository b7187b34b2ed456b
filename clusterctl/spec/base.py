"""What all models of a spec share: their base class, paths, networks, ranges of hosts, GPUs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from ipaddress import IPv4Network
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Final

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationInfo,
    WithJsonSchema,
)

if TYPE_CHECKING:
    from clusterctl.spec.checks import Raw
    from clusterctl.spec.messages import Finding
    from clusterctl.spec.models import ClusterSpec
    from clusterctl.spec.onprem import OnpremHost, Switch


class Model(BaseModel):
    """Base of all spec models: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ProviderSettings(Model):
    """Settings of a provider, with the traits by which the rest of clusterctl tells one from another.

    The traits and properties below are the only questions about a provider that need no ``Provider``.
    """

    type: str
    user_owned: ClassVar[bool] = False  # hosts are the user's: joined, later released as they were
    shares_kernel: ClassVar[bool] = (
        False  # hosts are parts of this machine: no reboot, no firewall of their own
    )
    is_cloud: ClassVar[bool] = False  # hosts are rented, by machine type

    @property
    def machines(self) -> Mapping[str, OnpremHost]:
        """Access to each host that the user owns, by name."""
        return {}

    @property
    def known_network(self) -> IPv4Network | None:
        """The cluster's network, where it is known before its hosts are probed."""
        return None

    @property
    def switches(self) -> Mapping[str, Switch]:
        """The switches of the fast network, by name."""
        return {}

    @property
    def location(self) -> Mapping[str, str]:
        """The project and the zone of rented hosts."""
        return {}

    @property
    def idle_timeout_s(self) -> int | None:
        """The seconds without work after which the cluster takes itself down; None: it does not."""
        return None

    @classmethod
    def findings(cls, spec: Raw) -> Iterator[Finding]:  # noqa: ARG003
        """The cross-field faults of a spec with this provider, given as plain values."""
        yield from ()

    def controller_of(self, cluster: str) -> str:
        """The name of the controller of a cluster with this name."""
        return f"{cluster}-ctl"

    def expected_release(self, spec: ClusterSpec) -> str | None:  # noqa: ARG002
        """The distribution that all hosts will have; None where they have to be probed for it."""
        return None


def _as_text(value: object) -> object:
    """Numbers are addresses to ``ipaddress``."""
    return str(value) if isinstance(value, int) else value


URL: Final = r"^https?://[A-Za-z0-9._~:/@%+-]+$"

PRIVATE_NETWORKS: Final = tuple(IPv4Network(n) for n in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"))

Url = Annotated[str, StringConstraints(pattern=URL)]
Toggle = Annotated[bool, Field(strict=True)]  # `yes` in quotes and 1 are neither true nor false
Network = Annotated[IPv4Network, BeforeValidator(_as_text)]


GPU_TYPE: Final = r"^[a-z][a-z0-9-]{1,30}$"
MOST_GPUS: Final = 16


class Gpus(Model):
    """The GPUs of a node."""

    type: Annotated[str, StringConstraints(pattern=GPU_TYPE)] = Field(
        description="their type, such as l4, t4, a100, h100"
    )
    count: Annotated[int, Field(ge=1, le=MOST_GPUS, strict=True)] = Field(
        1, description="how many on each node"
    )

    def __str__(self) -> str:
        """``2 x l4``."""
        return f"{self.count} x {self.type}"


HERE: Final = "folder"  # in the validation context: the folder that paths are relative to


def folder_of(info: ValidationInfo) -> Path:
    """The folder that the paths of a file are relative to."""
    here: Path = (info.context or {}).get(HERE, Path())
    return here


def _located(path: Path, info: ValidationInfo) -> Path:
    if not path.name:
        raise ValueError("the name of a file is missing here")
    return folder_of(info) / path


def _expanded(text: str, info: ValidationInfo) -> str:
    if not text.strip():
        raise ValueError("the name of a file is missing here")
    return str(folder_of(info) / os.path.expanduser(text))  # noqa: PTH111 - it never raises


FileName = Annotated[
    Path, AfterValidator(_located), WithJsonSchema({"type": "string", "examples": ["requirements.txt"]})
]

# As text: it is written into an ssh_config.
KeyFile = Annotated[
    str, AfterValidator(_expanded), WithJsonSchema({"type": "string", "examples": ["~/.ssh/id_ed25519"]})
]


MOST = 1000  # names of one range

_RANGE = re.compile(r"\[([^\[\]]*)\]")
_PART = re.compile(r"(\d+)(?:-(\d+))?")


def expand(text: str) -> tuple[str, ...]:
    """Every name of a range, of several separated by commas, or of none.

    Raises:
        ValueError: it is no range; the message says what is wrong with it.
    """
    names = tuple(name for part in _split(text) for name in _names(part))
    if len(names) > MOST:
        raise ValueError(f"{text!r} has more than {MOST} names")
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{text!r} has {twice!r} twice")
    return names


def _split(text: str) -> Iterator[str]:
    """The parts between commas that stand outside of brackets."""
    for part in re.split(r",(?![^\[]*\])", text):
        if not part.strip():
            raise ValueError(f"{text!r} has an empty name")
        yield part.strip()


def _names(part: str) -> Iterator[str]:
    *pairs, tail = _RANGE.split(part)
    if any(bracket in plain for plain in (*pairs[::2], tail) for bracket in "[]"):
        raise ValueError(f"{part!r} has a bracket without its other")
    heads, choices = pairs[::2], [list(_numbers(inner, part)) for inner in pairs[1::2]]
    for chosen in product(*choices):
        yield "".join(head + number for head, number in zip(heads, chosen, strict=True)) + tail


def _numbers(inner: str, part: str) -> Iterator[str]:
    for piece in inner.split(","):
        found = _PART.fullmatch(piece.strip())
        if found is None:
            raise ValueError(f"{part!r}: {piece!r} is neither a number nor a range such as 01-08")
        first, last = found[1], found[2] or found[1]
        if int(last) < int(first) or int(last) - int(first) >= MOST:
            raise ValueError(f"{part!r}: {piece!r} is no range of at most {MOST} numbers, the smaller first")
        for number in range(int(first), int(last) + 1):
            yield f"{number:0{len(first)}d}"
