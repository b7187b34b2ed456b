"""Saves checkpoints while training goes on: a copy in memory, which a process of each rank writes to disk."""

from __future__ import annotations

import json
import mmap
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType, MappingProxyType, TracebackType
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from payload.checkpoint.folder import INCOMPLETE, Lock, checkpoint_name, superseded
from payload.checkpoint.shards import (
    DATA,
    MANIFEST,
    FileFacts,
    Manifest,
    plan_shards,
    rank_file,
    saved_shards,
    scalars,
)
from payload.comm.base import on_all_ranks
from payload.device.base import Mark
from payload.errors import PayloadError
from payload.parallel.engine import Engine

_NUMBERS = (signal.SIGTERM, signal.SIGUSR1)


class StopSignals:
    """SIGTERM and SIGUSR1, which Slurm sends before it takes a job's nodes away: remembered until an
    iteration is done."""

    def __init__(self) -> None:
        self.came = False
        self._before = {number: signal.signal(number, self._note) for number in _NUMBERS}

    def __enter__(self) -> StopSignals:
        return self

    def __exit__(self, *_: object) -> None:
        """Treat them as before; once one came, to any rank, the run ends, and no other may disturb that.

        srun sends SIGTERM to the ranks that leave after the first. Python forgets its handlers as it leaves,
        but not what is to be ignored.
        """
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if self.came else handler)

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self.came = True


_QUIET = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP}


