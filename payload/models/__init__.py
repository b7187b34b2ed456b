"""Models, each in its own file with a function ``build(context, **sizes)`` that returns groups of
layers.

Only the layers, not the models, handle distribution over ranks. This file imports only the standard
library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Literal, assert_never

from payload.errors import UsageError

Module = Literal["mlp", "cnn", "resnet", "lstm", "gpt", "bert", "vit"]
Takes = Literal["images", "text", "masked text"]


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model that ``--model`` names: its module, its kind of input, and its sizes."""

    module: Module
    takes: Takes
    # Sizes that differ from the defaults of ``build``.
    sizes: Mapping[str, int | float] = field(default_factory=dict)

    def reject_unfit_data(self, data: str) -> None:
        """Raise UsageError if the value of ``--data`` names another kind of data than the model
        takes.
        """
        kind = data.partition(":")[0]
        if kind != "synthetic" and (kind == "text") == (self.takes == "images"):
            fitting = (
                "digits, idx:DIR or synthetic"
                if self.takes == "images"
                else "text:FILE or synthetic"
            )
            raise UsageError(
                f"--data {data}: the model takes {self.takes}; use {fitting}",
                code="data-unfit-for-model",
            )


def _transformer(layers: int, heads: int, width: int) -> Mapping[str, int]:
    return {"layers": layers, "heads": heads, "width": width}


MODELS: Mapping[str, ModelEntry] = {
    "mlp": ModelEntry("mlp", "images"),
    "cnn": ModelEntry("cnn", "images"),
    "resnet18": ModelEntry("resnet", "images", {"depth": 18}),
    "resnet50": ModelEntry("resnet", "images", {"depth": 50}),
    "lstm": ModelEntry("lstm", "text"),
    "lstm-rows": ModelEntry("lstm", "images"),  # row by row
    "gpt-tiny": ModelEntry("gpt", "text", _transformer(4, 4, 128)),
    "gpt-124m": ModelEntry("gpt", "text", _transformer(12, 12, 768)),
    "gpt-350m": ModelEntry("gpt", "text", _transformer(24, 16, 1024)),
    "gpt-774m": ModelEntry("gpt", "text", _transformer(36, 20, 1280)),
    "gpt-1.5b": ModelEntry("gpt", "text", _transformer(48, 25, 1600)),
    "bert-tiny": ModelEntry("bert", "masked text", _transformer(4, 4, 128)),
    "bert-base": ModelEntry("bert", "masked text", _transformer(12, 12, 768)),
    "vit-tiny": ModelEntry("vit", "images", {**_transformer(4, 4, 128), "patch": 4}),
    "vit-b16": ModelEntry("vit", "images", {**_transformer(12, 12, 768), "patch": 16}),
}


def module_of(model: str) -> ModuleType:
    """Return the Python module that builds the model with this name."""
    module = MODELS[model].module
    match module:
        case "mlp":
            from payload.models import mlp

            return mlp
        case "cnn":
            from payload.models import cnn

            return cnn
        case "resnet":
            from payload.models import resnet

            return resnet
        case "lstm":
            from payload.models import lstm

            return lstm
        case "gpt":
            from payload.models import gpt

            return gpt
        case "bert":
            from payload.models import bert

            return bert
        case "vit":
            from payload.models import vit

            return vit
        case _:
            assert_never(module)
