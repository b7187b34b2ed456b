"""Writes the folder of a run's model (see ``folder``) during training, from any layout of ranks.

Each file is written under a temporary name and renamed when it is complete.
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
from payload.saved_model.folder import sha256_of
from payload.saved_model.record import (
    BEST,
    FINAL,
    RECORD,
    ModelRecord,
    WeightsFile,
    parse_record,
    read_record,
)


class ModelWriter:
    """Writes a run's model. All ranks must call its methods together; rank 0 writes the files."""

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
            record: the model's description, without files of weights.
            units: the units of the whole model.
            resumed: folder of the resumed checkpoint, and the model's description in it. Its best
                weights replace those in ``folder`` if their held-out loss is lower.

        Raises PayloadError on every rank if the folder cannot be written.
        """
        self._folder = folder
        self._record = record
        self._world = engine.mesh.world
        self._tensors = WholeTensors(engine, units)
        self._files: dict[str, WeightsFile] = {}
        if resumed:
            files = on_all_ranks(
                self._world, lambda: self._existing_files(*resumed) if self._world.rank == 0 else {}
            )
            self._files = self._world.allgather(files)[0]

    def _existing_files(
        self, checkpoint: Path, record: Mapping[str, Any]
    ) -> dict[str, WeightsFile]:
        """Copy the checkpoint's best weights if they are better. Return the folder's files of
        weights.
        """
        # A missing or unreadable record is replaced.
        with suppress(UsageError):
            self._files = dict(read_record(self._folder).files)
        resumed_best = parse_record(record, checkpoint).files.get(BEST) if record else None
        if resumed_best and _loss(resumed_best) < _loss(self._files.get(BEST)):
            source = checkpoint / resumed_best.file
            if source.exists() and sha256_of(source) == resumed_best.sha256:
                place(source, self._folder / resumed_best.file)
                self._publish(resumed_best, BEST)
                self._files[BEST] = resumed_best
        return self._files

    def save_best(self, folder: Path) -> dict[str, Any]:
        """Copy the best weights so far to another folder, and return the model's description, for
        JSON.

        Only rank 0 calls this method. Raises PayloadError if the folder cannot be written.
        """
        best = self._files.get(BEST)
        if best:
            place(self._folder / best.file, folder / best.file)
        return replace(self._record, files={BEST: best} if best else {}).fields()

    def evaluated(self, evaluation: Evaluation) -> None:
        """Record the evaluation of the weights that ``write`` has written last.

        If their held-out loss is the lowest so far, they become the best weights.
        Raises PayloadError on every rank if the record or the weights cannot be written.
        """
        metrics = {"loss": evaluation.loss, "accuracy": evaluation.accuracy}
        final = replace(self._files[FINAL], metrics=metrics)
        self._set(FINAL, final)
        if evaluation.loss < _loss(self._files.get(BEST)):
            self._set(BEST, final)

    def write(self, iteration: int) -> None:
        """Write the weights as the final weights, and without best weights, also as those.

        Raises PayloadError on every rank if the weights cannot be written.
        """
        path = self._folder / f"{FINAL}.safetensors"
        shapes = self._tensors.shapes
        stream = safetensors.SafetensorsWriter(path, shapes) if self._world.rank == 0 else None
        for _, tensor in self._tensors:
            if stream:
                stream.write(tensor)

        def publish() -> str:
            if stream is None:
                return ""
            try:
                digest = stream.close()
            except OSError as exc:
                file = exc.filename or path
                raise PayloadError(
                    f"--out: {file} cannot be written: {exc.strerror}", code="file-unwritable"
                ) from exc
            return digest

        facts = WeightsFile(path.name, iteration, None, on_all_ranks(self._world, publish))
        self._set(FINAL, facts)
        if BEST not in self._files:
            self._set(BEST, facts)

    def _publish(self, facts: WeightsFile, which: str) -> None:
        """Add ``facts``, the final or best weights, to model.json, and delete weights of an earlier
        run.
        """
        files = {**self._files, which: facts}
        path = self._folder / RECORD
        try:
            for other in (FINAL, BEST):
                if other not in files:
                    (self._folder / f"{other}.safetensors").unlink(missing_ok=True)
            temporary = path.with_name(f"{RECORD}{safetensors.INCOMPLETE}")
            temporary.write_text(replace(self._record, files=files).encode())
            temporary.replace(path)
        except OSError as exc:
            raise PayloadError(
                f"--out: {exc.filename or path} cannot be written: {exc.strerror}",
                code="file-unwritable",
            ) from exc

    def _set(self, which: str, written: WeightsFile) -> None:
        """Make ``written``, a file of weights in the folder, the final or best weights."""
        facts = replace(written, file=f"{which}.safetensors")

        def publish() -> None:
            if facts.file != written.file:
                place(self._folder / written.file, self._folder / facts.file)
            self._publish(facts, which)

        on_all_ranks(self._world, lambda: publish() if self._world.rank == 0 else None)
        self._files[which] = facts


def place(source: Path, target: Path) -> None:
    """Make ``target`` a hard link to ``source``, or a copy if links are impossible, or raise
    PayloadError.
    """
    temporary = target.with_name(f"{target.name}{safetensors.INCOMPLETE}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)
        try:
            temporary.hardlink_to(source)
        # The target is on another file system, or hard links are not supported.
        except OSError:
            shutil.copyfile(source, temporary)
        temporary.replace(target)
        # If both names were already the same file, rename has no effect and the temporary name
        # remains.
        temporary.unlink(missing_ok=True)
    except OSError as exc:
        raise PayloadError(
            f"{exc.filename or target} cannot be written: {exc.strerror}", code="file-unwritable"
        ) from exc


def _loss(facts: WeightsFile | None) -> float:
    """Return the held-out loss of weights, or infinity if there are no weights or they were not
    evaluated.
    """
    return facts.metrics["loss"] if facts and facts.metrics else math.inf
