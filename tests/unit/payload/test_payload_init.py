"""Training that begins with weights that are there, models that are exported, and what does not
fit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from payload.cli.arguments import parse
from payload.comm.base import Solo
from payload.data.datasets import synthetic_tokens
from payload.device.base import Array, CpuDevice
from payload.errors import UsageError
from payload.models import MODELS
from payload.nn.module import LayerContext
from payload.parallel.mesh import alone as on_one_rank
from payload.parallel.whole import WholeTensors
from payload.saved_model.folder import make_units
from payload.saved_model.libraries import LIBRARIES, config, naming
from payload.training.build import build_engine, model_sizes
from payload.training.initial import find_initial
from tests.support.messages import refused, shows

_SMALL = ("--layers", "1", "--heads", "2", "--width", "8", "--device", "cpu")
_SETTINGS = {"layers": 1, "heads": 2, "width": 8, "vocabulary": 256, "length": 8}


def _of_gpt2(folder: Path, **changes: Any) -> dict[str, Array]:
    """Weights in transformers' names, with the config beside them."""
    units = make_units("gpt-tiny", {**_SETTINGS, "length": 12}, LayerContext(CpuDevice()))
    weights = {
        p.name: p.form.to_torch(p.draw_initial(7)) for unit in units for p in unit.layer.parameters
    }
    library_weights = {
        name: np.ascontiguousarray(a, "float32")
        for name, a in naming("hf", "gpt-tiny").to_library(weights).items()
    }
    parsed = config("gpt-tiny", {**_SETTINGS, "dropout": 0.0, "norm_eps": 1e-5}, ())
    (folder / "config.json").write_text(json.dumps({**parsed, **changes}))
    return library_weights


def test_position_ids_of_a_single_number_are_refused(tmp_path: Path) -> None:
    units = make_units("gpt-tiny", _SETTINGS, LayerContext(CpuDevice()))
    shapes = {p.name: p.form.shape for unit in units for p in unit.layer.parameters}
    known = naming("hf", "gpt-tiny")
    library_weights = {
        **_of_gpt2(tmp_path),
        known.library_names("positions.weight")[0]: np.array(0.5),
    }
    with refused("weights-other-model", UsageError):
        known.from_library(shapes, library_weights, ())


@pytest.mark.parametrize("name", MODELS)
def test_tensor_has_a_name_in_each_library(name: str) -> None:
    sizes = (
        {"layers": 2, "heads": 2, "width": 8}
        if MODELS[name].module in ("gpt", "bert", "vit")
        else {}
    )
    needed = {"mlp": {"inputs": 4, "classes": 3}, "lstm": {"classes": 3, "features": 2, "width": 4}}
    needed["resnet"] = {"classes": 3, "width": 2}
    settings = {**MODELS[name].sizes, **sizes, **needed.get(MODELS[name].module, {})}
    units = make_units(name, settings, LayerContext(CpuDevice()))
    weights = {
        p.name: p.form.to_torch(p.draw_initial(7)) for unit in units for p in unit.layer.parameters
    }
    shapes = {own_name: array.shape for own_name, array in weights.items()}
    for library in ("torch", "hf", "torchvision"):
        if MODELS[name].module not in LIBRARIES[library]:
            with refused("export-unfit", UsageError, f"--export-as {library}", f"no {name}, only"):
                naming(library, name)
            continue
        known = naming(library, name)
        library_weights = known.to_library(weights)
        assert len(library_weights) >= len(weights)
        again = known.from_library(shapes, library_weights, ())
        for own_name, array in weights.items():
            np.testing.assert_array_equal(again[own_name], array)


def test_weights_of_gpt_2_with_more_positions_are_begun_with(tmp_path: Path) -> None:
    library_weights = _of_gpt2(tmp_path)
    less = {
        name.removeprefix("transformer."): array
        for name, array in library_weights.items()
        if name != "lm_head.weight"
    }
    less["h.0.attn.bias"] = np.ones((1, 1, 12, 12), "uint8")  # which files of long ago have
    save_file(less, tmp_path / "model.safetensors")
    for path in (tmp_path, tmp_path / "model.safetensors"):
        begun = dict(_begin(path))
        np.testing.assert_array_equal(begun["positions.weight"], less["wpe.weight"][:8])
        np.testing.assert_array_equal(
            begun["layers.0.linear1.weight"], less["h.0.mlp.c_fc.weight"].T
        )


@pytest.mark.parametrize(
    ("name", "array", "code", "values"),
    [
        ("transformer.ln_f.bias", None, "weights-other-model", ()),
        ("transformer.h.1.ln_1.bias", np.ones(8), "weights-other-model", ()),
        (
            "transformer.h.0.mlp.c_fc.weight",
            np.ones((32, 8)),
            "weights-other-model",
            ("(32, 8)", "(8, 32)"),
        ),
        ("transformer.wpe.weight", np.ones((7, 8)), "weights-other-model", ("(7, 8)", "(8, 8)")),
        ("lm_head.weight", np.ones((256, 8)), "weights-not-shared", ("transformer.wte.weight",)),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, name: str, array: Array | None, code: str, values: tuple[str, ...]
) -> None:
    library_weights = _of_gpt2(tmp_path)
    if array is None:
        del library_weights[name]
    else:
        library_weights[name] = array
    save_file(library_weights, file := tmp_path / "model.safetensors")
    with refused(
        "init-unfit", UsageError, f"--init: {file} cannot be used: ", name, *values
    ) as caught:
        _begin(file)
    assert shows(str(caught.value), code)


@pytest.mark.parametrize(
    ("name", "value", "values"),
    [
        ("n_head", 4, ("n_head=4,", "has 2", "--heads 4")),
        ("layer_norm_epsilon", 1e-3, ("layer_norm_epsilon=0.001,", "1e-05", "--norm-eps 0.001")),
        ("activation_function", "relu", ("activation_function='relu',", "'gelu_new'")),
    ],
)
def test_config_of_another_model_is_refused(
    tmp_path: Path, name: str, value: object, values: tuple[str, ...]
) -> None:
    save_file(_of_gpt2(tmp_path, **{name: value}), file := tmp_path / "model.safetensors")
    with refused("init-unfit", UsageError, f"--init: {file} cannot be used: ", *values) as caught:
        _begin(file)
    assert shows(str(caught.value), "init-other-config")


def test_weights_in_half_precision_are_loaded(tmp_path: Path) -> None:
    library_weights = {name: array.astype("float16") for name, array in _of_gpt2(tmp_path).items()}
    save_file(library_weights, file := tmp_path / "model.safetensors")
    table = dict(_begin(file))["embedding.weight"]
    np.testing.assert_array_equal(table, library_weights["lm_head.weight"].astype("float32"))


def _begin(file: Path) -> WholeTensors:
    """What a model has that began with these weights, in this process."""
    parsed = parse(["train", "--model", "gpt-tiny", "--data", "synthetic", *_SMALL])
    device = CpuDevice()
    mesh = on_one_rank()
    settings = model_sizes(parsed.model, synthetic_tokens(256, 8))
    units = make_units("gpt-tiny", settings, mesh.context(device))
    engine = build_engine(parsed, device, mesh, units)
    begun = find_initial(file, Solo())
    assert begun
    begun.load(engine, units, parsed, settings)
    return WholeTensors(engine, units)
