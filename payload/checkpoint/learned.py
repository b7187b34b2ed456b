"""What a run learned of its training data, such as a tokenizer: a small file beside its checkpoints.

What goes on from one of them, or judges it, reads its data by that file, whatever the data is now.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from payload.checkpoint.files import BrokenError, read_manifest
from payload.checkpoint.resume import candidates
from payload.comm.base import Communicator, together
from payload.errors import UsageError

FILE = "data.json"


def save(learned: Mapping[str, Any], folder: Path) -> None:
    """Write it whole, or leave what was there.

    Raises:
        UsageError: it cannot be written.
    """
    file = folder / FILE
    try:
        new = file.with_name(f"{FILE}.new")
        new.write_text(json.dumps(dict(learned)) + "\n")
        new.replace(file)
    except OSError as exc:
        raise UsageError(f"--checkpoints: {file} cannot be written: {exc.strerror}") from exc


def load(wanted: str, folder: Path, world: Communicator) -> Mapping[str, Any] | None:
    """Of the run that ``--resume`` names, read by rank 0; None where there is none, and a run starts anew.

    Args:
        wanted, folder: as of ``resume``.

    Raises:
        UsageError: it cannot be used; on every rank.
    """

    def read() -> Mapping[str, Any] | None:
        begun = candidates(wanted, folder)
        return _read(begun[0], whole=wanted != "auto") if begun else None

    return world.allgather(together(world, lambda: read() if world.rank == 0 else None))[0]


def _read(checkpoint: Path, *, whole: bool) -> Mapping[str, Any]:
    """``whole``: there is no other that could be taken."""
    file = checkpoint.resolve().parent / FILE
    try:
        if whole:
            read_manifest(checkpoint)
        learned = json.loads(file.read_text())
    except BrokenError as exc:
        raise UsageError(f"--resume: {checkpoint} is broken: {exc}") from exc
    except OSError as exc:
        raise UsageError(
            f"--resume: {file} cannot be read: {exc.strerror}; the checkpoints beside it need it"
        ) from exc
    except ValueError as exc:
        raise UsageError(f"--resume: {file} is not as it was written: {exc}") from exc
    if not isinstance(learned, dict):
        raise UsageError(f"--resume: {file} is not as it was written: it is no JSON object")
    return learned
