"""Training that begins with weights that are there, and models that are exported."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from payload.__main__ import main
from payload.saved_model.folder import read_record
from tests.integration.payload.conftest import Runner
from tests.support.payload import assert_one_error, records
from tests.support.sweeps import in_sweep
from tests.unit.payload.test_payload_init import _SMALL, _of_gpt2


def _gpt(folder: Path, tokenizer: str = "bytes") -> list[str]:
    (folder / "text").write_bytes(b"the quick brown fox jumps over the lazy dog, " * 60)
    data = ("--data", f"text:{folder / 'text'}", "--sequence-length", "8", "--tokenizer", tokenizer)
    return ["--model", "gpt-tiny", *_SMALL, *data, "--iterations", "2"]


@pytest.mark.parametrize(
    "layout", ["--tp 2", *in_sweep("--pp 2", "--zero 3", "--tp 2 --precision bf16")]
)
def test_initial_weights_are_loaded_in_any_layout(
    alone: Runner, mpirun: Runner, layout: str, tmp_path: Path
) -> None:
    save_file(_of_gpt2(tmp_path), file := tmp_path / "model.safetensors")
    flags = [*_gpt(tmp_path), "--init", str(file), "--out"]
    answer = alone("train", *flags, str(tmp_path / "one"))
    assert f"weights of {file}" in answer.stdout
    answer = mpirun(2, "train", *layout.split(), *flags, str(tmp_path / "two"))
    rel = 1e-2 if "bf16" in layout else 1e-5
    loss_two, loss_one = (records(tmp_path / run, "iteration")[0]["loss"] for run in ("two", "one"))
    assert loss_two == pytest.approx(loss_one, rel=rel)


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


def test_new_head_is_for_other_classes(alone: Runner, tmp_path: Path) -> None:
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
    loss_one = {
        "linear0.weight": rng.standard_normal((6, 64)).astype("float32"),
        "linear0.bias": np.ones(6, "float32"),
        "linear1.weight": np.ones((1000, 6), "float32"),
        "linear1.bias": np.ones(1000, "float32"),
    }
    save_file(loss_one, file := tmp_path / "theirs.safetensors")
    answer = alone("train", *flags, "--init", str(file), "--out", str(tmp_path / "a"), rc=2)
    sizes = ("linear1.weight has shape (1000, 6)", "the model needs (10, 6)")
    assert_one_error(answer.stderr, "weights-other-model", f"--init: {file}", *sizes)
    for out, more in (("b", ("--init", str(file), "--new-head")), ("c", ())):
        alone("train", *flags, *more, "--out", str(tmp_path / out))
    b, c = (load_file(tmp_path / out / "model" / "final.safetensors") for out in ("b", "c"))
    np.testing.assert_allclose(b["linear0.weight"], loss_one["linear0.weight"], atol=1e-6)
    # As it would be drawn.
    np.testing.assert_allclose(b["linear1.weight"], c["linear1.weight"], atol=1e-6)


def test_init_from_a_file_without_a_model_is_refused(alone: Runner, tmp_path: Path) -> None:
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


def test_checkpoint_and_a_model_folder_are_exported_alike(
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
            answer_json = json.loads(capsys.readouterr().out)
            files.append((to / file).read_bytes())
            assert (answer_json["model"], answer_json["iteration"], answer_json["bytes"]) == (
                "gpt-tiny",
                2,
                len(files[-1]),
            )
        assert files[0] == files[1]
    answer_json = [
        json.loads((tmp_path / f"hf-{of}" / "config.json").read_text())
        for of in ("of-model", "of-checkpoint")
    ]
    assert answer_json[0] == answer_json[1]
    tokens = json.loads((tmp_path / "hf-of-model" / "tokenizer_config.json").read_text())
    assert tokens["model_input_names"] == ["input_ids", "attention_mask"]
    assert (
        answer_json[0]["n_positions"],
        answer_json[0]["vocab_size"],
        answer_json[0]["n_head"],
    ) == (8, 256, 2)
    assert (
        main(["export", "--checkpoint", str(checkpoint), "--to", "a", "--export-as", "torchvision"])
        == 2
    )
    lacking = "--export-as torchvision: this library has no gpt-tiny, only resnet18, resnet50"
    assert_one_error(capsys.readouterr().err, "export-unfit", lacking)


def test_export_of_a_small_image_resnet_as_torchvision_is_refused(
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
