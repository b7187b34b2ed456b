"""The settings that a run shares with the run that it continues. Standard library only: they are also
compared where a job is submitted.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from payload.cli.config import TrainConfig
from payload.errors import UsageError


def identity_of_settings(config: TrainConfig) -> dict[str, Any]:
    """Return the settings that must be the same, without those that depend on the data or the
    model.
    """
    return {
        "model": config.model.model,
        "optimizer": config.optimizer.optimizer,
        "precision": config.precision.precision,
        # The path of the data is left out, because it may change.
        "data": config.data.data.partition(":")[0],
        "tokenizer": "gpt2" if config.data.tokenizer.startswith("gpt2:") else config.data.tokenizer,
        "global-batch-size": config.batch.global_batch_size,
        "seed": config.batch.seed,
    }


def refuse_other_settings(
    path: Path, saved_with: Mapping[str, Any], now: Mapping[str, Any]
) -> None:
    """Raise UsageError if settings that must not change differ: ``now`` and in the checkpoint at
    ``path``.
    """
    saved, current = (
        {name: _text(value) for name, value in each.items()} for each in (saved_with, now)
    )
    # Earlier versions did not save eval-samples.
    current = {
        name: value for name, value in current.items() if name in saved or name != "eval-samples"
    }
    different = [name for name in current if saved.get(name) != current[name]]
    if different:
        old, new = (
            ", ".join(f"{name} {each.get(name, 'none')}" for name in different)
            for each in (saved, current)
        )
        raise UsageError(
            f"--resume: {path} was saved with {old}, but this run has {new}",
            code="checkpoint-other-settings",
        )


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
