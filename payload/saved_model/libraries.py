"""Weights as transformers and torchvision name them: so a model of ours loads there with ``strict=True``, and
training here can begin with theirs.

Ours have the names and layouts that ``folder`` tells. What differs is data: tables of names, and that
transformers keeps the linear layers of GPT-2 as (inputs, outputs).
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
    """How a library names a model's tensors."""

    names: Mapping[str, str]
    """Of a module of ours, theirs; * is a block's number. Several have parts of it. Of a tensor whose
    name has no such end there, both whole names."""
    prefix: str = ""  # which files of the model without its head lack
    transposed: bool = False  # linear layers of blocks are (inputs, outputs)
    tied: Mapping[str, str] = field(default_factory=dict)  # tensors of theirs that are one of ours once more
    unused: str = ""  # an expression for names of what a model of ours does without

    def names_of(self, ours: str) -> list[str]:
        """What a tensor of ours is there: as a rule one name, or those of its parts."""
        if not self.names:
            return [ours]
        found = _NAME.fullmatch(ours)
        number, module, end = found.groups() if found else (None, ours, None)
        module = f"layers.*.{module}" if number else module
        if whole := self.names.get(f"{module}.{end}"):
            return [whole]
        theirs = self.names[module].replace("*", number or "").split()
        return [f"{one}.{end}" if end else one for one in theirs]

    def to_library(self, weights: Mapping[str, Array]) -> Mapping[str, Array]:
        """All tensors of a model by the library's names, sorted: views of ours."""
        theirs = {name: part for ours in weights for name, part in self._parts(ours, weights[ours])}
        tied = {name: weights[ours] for name, ours in self.tied.items()}
        return dict(sorted({**theirs, **tied}.items()))

    def _parts(self, ours: str, array: Array) -> Iterator[tuple[str, Array]]:
        """What a tensor of ours is there: a view of it, or views of its parts."""
        names = self.names_of(ours)
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
        """The tensors of our model.

        Args:
            shapes: of all of them.
            without: names of ours that are not asked for, whatever the library has there.

        Raises:
            UsageError: one is missing or of another shape, or there is one that our model has not.
        """
        theirs = {_modern(name): array for name, array in theirs.items()}
        names: dict[str, list[str]] = {}
        expected: dict[str, tuple[int, ...]] = {}
        for ours in (ours for ours in shapes if ours not in without):
            names[ours] = []
            for name, part in self._parts(ours, np.broadcast_to(np.float32(0), shapes[ours])):
                short = name.removeprefix(self.prefix)
                there = short if short in theirs and name not in theirs else name
                names[ours].append(there)
                expected[there] = part.shape
                # Of more positions than a text model has, the first will do.
                if ours == "positions.weight" and there in theirs and theirs[there].ndim == part.ndim == 2:  # noqa: PLR2004
                    theirs[there] = theirs[there][: len(part)]
        spare = {*self.tied, *(name for ours in without for name in self.names_of(ours))} - {*expected}
        spare |= {name for name in theirs if name not in expected and re.fullmatch(self.unused, name)}
        refuse_unfit(expected, {name: theirs[name] for name in theirs if name not in spare})
        found = {}
        for ours, parts in names.items():
            turned = self._turned(ours, len(shapes[ours]))
            arrays = [theirs[name].T if turned else theirs[name] for name in parts]
            whole = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
            found[ours] = _single(whole).reshape(shapes[ours])
        for name, ours in self.tied.items():
            if name in theirs and not np.array_equal(theirs[name], found[ours]):
                raise UsageError(
                    f"{name} has numbers of its own, and the model shares those of {names[ours][0]}",
                    code="weights-not-shared",
                )
        return found

    def knows(self, shapes: Shapes, names: Sequence[str]) -> int:
        """How many of the names it has for a model of ours."""
        known = {name for ours in shapes for name in self.names_of(ours)}
        return len({*names} & {*known, *(name.removeprefix(self.prefix) for name in known)})


def _single(array: Array) -> Array:
    """As float32, if it is of a smaller format."""
    return array.astype("float32") if array.dtype.itemsize < 4 else array  # noqa: PLR2004


def _modern(name: str) -> str:
    """Files of TensorFlow's time name a norm's numbers otherwise."""
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


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
"""As they are; torchvision's ResNets have the same names."""

LIBRARIES: Mapping[str, Mapping[str, Naming]] = {
    "torch": dict.fromkeys((entry.module for entry in MODELS.values()), OURS),
    "hf": {"gpt": _GPT2, "bert": _BERT, "vit": _VIT},
    "torchvision": {"resnet": OURS},
}
"""By ``--export-as``, and the module of the model."""


def naming(library: str, model: str) -> Naming:
    """
    Raises:
        UsageError: the library has no such model.
    """
    known = LIBRARIES[library]
    if (module := MODELS[model].module) in known:
        return known[module]
    able = ", ".join(name for name, entry in MODELS.items() if entry.module in known)
    raise UsageError(
        f"--export-as {library}: it has no {model}, only {able}; torch has all", code="export-unfit"
    )


def from_any(
    model: str, shapes: Shapes, weights: Mapping[str, Array], without: Collection[str] = ()
) -> tuple[dict[str, Array], bool]:
    """The weights of a model from a file of ours or of a library, and whether they have transformers' names.

    Args:
        without: names of ours that are not asked for.

    Raises:
        UsageError: they are not of such a model.
    """
    module = MODELS[model].module
    namings = [known[module] for known in LIBRARIES.values() if module in known]
    names = [_modern(name) for name in weights]
    best = max(namings, key=lambda one: one.knows(shapes, names))
    return best.from_library(shapes, weights, without), best is not OURS


def config(model: str, settings: Mapping[str, Any], classes: Sequence[str]) -> dict[str, Any]:
    """transformers' config.json of a model.

    Args:
        settings: with which it was built.
        classes: names of a classifier's.
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
    """What BERT's and that of the Vision Transformer have in common."""
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
"""What a config may have otherwise: it does not change what the model computes, or tensors tell of it."""
_FLAGS = {"n_head": "--heads", "num_attention_heads": "--heads"}
_FLAGS |= dict.fromkeys(("layer_norm_epsilon", "layer_norm_eps"), "--norm-eps")


def refuse_other(model: str, settings: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """
    Args:
        theirs: the config.json beside a library's weights.

    Raises:
        UsageError: it is of a model that computes something else, though of such tensors.
    """
    for key, ours in config(model, settings, ()).items():
        if key in theirs and theirs[key] != ours and not _FREE.fullmatch(key):
            flag = f": give {_FLAGS[key]} {theirs[key]}" if key in _FLAGS else ""
            raise UsageError(
                f"its config.json says {key} {theirs[key]!r}, and the model has {ours!r}{flag}",
                code="init-other-config",
            )
