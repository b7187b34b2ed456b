"""What the training loop sees of checkpoints: where it begins, and what happens between iterations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from payload.checkpoint.files import Manifest
from payload.checkpoint.folder import prepare
from payload.checkpoint.lock import Lock, lock
from payload.checkpoint.resume import Resumed, choose, refuse_others, resume
from payload.checkpoint.saver import Saver
from payload.checkpoint.stopping import StopSignals
from payload.comm.base import Communicator
from payload.config import TrainConfig
from payload.parallel.engine import Engine
from payload.settings import to_record


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
            self._lock = lock(self._folder, world)
            prepare(self._folder, world)
            refuse_others(self._folder, settings.resume, world)
        self._chosen = choose(settings.resume, self._folder, world)

    @property
    def learned(self) -> Mapping[str, Any] | None:
        """Of its data, by the run that this one goes on from; None where there is none."""
        return self._chosen.learned if self._chosen else None

    def resume(
        self,
        engine: Engine,
        identity: Mapping[str, Any] = MappingProxyType({}),
        learned: Mapping[str, Any] = MappingProxyType({}),
    ) -> Resumed:
        """Load what the run goes on from.

        Args:
            identity: what the run must have in common with that.
            learned: of its data, to be kept in the checkpoints that it makes.

        Raises:
            UsageError: it has not; on every rank.
        """
        self._engine, self._learned = engine, learned
        self._now = self._describe(engine, identity)
        return resume(self._chosen, engine, self._now)

    def saver(
        self, record: Callable[..., None], say: Callable[[str], None], signals: StopSignals | None = None
    ) -> AbstractContextManager[Saver | None]:
        """To be entered for the whole of training, which has been resumed. None without checkpoints: a signal
        ends such a run as it ends any process."""
        settings = self._config.checkpoints
        if not settings.save_interval:
            return nullcontext()
        return Saver(
            self._engine,
            self._folder,
            lambda iteration: replace(self._now, iteration=iteration),
            record,
            interval=settings.save_interval,
            keep=settings.keep,
            wait=settings.save == "sync",
            learned=self._learned,
            lock=self._lock,
            say=say,
            signals=signals,
        )

    def _describe(self, engine: Engine, identity: Mapping[str, Any]) -> Manifest:
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
