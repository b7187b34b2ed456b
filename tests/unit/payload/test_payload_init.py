"""Training that begins with weights that are there, models that are exported, and what does not
fit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from payload.__main__ import main
from payload.cli.arguments import parse
from payload.comm.base import Solo
from payload.data.datasets import synthetic_tokens
from payload.device.base import Array, Cpu
from payload.errors import UsageError
from payload.models import MODELS
from payload.nn.module import Context
from payload.parallel.mesh import alone as on_one_rank
from payload.parallel.whole import WholeTensors
from payload.saved_model.folder import make_units, read_record
from payload.saved_model.libraries import LIBRARIES, config, naming
from payload.training.build import build_engine, model_sizes
from payload.training.initial import find_initial
from tests.support.messages import refused, shows
from tests.support.sweeps import in_sweep
from tests.unit.payload.conftest import Runner, assert_one_error, records

_SMALL = ("--layers", "1", "--heads", "2", "--width", "8", "--device", "cpu")
_SETTINGS = {"layers": 1, "heads": 2, "width": 8, "vocabulary": 256, "length": 8}


def _gpt(folder: Path, tokenizer: str = "bytes") -> list[str]:
    (folder / "text").write_bytes(b"the quick brown fox jumps over the lazy dog, " * 60)
    data = ("--data", f"text:{folder / 'text'}", "--sequence-length", "8", "--tokenizer", tokenizer)
    return ["--model", "gpt-tiny", *_SMALL, *data, "--iterations", "2"]


def _of_gpt2(folder: Path, **changes: Any) -> dict[str, Array]:
    """Weights in transformers' names, with the config beside them."""
    units = make_units("gpt-tiny", {**_SETTINGS, "length": 12}, Context(Cpu()))
    weights = {
        p.name: p.form.to_torch(p.draw_initial(7)) for unit in units for p in unit.layer.parameters
    }
    theirs = {
        name: np.ascontiguousarray(a, "float32")
        for name, a in naming("hf", "gpt-tiny").to_library(weights).items()
    }
    told = config("gpt-tiny", {**_SETTINGS, "dropout": 0.0, "norm_eps": 1e-5}, ())
    (folder / "config.json").write_text(json.dumps({**told, **changes}))
    return theirs


def test_positions_that_are_one_number_are_refused(tmp_path: Path) -> None:
    units = make_units("gpt-tiny", _SETTINGS, Context(Cpu()))
    shapes = {p.name: p.form.shape for unit in units for p in unit.layer.parameters}
    known = naming("hf", "gpt-tiny")
    theirs = {**_of_gpt2(tmp_path), known.library_names("positions.weight")[0]: np.array(0.5)}
    with refused("weights-other-model", UsageError):
        known.from_library(shapes, theirs, ())


@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_has_a_name_in_each_library(name: str) -> None:
    sizes = (
        {"layers": 2, "heads": 2, "width": 8}
        if MODELS[name].module in ("gpt", "bert", "vit")
        else {}
    )
    needed = {"mlp": {"inputs": 4, "classes": 3}, "lstm": {"classes": 3, "features": 2, "width": 4}}
    needed["resnet"] = {"classes": 3, "width": 2}
    settings = {**MODELS[name].sizes, **sizes, **needed.get(MODELS[name].module, {})}
    units = make_units(name, settings, Context(Cpu()))
    weights = {
        p.name: p.form.to_torch(p.draw_initial(7)) for unit in units for p in unit.layer.parameters
    }
    shapes = {ours: array.shape for ours, array in weights.items()}
    for library in ("torch", "hf", "torchvision"):
        if MODELS[name].module not in LIBRARIES[library]:
            with refused("export-unfit", UsageError, f"--export-as {library}", f"no {name}, only"):
                naming(library, name)
            continue
        known = naming(library, name)
        theirs = known.to_library(weights)
        assert len(theirs) >= len(weights)
        again = known.from_library(shapes, theirs, ())
        for ours, array in weights.items():
            np.testing.assert_array_equal(again[ours], array)