class Writer:
    """This rank's end of its writer process, which does one request at a time, about what is in ``memory``.

    The memory has no name: no end of this process, however sudden, leaves any of it behind.
    """

    def __init__(self, size: int, *, keeps: Sequence[int] = ()) -> None:
        """
        Args:
            size: bytes of the memory.
            keeps: file descriptors that are open in the process, too, as long as it lives.
        """
        descriptor = os.memfd_create("checkpoint")
        os.ftruncate(descriptor, size)
        # Its pages are there from the start, not only when the first copy touches them.
        mapped = mmap.mmap(descriptor, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.memory: NDArray[np.uint8] = np.frombuffer(mapped, np.uint8)
        program, parent = str(Path(__file__).with_name("writer.py")), str(os.getpid())
        # Signals that ask the job to end are for ranks. Blocked here, they are in the writer from its start.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _QUIET)
        try:
            # It is started by vfork, which unlike fork does no harm after MPI_Init.
            self._process = subprocess.Popen(
                [sys.executable, "-I", program, str(descriptor), parent],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[descriptor, *keeps],
                text=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.close(descriptor)
        self._requests, self._answers = _stream(self._process.stdin), _stream(self._process.stdout)
        self.busy = False

    def ask(self, **request: Any) -> None:
        """Begin with something; see ``writer`` for what."""
        self.busy = True
        with suppress(BrokenPipeError):  # the writer is gone, which its answer will tell
            self._requests.write(json.dumps(request) + "\n")
            self._requests.flush()

    def ready(self) -> bool:
        """Whether the answer is there."""
        poll = select.poll()  # unlike select, for any file descriptor
        poll.register(self._answers, select.POLLIN)
        return bool(poll.poll(0))

    def answer(self) -> dict[str, Any]:
        """What came of the request; waits for it.

        Raises:
            PayloadError: it could not be done.
        """
        line = self._answers.readline()
        self.busy = False
        if not line:
            raise PayloadError(
                f"the process that writes checkpoints ended with {self._process.wait()}",
                code="checkpoint-writer-ended",
            )
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PayloadError(
                f"a checkpoint cannot be written: {answer['error']}", code="checkpoint-unwritable"
            )
        return answer

    def close(self, *, kill: bool = False) -> None:
        """End it after what it was asked for, or at once."""
        if kill:
            self._process.kill()
        with suppress(BrokenPipeError):
            self._requests.close()
        self._answers.close()
        self._process.wait()


def _stream(stream: IO[str] | None) -> IO[str]:
    assert stream is not None  # noqa: S101  # they are pipes
    return stream


@dataclass(slots=True)
class _Save:
    """A checkpoint in the making."""

    manifest: Manifest  # but for the files
    copied: Mark
    stall_s: float = 0.0  # that training stood still for it
    asked: bool = False  # whether the writer has begun


class Saver:
    """Makes checkpoints between iterations. All ranks must call its methods together."""

    def __init__(
        self,
        engine: Engine,
        folder: Path,
        describe: Callable[[int], Manifest],
        record: Callable[..., None],
        *,
        interval: int,
        keep: int,
        wait: bool,
        data_state: Mapping[str, Any] = MappingProxyType({}),
        lock: Lock | None = None,
        save_model: Callable[[Path], Mapping[str, Any]] = lambda _: {},
        notify: Callable[[str], None] = print,
    ) -> None:
        """
        Args:
            folder: see ``folder.prepare``.
            describe: what the checkpoint of an iteration is, but for its files and scalars.
            record: takes ``step``, ``stall_s``, ``write_s`` and ``bytes`` of each that was made.
            interval: iterations from one to the next.
            keep: how many to keep.
            wait: for each to be on disk, rather than to go on training.
            data_state: of the training data, for each to hold.
            lock: of the folder, if this rank has that. It is held until this is closed and nothing more is
                written, also if this process is killed.
            save_model: on rank 0 puts the best weights so far into a folder, and gives the model's record.
            notify: prints what went wrong, and does not matter yet.
        """
        self._engine, self._device, self._world = engine, engine.device, engine.mesh.world
        self._folder, self._describe, self._record = folder, describe, record
        self._interval, self._keep, self._wait = interval, keep, wait
        self._lock, self._notify, self._save_model = lock, notify, save_model
        self._data = json.dumps(dict(data_state)) + "\n"
        # What a killed run's writers may still write, they write elsewhere.
        self._token = self._world.allgather(secrets.token_hex(4))[0]
        self._saved_shards = saved_shards(engine)
        layout, offsets = plan_shards(self._saved_shards)
        self._size = layout.size
        self._writer = Writer(layout.size, keeps=[lock.descriptor] if lock else [])
        memory = self._writer.memory
        self._device.pin(memory)
        memory[: len(layout.header)] = bytearray(layout.header)
        self._copies = [
            memory[offset : offset + array.nbytes].view(array.dtype)
            for (_, array), offset in zip(self._saved_shards, offsets, strict=True)
        ]
        self._save: _Save | None = None
        self._failure: PayloadError | None = None

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        finished = False
        try:
            if error is None:
                self._finish()
                finished = True
        finally:
            self._device.unpin(self._writer.memory)
            self._writer.close(kill=not finished)
            if not finished:  # else what was begun would keep a full disk full
                for begun in self._folder.glob(f"*.{self._token}{INCOMPLETE}"):
                    shutil.rmtree(begun, ignore_errors=True)
            if self._lock:
                self._lock.close()

    def after(self, iteration: int, written: float, *, stop: bool = False, last: bool = False) -> None:
        """An iteration is done.

        Args:
            written: by how many ranks, as they said before it.
            stop: the run ends here before its time: all is on disk afterwards.

        Raises:
            PayloadError: a checkpoint could not be written.
        """
        if written == self._world.size:
            self._complete(wait=False)
        if stop or last or iteration % self._interval == 0:
            if self._save:
                self._complete(wait=False)
            self._begin(iteration)
            if stop or self._wait:
                self._finish()

    def _begin(self, iteration: int) -> None:
        began = time.perf_counter()
        try:
            self._settle()
        except PayloadError as exc:  # on rank 0 alone: told when all are asked what became of this one
            self._failure = exc
        for (_, array), copy in zip(self._saved_shards, self._copies, strict=True):
            self._device.copy_out(array, copy)
        manifest = replace(self._describe(iteration), scalars=scalars(self._engine))
        if self._world.rank == 0:
            try:
                manifest = replace(manifest, model=self._save_model(self._incomplete(iteration)))
            except PayloadError as exc:
                self._failure = exc
        self._save = _Save(manifest, self._device.mark())
        self.written()
        self._save.stall_s = time.perf_counter() - began

    def written(self) -> bool:
        """Move the save on as far as goes without waiting, and tell whether this rank's file is on disk, for
        the next step to sum."""
        save = self._save
        if save and not save.asked and self._device.has_passed(save.copied):
            self._write(save)
        return save is not None and save.asked and self._writer.ready()

    def _write(self, save: _Save) -> None:
        save.asked = True
        path = self._incomplete(save.manifest.iteration) / rank_file(self._world.rank)
        self._writer.ask(path=str(path), size=self._size)

    def _complete(self, *, wait: bool) -> None:
        """Wait until all ranks' files are on disk, then have rank 0's writer make them a checkpoint.

        Args:
            wait: until it is one.
        """
        save, self._save = self._save, None
        assert save is not None  # noqa: S101
        began = time.perf_counter()
        if not save.asked:
            self._device.synchronize()
            self._write(save)
        answer = on_all_ranks(self._world, self._answer)
        answers = self._world.allgather(answer)
        if self._world.rank == 0:
            self._publish(
                save.manifest,
                [
                    FileFacts(rank_file(rank), each["size"], each["crc32"])
                    for rank, each in enumerate(answers)
                ],
            )
        if wait:
            on_all_ranks(self._world, self._settle)
        self._record(
            step=save.manifest.iteration,
            stall_s=save.stall_s + time.perf_counter() - began,
            write_s=max(each["seconds"] for each in answers),
            bytes=sum(each["size"] for each in answers),
        )

    def _answer(self) -> dict[str, Any]:
        """What became of this rank's file."""
        if self._failure:
            raise self._failure
        return self._writer.answer()

    def _publish(self, manifest: Manifest, files: list[FileFacts]) -> None:
        iteration, data = manifest.iteration, self._data.encode()
        every = [FileFacts(DATA, len(data), zlib.crc32(data)), *files]
        self._writer.ask(
            path=str(self._incomplete(iteration)),
            complete=str(self._folder / checkpoint_name(iteration)),
            texts={DATA: self._data, MANIFEST: replace(manifest, files=every).encode()},
            sizes={file.name: file.size for file in files},
            remove=[str(path) for path in superseded(self._folder, iteration, keep=self._keep)],
        )

    def _settle(self) -> None:
        """Until the writer is idle: rank 0's may still be completing the last checkpoint."""
        if self._writer.busy:
            for left in self._writer.answer()["left"]:
                self._notify(f"an old checkpoint is still there, to be removed with the next: {left}")

    def _finish(self) -> None:
        if self._save:
            self._complete(wait=True)
        else:
            on_all_ranks(self._world, self._settle)

    def _incomplete(self, iteration: int) -> Path:
        return self._folder / f"{checkpoint_name(iteration)}.{self._token}{INCOMPLETE}"
