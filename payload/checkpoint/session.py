"""What the training loop sees of checkpoints: where it begins, and what happens between iterations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from payload.checkpoint.files import Manifest
from payload.checkpoint.folder import prepare
from payload.checkpoint.learned import load, save
from payload.checkpoint.lock import Lock, lock
from payload.checkpoint.resume import Resumed, refuse_others, resume
from payload.checkpoint.saver import Saver
from payload.checkpoint.stopping import StopSignals
from payload.comm.base import Communicator, together
from payload.config import TrainConfig
from payload.parallel.engine import Engine
from payload.settings import to_record


@dataclass(slots=True)
class Session:
    """The checkpoints of one run."""

    config: TrainConfig
    engine: Engine
    identity: Mapping[str, Any] = field(default_factory=dict)
    """What it must have in common with a checkpoint that it goes on from."""
    learned: Mapping[str, Any] = field(default_factory=dict)
    """Of its data, to be kept with its checkpoints."""
    _lock: Lock | None = field(default=None, init=False)

    def resume(self) -> Resumed:
        """Make the folder ready, and load what the run goes on from.

        Raises:
            UsageError: it cannot be gone on from, or the folder cannot be used.
        """
        settings, world = self.config.checkpoints, self.engine.mesh.world
        if settings.save_interval:
            self._lock = lock(self._folder, world)
            prepare(self._folder, world)
            refuse_others(self._folder, settings.resume, world)
        resumed = resume(settings.resume, self._folder, self.engine, self._describe(0))
        if settings.save_interval:
            together(world, lambda: save(self.learned, self._folder) if world.rank == 0 else None)
        return resumed

    def saver(
        self, record: Callable[..., None], say: Callable[[str], None], signals: StopSignals | None = None
    ) -> AbstractContextManager[Saver | None]:
        """To be entered for the whole of training. None without checkpoints: a signal ends such a run as it
        ends any process."""
        settings = self.config.checkpoints
        if not settings.save_interval:
            return nullcontext()
        return Saver(
            self.engine,
            self._folder,
            self._describe,
            record,
            interval=settings.save_interval,
            keep=settings.keep,
            wait=settings.save == "sync",
            lock=self._lock,
            say=say,
            signals=signals,
        )

    @property
    def _folder(self) -> Path:
        return _folder_of(self.config)

    def _describe(self, iteration: int) -> Manifest:
        config, mesh = self.config, self.engine.mesh
        compressed = config.layout.compress != "none"  # what is held back is a multiple of the scale
        return Manifest(
            iteration=iteration,
            layout={
                "dp": mesh.dp.size,
                "tp": mesh.tp.size,
                "pp": mesh.pp.size,
                "zero": config.layout.zero,
                "bucket-mib": config.layout.bucket_mib,
                **({"loss-scale": config.precision.loss_scale or 1} if compressed else {}),
            },
            identity=self.identity,
            scalars={},
            config=to_record(config),
            files=(),
        )


def learned_before(config: TrainConfig, world: Communicator) -> Mapping[str, Any] | None:
    """Of its data, by the run that this one goes on from or judges; None where there is none.

    Raises:
        UsageError: it cannot be used; on every rank.
    """
    return load(config.checkpoints.resume, _folder_of(config), world)


def _folder_of(config: TrainConfig) -> Path:
    return config.checkpoints.checkpoints or config.run.out / "checkpoints"