def test_weights_of_gpt_2_with_more_positions_are_begun_with(tmp_path: Path) -> None:
    theirs = _of_gpt2(tmp_path)
    less = {
        name.removeprefix("transformer."): array
        for name, array in theirs.items()
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
    "layout", ["--tp 2", *in_sweep("--pp 2", "--zero 3", "--tp 2 --precision bf16")]
)
def test_any_layout_begins_with_them(
    alone: Runner, mpirun: Runner, layout: str, tmp_path: Path
) -> None:
    save_file(_of_gpt2(tmp_path), file := tmp_path / "model.safetensors")
    flags = [*_gpt(tmp_path), "--init", str(file), "--out"]
    answer = alone("train", *flags, str(tmp_path / "one"))
    assert f"weights of {file}" in answer.stdout
    answer = mpirun(2, "train", *layout.split(), *flags, str(tmp_path / "two"))
    rel = 1e-2 if "bf16" in layout else 1e-5
    ours, theirs = (records(tmp_path / run, "iteration")[0]["loss"] for run in ("two", "one"))
    assert ours == pytest.approx(theirs, rel=rel)


def test_init_from_a_run_yields_to_a_checkpoint(alone: Runner, tmp_path: Path) -> None:
    flags = _gpt(tmp_path, "bpe:270")
    first = tmp_path / "first"
    second = tmp_path / "second"
    saving = ("--save-interval", "1", "--resume", "auto", "--out")
    answer = alone("train", *flags, *saving, str(first))
    (tmp_path / "text").write_bytes(b"other words, of which other pairs would be learned. " * 60)
    init = ("--init", str(first / "model"))
    for _ in range(2):
        answer = alone("train", *flags, *init, *saving, str(second))
    assert "starts with" not in answer.stdout
    assert "resuming from " in answer.stdout
    records = [read_record(out / "model") for out in (first, second)]
    assert records[0].tokenizer == records[1].tokenizer
    answer = alone("train", *_gpt(tmp_path), *init, "--out", str(tmp_path / "third"), rc=2)
    assert_one_error(answer.stderr, "init-other-tokenizer", "--tokenizer bpe,", "bytes")
    answer = alone("train", *flags, *init, "--heads", "4", "--out", str(tmp_path / "third"), rc=2)
    assert_one_error(answer.stderr, "init-other-size", "--heads 2,", "not 4")


def test_a_new_head_is_for_other_classes(alone: Runner, tmp_path: Path) -> None:
    flags = (
        "--iterations",
        "1",
        "--hidden",
        "6",
        "--device",
        "cpu",
        "--lr",
        "1e-12",
        "--seed",
        "3",
    )
    rng = np.random.default_rng(1)
    theirs = {
        "linear0.weight": rng.standard_normal((6, 64)).astype("float32"),
        "linear0.bias": np.ones(6, "float32"),
        "linear1.weight": np.ones((1000, 6), "float32"),
        "linear1.bias": np.ones(1000, "float32"),
    }
    save_file(theirs, file := tmp_path / "theirs.safetensors")
    answer = alone("train", *flags, "--init", str(file), "--out", str(tmp_path / "a"), rc=2)
    sizes = ("linear1.weight has shape (1000, 6)", "the model needs (10, 6)")
    assert_one_error(answer.stderr, "weights-other-model", f"--init: {file}", *sizes)
    for out, more in (("b", ("--init", str(file), "--new-head")), ("c", ())):
        alone("train", *flags, *more, "--out", str(tmp_path / out))
    b, c = (load_file(tmp_path / out / "model" / "final.safetensors") for out in ("b", "c"))
    np.testing.assert_allclose(b["linear0.weight"], theirs["linear0.weight"], atol=1e-6)
    # As it would be drawn.
    np.testing.assert_allclose(b["linear1.weight"], c["linear1.weight"], atol=1e-6)


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
    theirs = _of_gpt2(tmp_path)
    if array is None:
        del theirs[name]
    else:
        theirs[name] = array
    save_file(theirs, file := tmp_path / "model.safetensors")
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
def test_a_config_of_another_model_is_refused(
    tmp_path: Path, name: str, value: object, values: tuple[str, ...]
) -> None:
    save_file(_of_gpt2(tmp_path, **{name: value}), file := tmp_path / "model.safetensors")
    with refused("init-unfit", UsageError, f"--init: {file} cannot be used: ", *values) as caught:
        _begin(file)
    assert shows(str(caught.value), "init-other-config")


