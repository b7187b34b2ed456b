"""Conversion of weights to and from the names of transformers and torchvision.

Exported models load in these libraries with ``strict=True``, and training can start from the
libraries' weights. Tensors differ in their names, and transformers stores the linear layers of
GPT-2 as (inputs, outputs). In this module, ``ours`` means names or tensors of this package,
``theirs`` those of a library.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from payload.device.base import Array
from payload.errors import UsageError
from payload.models import MODELS
from payload.saved_model.folder import refuse_unfit

Shapes = Mapping[str, tuple[int, ...]]

_NAME = re.compile(r"(?:layers\.(\d+)\.)?(.+?)(?:[._](weight|bias))?")


@dataclass(frozen=True, slots=True)
class Naming:
    """The names that a library, such as transformers, has for a model's tensors."""

    names: Mapping[str, str]
    """The library's module by the payload's module, with * for a block's number. If the library
    splits the module, its modules are separated by spaces. A tensor that does not end with .weight
    or .bias in the library is listed by the whole names of both tensors."""
    # This prefix is missing in files of the model without its head.
    prefix: str = ""
    # Whether the library transposes the linear layers of blocks.
    transposed: bool = False
    # The library's copies of tensors, each with the payload's tensor that it repeats.
    tied: Mapping[str, str] = field(default_factory=dict)
    # Regular expression for the library's tensors that the payload's model does not need.
    unused: str = ""

    def library_names(self, ours: str) -> list[str]:
        """Return the library's name for this package's tensor ``ours``, or the names if it is split
        there.
        """
        if not self.names:
            return [ours]
        match = _NAME.fullmatch(ours)
        number, module, end = match.groups() if match else (None, ours, None)
        module = f"layers.*.{module}" if number else module
        if whole := self.names.get(f"{module}.{end}"):
            return [whole]
        library_modules = self.names[module].replace("*", number or "").split()
        return [f"{module_name}.{end}" if end else module_name for module_name in library_modules]

    def to_library(self, weights: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return the tensors in ``weights`` under the library's names, as views, sorted by name."""
        theirs = {name: part for ours in weights for name, part in self._parts(ours, weights[ours])}
        tied = {name: weights[ours] for name, ours in self.tied.items()}
        return dict(sorted({**theirs, **tied}.items()))

    def _parts(self, ours: str, array: Array) -> Iterator[tuple[str, Array]]:
        """Split and convert this package's tensor. Yield the library's (name, view of
        ``array``).
        """
        names = self.library_names(ours)
        for name, part in zip(names, np.split(array, len(names)), strict=True):
            if self._turned(ours, array.ndim):
                yield name, part.T
            else:
                yield name, part[None] if name == _POSITIONS_OF_VIT else part

    def _turned(self, ours: str, axes: int) -> bool:
        return self.transposed and ours.startswith("layers.") and axes == 2  # noqa: PLR2004

    def from_library(
        self, shapes: Shapes, theirs: Mapping[str, Array], without: Collection[str]
    ) -> dict[str, Array]:
        """Convert a library's weights, ``theirs``, to the names and layouts of this package.

        Args:
            shapes: shapes of all tensors of this package's model, by name.
            without: this package's names of tensors to leave out.

        Raises UsageError if tensors are missing, unknown, or of another shape.
        """
        theirs = {_modern(name): array for name, array in theirs.items()}
        names: dict[str, list[str]] = {}
        expected: dict[str, tuple[int, ...]] = {}
        for ours in (ours for ours in shapes if ours not in without):
            names[ours] = []
            for name, part in self._parts(ours, np.broadcast_to(np.float32(0), shapes[ours])):
                short = name.removeprefix(self.prefix)
                library_name = short if short in theirs and name not in theirs else name
                names[ours].append(library_name)
                expected[library_name] = part.shape
                # A text model with fewer positions uses the first positions.
                array = theirs.get(library_name)
                if (
                    ours == "positions.weight"
                    and array is not None
                    and array.ndim == part.ndim == 2  # noqa: PLR2004
                ):
                    theirs[library_name] = array[: len(part)]
        omitted = {name for ours in without for name in self.library_names(ours)}
        unneeded = {*self.tied, *omitted} - {*expected}
        unneeded |= {
            name for name in theirs if name not in expected and re.fullmatch(self.unused, name)
        }
        refuse_unfit(expected, {name: theirs[name] for name in theirs if name not in unneeded})
        weights = {}
        for ours, parts in names.items():
            turned = self._turned(ours, len(shapes[ours]))
            arrays = [theirs[name].T if turned else theirs[name] for name in parts]
            whole = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
            weights[ours] = _single(whole).reshape(shapes[ours])
        for name, ours in self.tied.items():
            if name in theirs and not np.array_equal(theirs[name], weights[ours]):
                raise UsageError(
                    f"{name} differs from {names[ours][0]}, but the model has one tensor for both",
                    code="weights-not-shared",
                )
        return weights

    def count_known(self, shapes: Shapes, names: Sequence[str]) -> int:
        """Return how many of ``names`` are the library's names for the tensors of a model,
        ``shapes``.
        """
        known_names = {name for ours in shapes for name in self.library_names(ours)}
        return len(
            {*names} & {*known_names, *(name.removeprefix(self.prefix) for name in known_names)}
        )


def _single(array: Array) -> Array:
    return array.astype("float32") if array.dtype.itemsize < 4 else array  # noqa: PLR2004


def _modern(name: str) -> str:
    """Convert the name of a norm's tensor in an old file, LayerNorm.gamma, to LayerNorm.weight."""
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace(
        "LayerNorm.beta", "LayerNorm.bias"
    )


_POSITIONS_OF_VIT = "vit.embeddings.position_embeddings"
_GPT2 = Naming(
    {
        "embedding": "transformer.wte",
        "positions": "transformer.wpe",
        "layers.*.norm1": "transformer.h.*.ln_1",
        "layers.*.self_attn.in_proj": "transformer.h.*.attn.c_attn",
        "layers.*.self_attn.out_proj": "transformer.h.*.attn.c_proj",
        "layers.*.norm2": "transformer.h.*.ln_2",
        "layers.*.linear1": "transformer.h.*.mlp.c_fc",
        "layers.*.linear2": "transformer.h.*.mlp.c_proj",
        "norm": "transformer.ln_f",
    },
    prefix="transformer.",
    transposed=True,
    tied={"lm_head.weight": "embedding.weight"},
    unused=r".*\.attn\.(masked_)?bias",
)
_BLOCK = "bert.encoder.layer.*"
_BERT = Naming(
    {
        "embedding": "bert.embeddings.word_embeddings",
        "positions": "bert.embeddings.position_embeddings",
        "segments": "bert.embeddings.token_type_embeddings",
        "norm": "bert.embeddings.LayerNorm",
        "layers.*.self_attn.in_proj": " ".join(
            f"{_BLOCK}.attention.self.{part}" for part in ("query", "key", "value")
        ),
        "layers.*.self_attn.out_proj": f"{_BLOCK}.attention.output.dense",
        "layers.*.norm1": f"{_BLOCK}.attention.output.LayerNorm",
        "layers.*.linear1": f"{_BLOCK}.intermediate.dense",
        "layers.*.linear2": f"{_BLOCK}.output.dense",
        "layers.*.norm2": f"{_BLOCK}.output.LayerNorm",
        "head.linear": "cls.predictions.transform.dense",
        "head.norm": "cls.predictions.transform.LayerNorm",
        "head": "cls.predictions",
    },
    prefix="bert.",
    tied={
        "cls.predictions.decoder.weight": "embedding.weight",
        "cls.predictions.decoder.bias": "head.bias",
    },
    unused=r"(bert\.)?(pooler\..*|embeddings\.position_ids)|cls\.seq_relationship\..*",
)
_BLOCK = "vit.encoder.layer.*"
_VIT = Naming(
    {
        "class_token": "vit.embeddings.cls_token",
        "positions.weight": _POSITIONS_OF_VIT,
        "patches": "vit.embeddings.patch_embeddings.projection",
        "layers.*.norm1": f"{_BLOCK}.layernorm_before",
        "layers.*.self_attn.in_proj": " ".join(
            f"{_BLOCK}.attention.attention.{part}" for part in ("query", "key", "value")
        ),
        "layers.*.self_attn.out_proj": f"{_BLOCK}.attention.output.dense",
        "layers.*.norm2": f"{_BLOCK}.layernorm_after",
        "layers.*.linear1": f"{_BLOCK}.intermediate.dense",
        "layers.*.linear2": f"{_BLOCK}.output.dense",
        "norm": "vit.layernorm",
        "head": "classifier",
    },
    prefix="vit.",
    unused=r"(vit\.)?pooler\..*",
)
OURS = Naming({}, unused=r".*\.num_batches_tracked")
"""The payload's own names, which torchvision's ResNets share."""

LIBRARIES: Mapping[str, Mapping[str, Naming]] = {
    "torch": dict.fromkeys((entry.module for entry in MODELS.values()), OURS),
    "hf": {"gpt": _GPT2, "bert": _BERT, "vit": _VIT},
    "torchvision": {"resnet": OURS},
}
"""Names by ``--export-as`` and by the model's module."""


def naming(library: str, model: str) -> Naming:
    """Return a library's tensor names for a model. Raises UsageError if the library lacks the
    model.
    """
    namings = LIBRARIES[library]
    if (module := MODELS[model].module) in namings:
        return namings[module]
    models = ", ".join(name for name, entry in MODELS.items() if entry.module in namings)
    raise UsageError(
        f"--export-as {library}: this library has no {model}, only {models}; use --export-as torch",
        code="export-unfit",
    )


def from_any(
    model: str, shapes: Shapes, weights: Mapping[str, Array], without: Collection[str] = ()
) -> tuple[dict[str, Array], bool]:
    """Convert the weights of a file, by this package or a library, to the names and layouts of this
    package.

    Return the weights, and whether the file has transformers' names. Raises UsageError if the
    weights do not
    fit the model. shapes: the model's tensors. without: this package's names of tensors to leave
        out.
    """
    module = MODELS[model].module
    namings = [by_module[module] for by_module in LIBRARIES.values() if module in by_module]
    names = [_modern(name) for name in weights]
    best = max(namings, key=lambda candidate: candidate.count_known(shapes, names))
    return best.from_library(shapes, weights, without), best is not OURS


def config(model: str, settings: Mapping[str, Any], classes: Sequence[str]) -> dict[str, Any]:
    """Return transformers' config.json for a model. settings: the arguments for building the
    model.
    """
    shared = {"torch_dtype": "float32", "initializer_range": 0.02}
    match MODELS[model].module:
        case "gpt":
            return shared | _gpt2_config(settings)
        case "bert":
            return shared | _encoder_config(settings) | _bert_config(settings)
        case _:
            return shared | _encoder_config(settings) | _vit_config(settings, classes)


def _gpt2_config(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": settings["vocabulary"],
        "n_positions": settings["length"],
        "n_layer": settings["layers"],
        "n_head": settings["heads"],
        "n_embd": settings["width"],
        "n_inner": 4 * settings["width"],
        "activation_function": "gelu_new",
        "layer_norm_epsilon": settings["norm_eps"],
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
        **{f"{part}_pdrop": settings["dropout"] for part in ("embd", "attn", "resid")},
    }


def _encoder_config(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in config.json that BERT and the Vision Transformer share."""
    return {
        "num_hidden_layers": settings["layers"],
        "num_attention_heads": settings["heads"],
        "hidden_size": settings["width"],
        "intermediate_size": 4 * settings["width"],
        "hidden_act": "gelu",
        "layer_norm_eps": settings["norm_eps"],
        "hidden_dropout_prob": settings["dropout"],
    }


def _bert_config(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["BertForMaskedLM"],
        "model_type": "bert",
        "vocab_size": settings["vocabulary"],
        "max_position_embeddings": settings["length"],
        "type_vocab_size": 2,
        "attention_probs_dropout_prob": settings["dropout"],
        "tie_word_embeddings": True,
        "pad_token_id": None,
    }


def _vit_config(settings: Mapping[str, Any], classes: Sequence[str]) -> dict[str, Any]:
    return {
        "architectures": ["ViTForImageClassification"],
        "model_type": "vit",
        "image_size": settings["side"],
        "patch_size": settings["patch"],
        "num_channels": settings["channels"],
        "qkv_bias": True,
        "attention_probs_dropout_prob": 0.0,
        "id2label": {str(number): name for number, name in enumerate(classes)},
        "label2id": {name: number for number, name in enumerate(classes)},
    }


_FREE = re.compile(
    r"architectures|torch_dtype|initializer_range|.*drop.*|.*token_id|id2label|label2id|vocab_size|n_positions"
    r"|max_position_embeddings|n_inner"
)
"""Settings that may differ, because they do not change the computation, or tensor shapes show them.
"""
_FLAGS = {"n_head": "--heads", "num_attention_heads": "--heads"}
_FLAGS |= dict.fromkeys(("layer_norm_epsilon", "layer_norm_eps"), "--norm-eps")


def refuse_other(model: str, settings: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Raise UsageError if a library's config.json, ``theirs``, does not fit the model with
    ``settings``.
    """
    for key, ours in config(model, settings, ()).items():
        if key in theirs and theirs[key] != ours and not _FREE.fullmatch(key):
            flag = f": pass {_FLAGS[key]} {theirs[key]}" if key in _FLAGS else ""
            raise UsageError(
                f"config.json of the weights has {key}={theirs[key]!r}, but this model has "
                f"{ours!r}{flag}",
                code="init-other-config",
            )
