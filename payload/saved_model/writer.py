"""Writes the folder of a run's model (see ``folder``) while it trains, from any layout of ranks.

A file is written beside the one that it replaces, and renamed when it is whole.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from payload.comm.base import on_all_ranks
from payload.errors import PayloadError, UsageError
from payload.nn.module import Unit
from payload.parallel.engine import Engine, Evaluation
from payload.parallel.whole import WholeTensors
from payload.saved_model import safetensors
from payload.saved_model.folder import (
    BEST,
    FINAL,
    RECORD,
    ModelRecord,
    WeightsFile,
    parse_record,
    read_record,
    sha256_of,
)


class ModelWriter:
    """Writes a run's model. All ranks must call its methods together; rank 0 has the files."""

    def __init__(
        self,
        folder: Path,
        record: ModelRecord,
        engine: Engine,
        units: Sequence[Unit],
        *,
        resumed: tuple[Path, Mapping[str, Any]] | None = None,
    ) -> None:
        """
        Args:
            record: without its files.
            units: the whole model.
            resumed: the folder of the checkpoint with which the run goes on, and the model's record in it:
                the best weights so far are kept, from there or from this folder.

        Raises:
            PayloadError: the folder cannot be written; on every rank.
        """
        self._folder, self._record, self._world = folder, record, engine.mesh.world
        self._tensors = WholeTensors(engine, units)
        self._files: dict[str, WeightsFile] = {}
        if resumed:
            known = on_all_ranks(self._world, lambda: self._known(*resumed) if self._world.rank == 0 else {})
            self._files = self._world.allgather(known)[0]

    def _known(self, checkpoint: Path, record: Mapping[str, Any]) -> dict[str, WeightsFile]:
        """What the folder has, with the best weights of the checkpoint if these are better."""
        with suppress(UsageError):  # there is none, or one of another program, which is replaced
            self._files = dict(read_record(self._folder).files)
        theirs = parse_record(record, checkpoint).files.get(BEST) if record else None
        if theirs and _loss(theirs) < _loss(self._files.get(BEST)):
            source = checkpoint / theirs.file
            if source.exists() and sha256_of(source) == theirs.sha256:
                place(source, self._folder / theirs.file)
                self._publish(theirs, BEST)
                self._files[BEST] = theirs
        return self._files

    def save_best(self, folder: Path) -> dict[str, Any]:
        """Put the best weights so far into another folder, on rank 0.

        Returns:
            The record with them.

        Raises:
            PayloadError: it cannot be written.
        """
        best = self._files.get(BEST)
        if best:
            place(self._folder / best.file, folder / best.file)
        return replace(self._record, files={BEST: best} if best else {}).fields()

    def evaluated(self, iteration: int, evaluation: Evaluation) -> None:
        """Write the weights as they are, if none before were better.

        Raises:
            PayloadError: they cannot be written; on every rank.
        """
        if evaluation.loss < _loss(self._files.get(BEST)):
            self._write(BEST, iteration, _metrics(evaluation))

    def conclude(self, iteration: int, evaluation: Evaluation | None) -> None:
        """Write the final weights.

        Args:
            evaluation: of just these, if there was one.

        Raises:
            PayloadError: they cannot be written; on every rank.
        """
        if BEST not in self._files:
            self._write(BEST, iteration, _metrics(evaluation))
        if self._files[BEST].iteration == iteration:
            self._link()
        else:
            self._write(FINAL, iteration, _metrics(evaluation))

    def _write(self, which: str, iteration: int, metrics: Mapping[str, float] | None) -> None:
        path = self._folder / f"{which}.safetensors"
        shapes = self._tensors.shapes
        stream = safetensors.Stream(path, shapes) if self._world.rank == 0 else None
        for _, tensor in self._tensors:
            if stream:
                stream.write(tensor)

        def publish() -> str:
            if stream is None:
                return ""
            try:
                digest = stream.close()
            except OSError as exc:
                where = exc.filename or path
                raise PayloadError(
                    f"--out: {where} cannot be written: {exc.strerror}", code="file-unwritable"
                ) from exc
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
            beside = path.with_name(f"{RECORD}{safetensors.INCOMPLETE}")
            beside.write_text(replace(self._record, files=files).encode())
            beside.replace(path)
        except OSError as exc:
            raise PayloadError(
                f"--out: {exc.filename or path} cannot be written: {exc.strerror}", code="file-unwritable"
            ) from exc

    def _link(self) -> None:
        """The final weights are the best ones."""
        facts = replace(self._files[BEST], file=f"{FINAL}.safetensors")

        def link() -> None:
            place(self._folder / self._files[BEST].file, self._folder / facts.file)
            self._publish(facts, FINAL)

        on_all_ranks(self._world, lambda: link() if self._world.rank == 0 else None)
        self._files[FINAL] = facts


def place(source: Path, target: Path) -> None:
    """Have a file under another name, too: by a link where that is possible.

    Raises:
        PayloadError: it cannot be written.
    """
    beside = target.with_name(f"{target.name}{safetensors.INCOMPLETE}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        beside.unlink(missing_ok=True)
        try:
            beside.hardlink_to(source)
        except OSError:  # on another file system, or one without links
            shutil.copyfile(source, beside)
        beside.replace(target)
        beside.unlink(missing_ok=True)  # it stays where both names were one file already
    except OSError as exc:
        raise PayloadError(
            f"{exc.filename or target} cannot be written: {exc.strerror}", code="file-unwritable"
        ) from exc


def _loss(facts: WeightsFile | None) -> float:
    """The higher, the less it is worth to keep."""
    return facts.metrics["loss"] if facts and facts.metrics else math.inf


def _metrics(evaluation: Evaluation | None) -> dict[str, float] | None:
    return None if evaluation is None else {"loss": evaluation.loss, "accuracy": evaluation.accuracy}
