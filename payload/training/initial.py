"""Weights that training begins with: of a run here, of transformers or of torchvision."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from payload.cli.config import TrainConfig
from payload.comm.base import Communicator, on_all_ranks
from payload.device.base import Array
from payload.errors import UsageError
from payload.nn.module import Unit, torch_shapes
from payload.parallel.engine import Engine
from payload.saved_model.folder import (
    BEST,
    RECORD,
    ModelRecord,
    read_file,
    read_record,
    set_weights,
    sha256_of,
)
from payload.saved_model.libraries import from_any, refuse_other

_TOLD_BY_NO_SHAPE = ("heads", "norm_eps")


@dataclass(frozen=True, slots=True)
class Initial:
    """Weights to begin with."""

    file: Path
    record: ModelRecord | None  # of a run of ours

    def data_state(self, tokenizer: str) -> Mapping[str, Any] | None:
        """How text was read for the model, if it was by tokens that were learned; see ``open_dataset``.

        Raises:
            UsageError: it was not by such a ``--tokenizer``.
        """
        known = self.record and self.record.tokenizer
        if not known:
            return None
        kind, wanted = known["kind"], tokenizer.partition(":")[0]
        if kind != wanted:
            raise UsageError(
                f"--init: {self.file} is of a model with --tokenizer {kind}, not {wanted}",
                code="init-other-tokenizer",
            )
        return {name: value for name, value in known.items() if name != "kind"} or None

    def load(
        self, engine: Engine, units: Sequence[Unit], config: TrainConfig, settings: Mapping[str, Any]
    ) -> None:
        """Let the engine have these weights; all ranks call it together.

        Args:
            units: the whole model.
            settings: with which it is built.

        Raises:
            UsageError: they are not of this model, or not the same on all nodes; on every rank.
        """
        # In all models the last two parameters are those of the logits.
        head = units[-1].layer.parameters[-2:] if config.checkpoints.new_head else ()
        drawn = {p.name: p.form.to_torch(p.drawn(config.batch.seed)) for p in head}

        def read() -> tuple[Mapping[str, Array], str]:
            try:
                weights, foreign = from_any(
                    config.model.model, torch_shapes(units), read_file(self.file), drawn
                )
                self._refuse_other(config.model.model, settings, foreign=foreign)
            except UsageError as exc:
                raise UsageError(f"--init: {self.file}: {exc}", code="init-unfit") from exc
            return {**weights, **drawn}, sha256_of(self.file)

        weights, digest = on_all_ranks(engine.mesh.world, read)
        if len(set(engine.mesh.world.allgather(digest))) > 1:
            raise UsageError(
                f"--init: {self.file} is not the same on all nodes: put it in a shared folder",
                code="init-differs-on-nodes",
            )
        set_weights(engine, units, weights)

    def _refuse_other(self, model: str, settings: Mapping[str, Any], *, foreign: bool) -> None:
        """Raise UsageError if a size that no shape tells is another than the model's."""
        if self.record:
            for name in _TOLD_BY_NO_SHAPE:
                theirs = self.record.settings.get(name, settings.get(name))
                if theirs != settings.get(name):
                    flag = name.replace("_", "-")
                    raise UsageError(
                        f"it is of a model with --{flag} {theirs}, and this one has {settings[name]}",
                        code="init-other-size",
                    )
        elif foreign and (file := self.file.parent / "config.json").exists():
            try:
                theirs = json.loads(file.read_bytes())
            except (OSError, ValueError) as exc:
                raise UsageError(f"its config.json cannot be read: {exc}", code="init-unreadable") from exc
            refuse_other(model, settings, theirs)


def initial(path: Path | None, world: Communicator) -> Initial | None:
    """What ``--init`` names; all ranks call it together.

    Raises:
        UsageError: there is none such; on every rank.
    """
    return on_all_ranks(world, lambda: _found(path) if path else None)


def _found(path: Path) -> Initial:
    folder, file = (path, path / "model.safetensors") if path.is_dir() else (path.parent, path)
    if not (folder / RECORD).exists():
        if not file.exists():
            raise UsageError(
                f"--init: there is no {file}: give a file of weights, or the folder of a model",
                code="no-such-file",
            )
        return Initial(file, None)
    record = read_record(folder)
    if path.is_dir():
        known = record.files.get(BEST) or next(iter(record.files.values()))
        file = folder / known.file
    return Initial(file, record)
