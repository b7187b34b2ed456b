"""The checkpoints of one run, as the training loop sees them: it resumes from one, and makes others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from payload.checkpoint.folder import Lock, complete, prepare
from payload.checkpoint.saver import Saver
from payload.checkpoint.shards import (
    BrokenError,
    Manifest,
    Reader,
    held_shards,
    own_state,
    read_data,
    read_manifest,
    set_scalars,
    verify,
)
from payload.cli.config import TrainConfig
from payload.cli.settings import to_record
from payload.comm.base import Communicator, on_all_ranks
from payload.errors import UsageError
from payload.parallel.engine import Engine

if TYPE_CHECKING:
    from payload.cli.report import Report  # it needs MPI, which one rank does without


class Session:
    """The checkpoints of one run: the one that it goes on from, and those that it makes."""

    def __init__(self, config: TrainConfig, world: Communicator) -> None:
        """Make the folder ready, and choose what the run goes on from.

        Raises:
            UsageError: that is broken, or the folder cannot be used; on every rank.
        """
        settings = config.checkpoints
        self._config = config
        self._folder = settings.checkpoints or config.run.out / "checkpoints"
        self._lock: Lock | None = None
        if settings.save_interval and not config.batch.find:
            self._lock = on_all_ranks(world, lambda: Lock(self._folder) if world.rank == 0 else None)
            prepare(self._folder, world)
            refuse_others(self._folder, settings.resume, world)
        self.chosen = choose(settings.resume, self._folder, world)

    @property
    def data_state(self) -> Mapping[str, Any] | None:
        """Of its data, by the run that this one goes on from; None where there is none."""
        return self.chosen.data_state if self.chosen else None

    def saver(
        self,
        engine: Engine,
        now: Manifest,
        report: Report,
        *,
        data_state: Mapping[str, Any],
        save_model: Callable[[Path], Mapping[str, Any]],
    ) -> AbstractContextManager[Saver | None]:
        """To be entered for the whole of training, which has been resumed. None without checkpoints.

        Args: as of ``Saver``.
        """
        settings = self._config.checkpoints
        if not settings.save_interval:
            return nullcontext()
        return Saver(
            engine,
            self._folder,
            now,
            report,
            interval=settings.save_interval,
            keep=settings.keep,
            wait=settings.save == "sync",
            data_state=data_state,
            lock=self._lock,
            save_model=save_model,
        )

    def describe(self, engine: Engine, identity: Mapping[str, Any]) -> Manifest:
        """Return what this run is.

        Args:
            identity: what it must have in common with the run that it goes on from.
        """
        config, mesh = self._config, engine.mesh
        compressed = config.layout.compress != "none"  # what is held back is a multiple of the scale
        return Manifest(
            iteration=0,
            layout={
                "dp": mesh.dp.size,
                "tp": mesh.tp.size,
                "pp": mesh.pp.size,
                "zero": config.layout.zero,
                "bucket-mib": config.layout.bucket_mib,
                **({"loss-scale": config.precision.loss_scale or 1} if compressed else {}),
            },
            identity=identity,
            scalars={},
            config=to_record(config.placed()),
            files=(),
        )


@dataclass(frozen=True, slots=True)
class Chosen:
    """A whole checkpoint, to go on from."""

    path: Path
    manifest: Manifest
    data_state: Mapping[str, Any]  # of the data that it was trained on
    notes: list[str]  # for people, of newer ones that are broken


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where a run begins."""

    iteration: int = 0  # the last that is done; 0: it starts anew
    notes: list[str] = field(default_factory=list)  # for people
    path: Path | None = field(default=None, compare=False)  # of the checkpoint
    model: Mapping[str, Any] = field(default_factory=dict, compare=False)  # as of its manifest