def test_numbers_of_half_the_size_will_do(tmp_path: Path) -> None:
    theirs = {name: array.astype("float16") for name, array in _of_gpt2(tmp_path).items()}
    save_file(theirs, file := tmp_path / "model.safetensors")
    table = dict(_begin(file))["embedding.weight"]
    np.testing.assert_array_equal(table, theirs["lm_head.weight"].astype("float32"))


def _begin(file: Path) -> WholeTensors:
    """What a model has that began with these weights, in this process."""
    told = parse(["train", "--model", "gpt-tiny", "--data", "synthetic", *_SMALL])
    device = Cpu()
    mesh = on_one_rank()
    settings = model_sizes(told.model, synthetic_tokens(256, 8))
    units = make_units("gpt-tiny", settings, mesh.context(device))
    engine = build_engine(told, device, mesh, units)
    begun = find_initial(file, Solo())
    assert begun
    begun.load(engine, units, told, settings)
    return WholeTensors(engine, units)


def test_what_is_no_model_is_refused(alone: Runner, tmp_path: Path) -> None:
    (tmp_path / "torn").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    for path, code in (
        ("missing", "no-such-file"),
        ("torn", "file-unreadable"),
        ("", "no-such-file"),
    ):
        answer = alone(
            "train", "--init", str(tmp_path / path), "--out", str(tmp_path / "out"), rc=2
        )
        assert_one_error(answer.stderr, code, "--init: ", str(tmp_path / path))


def test_a_checkpoint_and_a_model_folder_are_exported_alike(
    alone: Runner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    alone("train", *_gpt(tmp_path), "--save-interval", "2", "--out", str(out))
    (checkpoint,) = (out / "checkpoints").glob("iteration-*")
    for library, file in (("hf", "model.safetensors"), ("torch", "")):
        files = []
        for name, source in (
            ("of-model", ("--model-folder", str(out / "model"), "--weights", "final")),
            ("of-checkpoint", ("--checkpoint", str(checkpoint))),
        ):
            to = tmp_path / f"{library}-{name}"
            assert main(["export", *source, "--to", str(to), "--export-as", library]) == 0
            told = json.loads(capsys.readouterr().out)
            files.append((to / file).read_bytes())
            assert (told["model"], told["iteration"], told["bytes"]) == (
                "gpt-tiny",
                2,
                len(files[-1]),
            )
        assert files[0] == files[1]
    told = [
        json.loads((tmp_path / f"hf-{of}" / "config.json").read_text())
        for of in ("of-model", "of-checkpoint")
    ]
    assert told[0] == told[1]
    tokens = json.loads((tmp_path / "hf-of-model" / "tokenizer_config.json").read_text())
    assert tokens["model_input_names"] == ["input_ids", "attention_mask"]
    assert (told[0]["n_positions"], told[0]["vocab_size"], told[0]["n_head"]) == (8, 256, 2)
    assert (
        main(["export", "--checkpoint", str(checkpoint), "--to", "a", "--export-as", "torchvision"])
        == 2
    )
    lacking = "--export-as torchvision: this library has no gpt-tiny, only resnet18, resnet50"
    assert_one_error(capsys.readouterr().err, "export-unfit", lacking)


def test_a_resnet_of_small_images_is_none_of_torchvisions(
    alone: Runner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--model", "resnet18", "--width", "2", "--iterations", "1", "--device", "cpu")
    alone("train", *flags, "--out", str(tmp_path))
    argv = ["export", "--model-folder", str(tmp_path / "model"), "--to", str(tmp_path / "file")]
    assert main([*argv, "--export-as", "torchvision"]) == 2
    assert_one_error(capsys.readouterr().err, "export-unfit", "(64, 3, 7, 7)", "(2, 1, 3, 3)")
    assert not (tmp_path / "file").exists()
    assert main([*argv, "--export-as", "hf"]) == 2
    assert_one_error(
        capsys.readouterr().err, "export-unfit", "--export-as hf", "no resnet18, only gpt-tiny"
    )
