"""The folder of a run's checkpoints: names, which are complete, and what killed runs left."""

from __future__ import annotations

import re
import secrets
import shutil
from pathlib import Path

from payload.comm.base import Communicator, together
from payload.errors import UsageError

_NAME = re.compile(r"iteration-(\d{8,})")
INCOMPLETE = ".incomplete"
OLD = f".old{INCOMPLETE}"  # while one is being removed


def checkpoint_name(iteration: int) -> str:
    return f"iteration-{iteration:08}"


def complete(folder: Path) -> dict[int, Path]:
    """By iteration, from the first to the last, whether whole or broken since."""
    found = {int(match[1]): path for path in folder.glob("*") if (match := _NAME.fullmatch(path.name))}
    return dict(sorted(found.items()))


def superseded(folder: Path, iteration: int, *, keep: int) -> list[Path]:
    """Which to remove once there is one of ``iteration``, to keep that and the newest before it; with what is
    left of those that could not be removed."""
    older = [path for number, path in complete(folder).items() if number < iteration]
    left = list(folder.glob(f"iteration-*{OLD}"))
    return left + (older[: len(older) - (keep - 1)] if len(older) >= keep else [])


def prepare(folder: Path, world: Communicator) -> None:
    """Make the folder on rank 0, without what killed runs left, and see that it is there for all ranks.

    Raises:
        UsageError: it cannot be written, or it is another one on another node.
    """
    mark = world.allgather(f".shared-{secrets.token_hex(8)}")[0]

    def make() -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for left in folder.glob(f"iteration-*{INCOMPLETE}"):
                shutil.rmtree(left)
            (folder / mark).touch()
        except OSError as exc:
            raise UsageError(f"--checkpoints: {exc.filename or folder}: {exc.strerror}") from exc

    def look() -> None:
        if not (folder / mark).exists():
            raise UsageError(
                f"--checkpoints: {folder} is not the same folder on all nodes: give a shared one"
            )

    together(world, lambda: make() if world.rank == 0 else None)
    try:
        together(world, look)
    finally:
        if world.rank == 0:
            (folder / mark).unlink(missing_ok=True)
