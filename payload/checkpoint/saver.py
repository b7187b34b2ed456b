"""Saves checkpoints during training: each rank copies its shards, and a thread writes the copy to
disk.
"""

from __future__ import annotations

import json
import secrets
import shutil
import signal
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType, MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from payload.checkpoint.folder import INCOMPLETE, FolderLock, checkpoint_name, superseded
from payload.checkpoint.shards import (
    DATA,
    MANIFEST,
    CheckpointManifest,
    FileFacts,
    plan_shards,
    rank_file,
    saved_shards,
    scalars,
)
from payload.checkpoint.writer import WriterThread, publish, update, write
from payload.comm.base import on_all_ranks
from payload.device.base import Mark
from payload.errors import PayloadError
from payload.parallel.engine import Engine

if TYPE_CHECKING:
    # At run time, this import would load MPI, which a single rank does not need.
    from payload.cli.report import ResultWriter

_NUMBERS = (signal.SIGTERM, signal.SIGUSR1)


class StopSignals:
    """Catches the signals that Slurm sends before it ends a job (SIGTERM, SIGUSR1), and sets
    ``came``.
    """

    def __init__(self) -> None:
        self.came = False
        self._before = {number: signal.signal(number, self._note) for number in _NUMBERS}

    def __enter__(self) -> StopSignals:
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the previous handlers, or ignore both signals if the run ends because of a
        signal.

        When a rank ends, srun sends SIGTERM to the other ranks. Python removes its handlers when it
        shuts down, but ignored signals remain ignored.
        """
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if self.came else handler)

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self.came = True


@dataclass(slots=True)
class _Save:
    manifest: CheckpointManifest
    copied: Mark
    # How long training has waited for this checkpoint.
    stall_s: float = 0.0
    has_started: bool = False


class Saver:
    """Saves checkpoints between iterations. All ranks must call its methods together."""

    def __init__(
        self,
        engine: Engine,
        folder: Path,
        manifest: CheckpointManifest,
        report: ResultWriter,
        *,
        interval: int,
        keep: int,
        wait: bool,
        data_state: Mapping[str, Any] = MappingProxyType({}),
        lock: FolderLock | None = None,
        save_model: Callable[[Path], Mapping[str, Any]] = lambda _: {},
        saved: int = 0,
    ) -> None:
        """
        Args:
            folder: folder of all checkpoints, see ``folder.prepare``.
            manifest: settings and layout for each checkpoint's manifest. Other fields are ignored.
            report: records each checkpoint, and prints warnings.
            interval: number of iterations between checkpoints.
            keep: number of checkpoints to keep.
            wait: whether training waits until each checkpoint is on disk.
            data_state: state of the data set, such as its tokenizer, to save in each checkpoint.
            lock: the folder's lock, on the rank that holds it. Released by ``__exit__``.
            save_model: called on rank 0 with the folder of each checkpoint. Writes the best weights
                so far into the folder, and returns their description for ``CheckpointManifest.model``. If it
                raises PayloadError, the checkpoint fails.
            saved: iteration of the newest checkpoint in the folder. 0: no checkpoint.
        """
        self._engine = engine
        self._device = engine.device
        self._world = engine.mesh.world
        self._folder = folder
        self._manifest = manifest
        self._report = report
        self._interval = interval
        self._keep = keep
        self._wait = wait
        self._lock = lock
        self._save_model = save_model
        self._data = json.dumps(dict(data_state)) + "\n"
        # Each run writes into its own folders, because ranks of a killed run may still be writing.
        self._token = self._world.allgather(secrets.token_hex(4))[0]
        self._saved_shards = saved_shards(engine)
        layout, offsets = plan_shards(self._saved_shards)
        # np.full touches all pages now, so that the first copy does not wait for the kernel.
        self._memory = np.full(layout.size, 0, np.uint8)
        self._memory[: len(layout.header)] = bytearray(layout.header)
        self._device.pin(self._memory)
        self._copies = [
            self._memory[offset : offset + array.nbytes].view(array.dtype)
            for (_, array), offset in zip(self._saved_shards, offsets, strict=True)
        ]
        self._writer = WriterThread()
        self._save: _Save | None = None
        # The newest checkpoint: its iteration, and on rank 0 also its manifest.
        self._saved = saved
        self._published = manifest
        self._failure: PayloadError | None = None

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        finished = False
        try:
            if error is None:
                self._finish()
                finished = True
        finally:
            self._writer.close(cancel=not finished)
            self._device.unpin(self._memory)
            # Remove unfinished files, which may have filled the disk.
            if not finished:
                for unfinished in self._folder.glob(f"*.{self._token}{INCOMPLETE}"):
                    shutil.rmtree(unfinished, ignore_errors=True)
            if self._lock:
                self._lock.close()

    def after(
        self,
        iteration: int,
        written: float,
        *,
        stop: bool = False,
        last: bool = False,
        evaluated: bool = True,
    ) -> None:
        """Save a checkpoint if it is due after this iteration, and complete the previous
        checkpoint.

        Args:
            written: number of ranks on which the method ``written`` returned True in this
                iteration.
            stop: whether the run stops early. In this case, wait until the checkpoint is on disk.
            last: whether this is the last iteration.
            evaluated: False if an evaluation is due after this iteration. In this case, also wait.
                Call the method ``evaluated`` after the evaluation.

        Raises PayloadError on every rank if a checkpoint could not be written.
        """
        if written == self._world.size:
            self._complete(wait=False)
        is_due = stop or last or iteration % self._interval == 0
        if is_due:
            self._begin(iteration, evaluated=evaluated)
        if stop or not evaluated or (is_due and self._wait):
            self._finish()

    def evaluated(self, iteration: int, *, stopped: bool) -> None:
        """Record in the checkpoint of this iteration that the evaluation is complete, with the best
        weights.

        stopped: a signal stopped the evaluation. In this case, save the iteration unless it is
        saved. Raises PayloadError on every rank if a checkpoint could not be written.
        """
        if stopped and iteration != self._saved:
            self._begin(iteration, evaluated=False)
            self._finish()
        elif not stopped and iteration == self._saved:
            folder = self._folder / checkpoint_name(iteration)
            is_first = self._world.rank == 0
            model = on_all_ranks(self._world, lambda: self._save_model(folder) if is_first else {})
            if is_first:
                manifest = replace(self._published, evaluated=True, model=model)
                self._writer.begin(update, folder / MANIFEST, manifest.encode())

    def _begin(self, iteration: int, *, evaluated: bool) -> None:
        if self._save:
            self._complete(wait=False)
        began = time.perf_counter()
        try:
            self._settle()
        # Only rank 0 fails here. All ranks learn of the error when they complete this checkpoint.
        except PayloadError as exc:
            self._failure = exc
        for (_, array), copy in zip(self._saved_shards, self._copies, strict=True):
            self._device.copy_out(array, copy)
        manifest = replace(
            self._manifest, iteration=iteration, scalars=scalars(self._engine), evaluated=evaluated
        )
        if self._world.rank == 0:
            try:
                manifest = replace(manifest, model=self._save_model(self._incomplete(iteration)))
            except PayloadError as exc:
                self._failure = exc
        self._save = _Save(manifest, self._device.mark())
        self._saved = iteration
        self.written()
        self._save.stall_s = time.perf_counter() - began

    def written(self) -> bool:
        """Start to write this rank's file if its copy in memory is complete. Return whether it is
        on disk.
        """
        save = self._save
        if save and not save.has_started and self._device.has_passed(save.copied):
            self._write(save)
        return save is not None and save.has_started and self._writer.ready

    def _write(self, save: _Save) -> None:
        save.has_started = True
        path = self._incomplete(save.manifest.iteration) / rank_file(self._world.rank)
        self._writer.begin(write, self._memory, path, self._writer.cancelled)

    def _complete(self, *, wait: bool) -> None:
        """Wait until all ranks' files are on disk. Then rank 0 starts to rename the checkpoint's
        folder.

        wait: whether to wait until the folder is renamed.
        """
        save = self._save
        self._save = None
        assert save is not None  # noqa: S101
        began = time.perf_counter()
        if not save.has_started:
            self._device.synchronize()
            self._write(save)
        written = self._world.allgather(on_all_ranks(self._world, self._written))
        if self._world.rank == 0:
            files = [
                FileFacts(rank_file(n), each["size"], each["crc32"])
                for n, each in enumerate(written)
            ]
            self._publish(save.manifest, files)
        if wait:
            on_all_ranks(self._world, self._settle)
        self._report.write(
            "checkpoint",
            step=save.manifest.iteration,
            stall_s=save.stall_s + time.perf_counter() - began,
            write_s=max(each["seconds"] for each in written),
            bytes=sum(each["size"] for each in written),
        )

    def _written(self) -> Any:
        """Wait until this rank's file is on disk. Return its size, CRC-32 and the seconds of
        writing.
        """
        if self._failure:
            raise self._failure
        return self._writer.result()

    def _publish(self, manifest: CheckpointManifest, files: list[FileFacts]) -> None:
        iteration = manifest.iteration
        data = self._data.encode()
        every = [FileFacts(DATA, len(data), zlib.crc32(data)), *files]
        self._published = replace(manifest, files=every)
        self._writer.begin(
            publish,
            self._incomplete(iteration),
            self._folder / checkpoint_name(iteration),
            {DATA: self._data, MANIFEST: self._published.encode()},
            {file.name: file.size for file in files},
            superseded(self._folder, iteration, keep=self._keep),
        )

    def _settle(self) -> None:
        """Wait for the writer thread's task: on rank 0, it may still be renaming the previous
        checkpoint.
        """
        if self._writer.busy:
            for leftover in self._writer.result():
                self._report.print_line(
                    f"an old checkpoint could not be removed; the next save tries again: {leftover}"
                )

    def _finish(self) -> None:
        if self._save:
            self._complete(wait=True)
        else:
            on_all_ranks(self._world, self._settle)

    def _incomplete(self, iteration: int) -> Path:
        return self._folder / f"{checkpoint_name(iteration)}.{self._token}{INCOMPLETE}"
