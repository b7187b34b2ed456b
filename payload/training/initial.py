"""Initial weights for training: from an earlier run, or from transformers or torchvision."""

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

# Settings that the shapes of the weights do not show.
_NOT_IN_SHAPES = ("heads", "norm_eps")


@dataclass(frozen=True, slots=True)
class InitialWeights:
    """A file of weights that training starts from."""

    file: Path
    # If None, the file is from another library.
    record: ModelRecord | None

    def data_state(self, tokenizer: str) -> Mapping[str, Any] | None:
        """Return the learned state of the tokenizer that belongs to these weights. None: there is
        no state.

        Raises UsageError if the model was trained with another kind of tokenizer than
        ``tokenizer``.
        """
        tokenizer_record = self.record and self.record.tokenizer
        if not tokenizer_record:
            return None
        trained_with = tokenizer_record["kind"]
        requested = tokenizer.partition(":")[0]
        if trained_with != requested:
            raise UsageError(
                f"--init: {self.file} was trained with --tokenizer {trained_with}, not {requested}",
                code="init-other-tokenizer",
            )
        return {name: value for name, value in tokenizer_record.items() if name != "kind"} or None

    def load(
        self,
        engine: Engine,
        units: Sequence[Unit],
        config: TrainConfig,
        settings: Mapping[str, Any],
    ) -> None:
        """Load these weights into the engine. All ranks must call this method together.

        units: the units of the whole model, which was built with the arguments ``settings``.

        Raises UsageError on every rank if the weights do not fit the model, or differ between
        nodes.
        """
        # In all models the last two parameters compute the logits.
        head = units[-1].layer.parameters[-2:] if config.checkpoints.new_head else ()
        new_head = {p.name: p.form.to_torch(p.draw_initial(config.batch.seed)) for p in head}

        def read() -> tuple[Mapping[str, Array], str]:
            try:
                weights, foreign = from_any(
                    config.model.model, torch_shapes(units), read_file(self.file), new_head
                )
                self._refuse_other(config.model.model, settings, foreign=foreign)
            except UsageError as exc:
                raise UsageError(
                    f"--init: {self.file} cannot be used: {exc}", code="init-unfit"
                ) from exc
            return {**weights, **new_head}, sha256_of(self.file)

        weights, digest = on_all_ranks(engine.mesh.world, read)
        if len(set(engine.mesh.world.allgather(digest))) > 1:
            raise UsageError(
                f"--init: {self.file} differs between nodes; put it in a shared folder",
                code="init-differs-on-nodes",
            )
        set_weights(engine, units, weights)

    def _refuse_other(self, model: str, settings: Mapping[str, Any], *, foreign: bool) -> None:
        """Raise UsageError if the weights' settings differ. foreign: whether the file is from a
        library.
        """
        if self.record:
            for name in _NOT_IN_SHAPES:
                size = self.record.settings.get(name, settings.get(name))
                if size != settings.get(name):
                    flag = name.replace("_", "-")
                    raise UsageError(
                        f"the weights were trained with --{flag} {size}, not {settings[name]}: "
                        f"pass --{flag} {size}",
                        code="init-other-size",
                    )
        elif foreign and (file := self.file.parent / "config.json").exists():
            try:
                library_config = json.loads(file.read_bytes())
            except (OSError, ValueError) as exc:
                raise UsageError(f"{file} cannot be read: {exc}", code="init-unreadable") from exc
            refuse_other(model, settings, library_config)


def find_initial(path: Path | None, world: Communicator) -> InitialWeights | None:
    """Find the weights at the path of ``--init``. None: no path. All ranks must call this function
    together.

    Raises UsageError on every rank if the weights cannot be found or read.
    """
    return on_all_ranks(world, lambda: _find(path) if path else None)


def _find(path: Path) -> InitialWeights:
    folder, file = (path, path / "model.safetensors") if path.is_dir() else (path.parent, path)
    if not (folder / RECORD).exists():
        if not file.exists():
            raise UsageError(
                f"--init: {file} does not exist; pass a file of weights or the folder of a model",
                code="no-such-file",
            )
        return InitialWeights(file, None)
    record = read_record(folder)
    if path.is_dir():
        best = record.files.get(BEST) or next(iter(record.files.values()))
        file = folder / best.file
    return InitialWeights(file, record)
