"""What a host is asked to show of itself, and what it showed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from clusterctl.errors import TransportError, UnreachableError
from clusterctl.hosts.gpus import Driver
from clusterctl.hosts.slurm_facts import (
    FACTS_ARGV,
    NodeFacts,
    count_on_bus,
    has_slurmd,
    parse_driver,
    parse_facts,
)
from clusterctl.spec.units import format_size

_PROGRAM = (Path(__file__).parent / "remote_probe.py").read_text(encoding="utf-8")
_STOPPING = "stopping"

Marks = Mapping[
    str, str
]  # "file /etc/munge/munge.key" -> its hash, mode and owner; "unit munge" -> "running"


@dataclass(frozen=True, slots=True)
class Question:
    """What of a host is to be looked at. Kinds and names become the keys of its marks."""

    files: tuple[str, ...] = ()
    blocks: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # file -> first and last line
    paths: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    homes: Mapping[str, str] = field(default_factory=dict)  # user -> folder
    far_homes: Mapping[str, str] = field(default_factory=dict)  # user -> folder, for another host to look at
    keys: Mapping[str, str] = field(default_factory=dict)  # user -> public key; unless the home is far
    units: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # unit -> files it reads at its start
    accounting: tuple[tuple[str, ...], ...] = ()  # words for `sacctmgr show`
    space: tuple[str, ...] = ("/",)

    def argv(self) -> tuple[str, ...]:
        """The command that answers it, as the admin user."""
        request = json.dumps({"facts": FACTS_ARGV, **asdict(self)})
        return ("sudo", "-n", "/usr/bin/python3", "-I", "-S", "-c", _PROGRAM, request)


@dataclass(frozen=True, slots=True)
class FullDisk:
    """A file system without room: sizes in bytes; ``largest`` are its largest files with theirs."""

    path: str
    free: int
    size: int
    names: bool  # False: it can't take another file, however small
    largest: tuple[tuple[int, str], ...]

    def __str__(self) -> str:
        left = f"{self.free} bytes of {format_size(self.size >> 20)} free" if self.names else "no inodes free"
        files = ", ".join(f"{path} ({format_size(max(1, size >> 20))})" for size, path in self.largest)
        return f"{self.path} is full ({left})" + (f"; the largest files are {files}" if files else "")


@dataclass(frozen=True, slots=True)
class View:
    """A host as it showed itself."""

    facts: NodeFacts | None  # None: it has no slurmd
    marks: Marks
    full: tuple[FullDisk, ...] = ()
    distribution: str = ""  # ID and VERSION_ID of its os-release
    driver: Driver = field(default_factory=Driver)  # NVIDIA's
    cards: int = 0  # NVIDIA's, on the PCI bus


class StoppingError(TransportError):
    """The host answers, but is on its way down."""


def parse_view(text: str) -> View:
    """The answer to a ``Question``.

    Raises:
        StoppingError: the host is being powered off.
        UnreachableError: it was too busy to say what it has.
        SlurmError: slurmd is there, and does not say what the node is.
        TransportError: that is no answer.
    """
    try:
        answer: dict[str, Any] = json.loads(text)
        if answer["state"] == _STOPPING:
            raise StoppingError("the host is being powered off")
        facts, marks, distribution = str(answer["facts"]), dict(answer["marks"]), str(answer["distribution"])
        full = tuple(
            FullDisk(**{**disk, "largest": tuple((size, path) for size, path in disk["largest"])})
            for disk in answer["full"]
        )
    except (ValueError, KeyError, TypeError) as exc:
        raise TransportError("the host gave no usable answer", why=text[:500]) from exc
    if not facts:  # it could not start what tells them, or not in time: it is too busy, or still booting
        raise UnreachableError(
            "the host could not say what it has", why="it is busy", fix="look at its load, then try again"
        )
    known = parse_facts(facts) if has_slurmd(facts) else None
    return View(known, marks, full, distribution, parse_driver(facts), count_on_bus(facts))
