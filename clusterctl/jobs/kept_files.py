"""What clusterctl keeps for later jobs in the job user's folder on a cluster: Python environments,
results of builds, container images, and the files that were sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from clusterctl.errors import TransportError
from clusterctl.transport.base import Transport
from clusterctl.transport.tree import format_size
from clusterctl.util.numbers import counted

_SCRIPT: Final = Path(__file__).with_name("remote_kept.sh").read_text(encoding="utf-8")
_PATIENCE_S: Final = 20.0
# Folder -> what its entries are.
_NOUNS: Final = {
    "pythons": "Python",
    "environments": "environment",
    "builds": "build",
    "images": "container image",
    "store": "sent file",
}


@dataclass(frozen=True, slots=True)
class Kept:
    """The entries of a folder. bytes: None: their size takes too long to find out."""

    number: int
    bytes: int | None


def kept_files(transport: Transport, folder: str) -> Mapping[str, Kept]:
    """Return what is kept on a host, by the folder's name. Empty: nothing, or the host doesn't tell.

    transport: a connection as the job user. folder: of clusterctl in the user's home.
    """
    try:
        argv = ["sh", "-c", _SCRIPT, "kept", folder]
        answer = transport.run(argv, check=False, timeout_s=_PATIENCE_S).stdout
    except TransportError:
        return {}
    found = {}
    for line in answer.splitlines():
        name, *numbers = line.split()
        match numbers:
            case [number, size] if name in _NOUNS and number.isdecimal():
                found[name] = Kept(int(number), int(size) << 10 if size.isdecimal() else None)
    return {name: found[name] for name in _NOUNS if name in found}


def summary(kept: Mapping[str, Kept]) -> str:
    """Return a text such as "2 environments, 1.2 GiB; 1 build, 3.0 MiB". Empty: nothing is kept."""
    return "; ".join(
        f"{counted(one.number, _NOUNS[name])}, "
        f"{'of unknown size' if one.bytes is None else format_size(one.bytes)}"
        for name, one in kept.items()
        if one.number
    )
