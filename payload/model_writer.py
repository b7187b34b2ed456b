"""Writes the folder of a run's model (see ``model_folder``) while it trains, from any layout of ranks.

A file is written beside the one that it replaces, and renamed when it is whole.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from payload import safetensors
from payload.comm.base import on_all_ranks
from payload.device import Array
from payload.errors import PayloadError, UsageError
from payload.model_folder import BEST, FINAL, RECORD, ModelRecord, WeightsFile, read_record
from payload.nn.module import Unit
from payload.parallel.engine import Engine, Evaluation
from payload.parallel.whole import WholeTensors

INCOMPLETE = ".incomplete"


class ModelWriter:
    """Writes a run's model. All ranks must call its methods together; rank 0 has the files."""

    def __init__(
        self, folder: Path, record: ModelRecord, engine: Engine, units: Sequence[Unit], *, done: int = 0
    ) -> None:
        """
        Args:
            record: without its files.
            units: the whole model.
            done: iterations with which the run goes on; it keeps what the folder has of those.
        """
        self._folder, self._record, self._world = folder, record, engine.mesh.world
        self._tensors = WholeTensors(engine, units)
        self._files: dict[str, WeightsFile] = {}
        if done:
            self._files = self._world.allgather(self._known(done) if self._world.rank == 0 else {})[0]

    def _known(self, done: int) -> dict[str, WeightsFile]:
        """What the folder has of the iterations that are done."""
        try:
            there = read_record(self._folder).files
        except UsageError:  # there is none, or one of another program, which is replaced
            there = {}
        return {which: facts for which, facts in there.items() if facts.iteration <= done}

    def evaluated(self, iteration: int, evaluation: Evaluation) -> None:
        """Write the weights as they are, if none before were better.

        Raises:
            PayloadError: they cannot be written; on every rank.
        """
        best = self._files.get(BEST)
        if best is None or best.metrics is None or evaluation.loss < best.metrics["loss"]:
            self._write(BEST, iteration, _metrics(evaluation))

    def conclude(self, iteration: int, evaluation: Evaluation | None) -> None:
        """Write the final weights.

        Args:
            evaluation: of just these, if there was one.

        Raises:
            PayloadError: they cannot be written; on every rank.
        """
        best = self._files.get(BEST)
        if best is None:
            self._write(BEST, iteration, _metrics(evaluation))
        if self._files[BEST].iteration == iteration:
            self._link()
        else:
            self._write(FINAL, iteration, _metrics(evaluation))

    def _write(self, which: str, iteration: int, metrics: Mapping[str, float] | None) -> None:
        path = self._folder / f"{which}.safetensors"
        stream = _Stream(path, self._tensors.shapes) if self._world.rank == 0 else None
        for _, tensor in self._tensors:
            if stream:
                stream.write(tensor)

        def publish() -> str:
            if stream is None:
                return ""
            digest = stream.close()
            self._publish(replace(facts, sha256=digest), which)
            return digest

        facts = WeightsFile(path.name, iteration, metrics, "")
        digest = on_all_ranks(self._world, publish)
        self._files[which] = replace(facts, sha256=digest)

    def _publish(self, facts: WeightsFile, which: str) -> None:
        """The new file is in place: tell of it, and remove what an earlier run left."""
        files = {**self._files, which: facts}
        path = self._folder / RECORD
        try:
            for other in (FINAL, BEST):
                if other not in files:
                    (self._folder / f"{other}.safetensors").unlink(missing_ok=True)
            beside = path.with_name(f"{RECORD}{INCOMPLETE}")
            beside.write_text(replace(self._record, files=files).encode())
            beside.replace(path)
        except OSError as exc:
            raise PayloadError(f"--out: {exc.filename or path} cannot be written: {exc.strerror}") from exc

    def _link(self) -> None:
        """The final weights are the best ones."""
        facts = replace(self._files[BEST], file=f"{FINAL}.safetensors")

        def link() -> None:
            beside = self._folder / f"{facts.file}{INCOMPLETE}"
            try:
                beside.unlink(missing_ok=True)
                try:
                    beside.hardlink_to(self._folder / self._files[BEST].file)
                except OSError:  # some file systems have no links
                    shutil.copyfile(self._folder / self._files[BEST].file, beside)
                beside.replace(self._folder / facts.file)
            except OSError as exc:
                raise PayloadError(f"--out: {beside} cannot be written: {exc.strerror}") from exc
            self._publish(facts, FINAL)

        on_all_ranks(self._world, lambda: link() if self._world.rank == 0 else None)
        self._files[FINAL] = facts


class _Stream:
    """A file of tensors, written one after the other and renamed when it is whole. What goes wrong is told at
    the end: until then other ranks send their parts."""

    def __init__(self, path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._path, self._beside = path, path.with_name(f"{path.name}{INCOMPLETE}")
        self._digest = hashlib.sha256()
        self._file: BinaryIO | None = None
        self._failure: OSError | None = None
        header = safetensors.plan({name: (s, np.dtype("float32")) for name, s in shapes.items()}, format="pt")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._beside.open("wb")
        except OSError as exc:
            self._failure = exc
        self.write(np.frombuffer(header.header, np.uint8))

    def write(self, tensor: Array) -> None:
        if self._file is None or self._failure:
            return
        try:
            self._digest.update(tensor.data)
            self._file.write(tensor.data)
        except OSError as exc:
            self._failure = exc

    def close(self) -> str:
        """Rename it.

        Returns:
            Its SHA-256.

        Raises:
            PayloadError: it could not be written; nothing is left of it.
        """
        try:
            if self._file:
                self._file.close()
            if self._failure:
                raise self._failure
            self._beside.replace(self._path)
        except OSError as exc:
            with suppress(OSError):
                self._beside.unlink(missing_ok=True)
            raise PayloadError(
                f"--out: {exc.filename or self._path} cannot be written: {exc.strerror}"
            ) from exc
        return self._digest.hexdigest()


def _metrics(evaluation: Evaluation | None) -> dict[str, float] | None:
    return None if evaluation is None else {"loss": evaluation.loss, "accuracy": evaluation.accuracy}
