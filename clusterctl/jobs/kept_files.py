"""Files that clusterctl keeps for later jobs in the job user's folder on a cluster: Python
environments, results of builds, container images, and the files that were sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from clusterctl.errors import TransportError
from clusterctl.spec.remote_folders import FOLDERS
from clusterctl.transport.base import Transport
from clusterctl.util import formatting
from clusterctl.util.numbers import counted

_SCRIPT: Final = Path(__file__).with_name("remote_kept.sh").read_text(encoding="utf-8")
_PATIENCE_S: Final = 20.0
_SIZES_S: Final = 3
_COUNTED: Final = {folder.name: folder for folder in FOLDERS if folder.noun}


@dataclass(frozen=True, slots=True)
class KeptFiles:
    """The entries of a folder. bytes: None: their size takes too long to find out."""

    number: int
    bytes: int | None


def kept_files(transport: Transport, folder: str) -> Mapping[str, KeptFiles]:
    """Return the kept files on a host, by the folder's name. Empty: nothing, or the host doesn't
    tell.

    transport: a connection as the job user. folder: of clusterctl in the user's home.
    """
    try:
        argv = ["sh", "-c", _SCRIPT, "kept", folder, str(_SIZES_S)]
        argv += [word for one in _COUNTED.values() for word in (one.name, one.entries)]
        answer = transport.run(argv, check=False, timeout_s=_PATIENCE_S).stdout
    except TransportError:
        return {}
    numbers = {}
    sizes = {}
    for line in answer.splitlines():
        match line.split():
            case ["number", name, text] if name in _COUNTED and text.isdecimal():
                numbers[name] = int(text)
            case ["kib", name, text] if text.isdecimal():
                sizes[name] = int(text) << 10
    return {name: KeptFiles(numbers[name], sizes.get(name)) for name in _COUNTED if name in numbers}


def summary(kept: Mapping[str, KeptFiles]) -> str:
    """Return a text such as "2 environments, 1.2 GiB; 1 build, 3.0 MiB". Empty: nothing is kept."""
    return "; ".join(
        f"{counted(one.number, _COUNTED[name].noun)}, "
        f"{'of unknown size' if one.bytes is None else formatting.size(one.bytes)}"
        for name, one in kept.items()
        if one.number
    )