def choose(wanted: str, folder: Path, world: Communicator) -> Chosen | None:
    """What ``--resume`` says, each of its files checked; None where that is nothing.

    Args:
        wanted: ``never``; ``auto``, for the newest in ``folder`` that is whole, if there are any; or the
            folder of a checkpoint.

    Raises:
        UsageError: it is broken; on every rank.
    """
    notes: list[str] = []
    newest_first = list(reversed(complete(folder).values())) if wanted == "auto" else [Path(wanted)]
    for path in world.allgather(newest_first if wanted != "never" else [])[0]:
        try:
            return Chosen(path, *_inspect(path, world), notes)
        except BrokenError as exc:
            notes.append(f"{path} is broken: {exc}")
            if wanted != "auto":
                raise UsageError(f"--resume: {notes[0]}", code="checkpoint-damaged") from exc
    if notes:
        raise UsageError(
            f"--resume auto: all checkpoints are broken: {'; '.join(notes)}; remove them to start anew",
            code="checkpoints-all-damaged",
        )
    return None


def resume(chosen: Chosen | None, engine: Engine, now: Manifest) -> Resumed:
    """Load it.

    Args:
        now: what this run is.

    Raises:
        UsageError: it is of another kind of run.
    """
    if chosen is None:
        return Resumed()
    path, manifest = chosen.path, chosen.manifest
    _compare(path, manifest.identity, now.identity)
    same = manifest.layout == now.layout
    on_all_ranks(engine.mesh.world, lambda: _load(engine, path, manifest, own=same))
    note = f"going on from {path}{'' if same else _resharding(manifest, now, engine)}"
    return Resumed(manifest.iteration, [*chosen.notes, note], path, manifest.model)


def refuse_others(folder: Path, wanted: str, world: Communicator) -> None:
    """Checkpoints of another run, or of iterations that this run is about to do otherwise, must not be mixed
    with its own, which would replace them.

    Raises:
        UsageError: there are such, on every rank.
    """

    def look() -> None:
        there = list(complete(folder).values())
        if there and Path(wanted).resolve() != there[-1].resolve():
            raise UsageError(
                f"--resume {wanted}: {there[-1]} is there already: go on from it with --resume auto, remove "
                "it, or give another folder with --checkpoints",
                code="checkpoint-newer-exists",
            )

    if wanted != "auto":  # with which the folder is this run's own
        on_all_ranks(world, lambda: look() if world.rank == 0 else None)


def _inspect(path: Path, world: Communicator) -> tuple[Manifest, Mapping[str, Any]]:
    """Return the manifest and the data state, or raise BrokenError on all ranks; each verifies some files."""

    def look() -> Manifest:
        manifest = read_manifest(path)
        for facts in manifest.files[world.rank :: world.size]:
            verify(path, facts)
        return manifest

    manifest = on_all_ranks(world, look)
    data_state = on_all_ranks(world, lambda: read_data(path) if world.rank == 0 else {})
    return manifest, world.allgather(data_state)[0]


def _compare(path: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raise UsageError if they differ in something that is ours."""
    made, here = ({name: _text(value) for name, value in one.items()} for one in (theirs, ours))
    different = [name for name in here if made.get(name) != here[name]]
    if different:
        was, now = (
            ", ".join(f"{name} {one.get(name, 'none')}" for name in different) for one in (made, here)
        )
        raise UsageError(
            f"--resume: {path} was made with {was}, and this run has {now}", code="checkpoint-other-settings"
        )


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _resharding(saved: Manifest, now: Manifest, engine: Engine) -> str:
    def text(layout: Mapping[str, float]) -> str:
        return ", ".join(f"{name} {size}" for name, size in layout.items())

    own = "; what ranks kept of compressed gradients starts anew" if engine.own_state else ""
    return f", from {text(saved.layout)} to {text(now.layout)}{own}"


def _load(engine: Engine, path: Path, manifest: Manifest, *, own: bool) -> None:
    """``own``: the layout is the same, so that what belongs to a rank alone fits, too."""
    reader = Reader(path, manifest)
    kept = [each for each in own_state(engine) if own and reader.holds(*each)]
    for shard, array in [*held_shards(engine), *kept]:
        numbers = reader.read(shard, np.dtype(array.dtype))
        array[...] = numbers if isinstance(array, np.ndarray) else engine.device.asarray(numbers)
    set_scalars(engine, manifest.scalars)
    engine.storage.publish()
