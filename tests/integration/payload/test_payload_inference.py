"""A trained model in use: sample, predict, and eval by a model folder."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from payload.cli.config import SampleConfig
from payload.commands.predict import probabilities
from payload.commands.sample import tokens
from payload.data.datasets import load_digits, tokenizer_of
from payload.device.base import CpuDevice, Device
from payload.saved_model.folder import load
from tests.integration.payload.conftest import Runner, python
from tests.support.payload import assert_one_error, idx_file

SENTENCE = "the cat sat on the mat."


TEXT = f"{SENTENCE} ".encode() * 200


@pytest.fixture(scope="module")
def digits(alone: Runner, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("digits")
    alone("train", "--epochs", "3", "--out", str(out))
    return out


@pytest.fixture(scope="module")
def letters(alone: Runner, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("letters")
    (out / "text").write_bytes(TEXT)
    data = ("--data", f"text:{out / 'text'}", "--tokenizer", "bpe:270", "--sequence-length", "16")
    sizes = ("--model", "gpt-tiny", "--layers", "1", "--width", "32", "--heads", "2")
    steps = ("--optimizer", "adamw", "--lr", "0.01", "--iterations", "120", "--epochs", "99")
    alone("train", *data, *sizes, *steps, "--out", str(out))
    return out


def images_csv(file: Path, images: NDArray[np.uint8]) -> Path:
    rows = images.reshape(len(images), -1)
    file.write_text("".join(",".join(map(str, row)) + "\n" for row in rows.tolist()))
    return file


def test_predict_gives_the_same_digits_from_each_file_format(
    alone: Runner, digits: Path, tmp_path: Path
) -> None:
    held_out = load_digits()[1]
    images = held_out.images[:50]
    labels = held_out.labels[:50]
    rows = images_csv(tmp_path / "rows.csv", images)
    packed = tmp_path / "images"
    packed.write_bytes(idx_file(images[..., 0]))
    argv = ("predict", "--model-folder", str(digits / "model"), str(rows), str(packed))
    output = alone(*argv)
    assert (output.returncode, output.stderr) == (0, "")
    lines = [line.rpartition(": ") for line in output.stdout.splitlines()]
    assert [place for place, _, _ in lines[48:52]] == [
        f"{rows}:49",
        f"{rows}:50",
        f"{packed}:1",
        f"{packed}:2",
    ]
    assert [found for _, _, found in lines[:50]] == [found for _, _, found in lines[50:100]]
    classes = [int(found.split()[0]) for _, _, found in lines[:50]]
    assert sum(classes == labels for classes, labels in zip(classes, labels, strict=True)) >= 45
    found = json.loads(alone(*argv, "--output", "json").stdout)["predictions"]
    assert [f"{one['class']} {one['probability']:.4f}" for one in found] == [
        text for _, _, text in lines
    ]
    assert found[1].keys() == {"file", "row", "class", "probability"}


def test_eval_of_a_model_matches_the_training(
    alone: Runner, mpirun: Runner, digits: Path, letters: Path
) -> None:
    for run in (digits, letters):
        folder = str(run / "model")
        record = json.loads((run / "model" / "model.json").read_bytes())
        for which in ("best", "final"):
            found = json.loads(alone("eval", "--model-folder", folder, "--weights", which).stdout)
            facts = record["files"][which]
            assert found["iteration"] == facts["iteration"]
            assert found["loss"] == pytest.approx(facts["metrics"]["loss"], rel=1e-5)
            assert found["accuracy"] == pytest.approx(facts["metrics"]["accuracy"], rel=1e-5)
        again = json.loads(mpirun(2, "eval", "--model-folder", folder, "--weights", "final").stdout)
        assert (again["samples"], again["loss"]) == (
            found["samples"],
            pytest.approx(found["loss"], rel=1e-5),
        )


def test_text_follows_the_prompt(alone: Runner, letters: Path) -> None:
    def sample(*flags: str) -> str:
        answer = alone("sample", "--model-folder", str(letters / "model"), "--tokens", "12", *flags)
        assert (answer.returncode, answer.stderr) == (0, "")
        return answer.stdout

    likeliest = sample("--prompt", "the cat", "--temperature", "0")
    assert likeliest.startswith(SENTENCE)
    assert likeliest == sample("--prompt", "the cat", "--top-k", "1", "--seed", "5")
    wild = ("--prompt", "the cat", "--temperature", "3", "--output", "json")
    assert (
        sample(*wild, "--seed", "1") == sample(*wild, "--seed", "1") != sample(*wild, "--seed", "2")
    )
    found = json.loads(sample("--prompt", "the cat", "--temperature", "0", "--output", "json"))
    assert found == {"prompt": "the cat", "text": likeliest[len("the cat") : -1], "tokens": 12}
    # Without a prompt, beyond its window.
    assert len(sample("--tokens", "20", "--temperature", "0")) > 20


def test_inference_gives_the_same_answers_on_each_device(
    device: Device, digits: Path, letters: Path
) -> None:
    pixels = load_digits()[1].images[:3].astype(float)
    found, expected = (
        probabilities(load(digits / "model", "best", each), pixels)
        for each in (device, CpuDevice())
    )
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert found.sum(axis=1) == pytest.approx([1, 1, 1])
    written = load(letters / "model", "best", device)
    config = SampleConfig(model_folder=letters / "model", tokens=6, temperature=0.0)
    tokenizer = tokenizer_of(written.record.tokenizer or {})
    text = tokens(written, tokenizer.encode(b"the cat").tolist(), config, limit=tokenizer.size)
    assert tokenizer.decode(text).startswith(b" sat on")


def test_predict_works_without_mpi(digits: Path, letters: Path, tmp_path: Path) -> None:
    rows = images_csv(tmp_path / "rows.csv", load_digits()[1].images[:1])
    commands = (
        ["predict", "--model-folder", str(digits / "model"), str(rows)],
        ["sample", "--model-folder", str(letters / "model"), "--tokens", "1"],
        ["eval", "--model-folder", str(digits / "model")],
    )
    program = "import sys; sys.modules['mpi4py'] = None; from payload.__main__ import main; "
    program += f"sys.exit(any([main(argv) for argv in {commands}]))"
    assert python("-c", program).stderr == ""


def test_inference_unfit_for_the_model_is_refused(
    alone: Runner, digits: Path, letters: Path, tmp_path: Path
) -> None:
    rows = images_csv(tmp_path / "rows.csv", load_digits()[1].images[:1])
    moved = tmp_path / "model"
    moved.symlink_to(digits / "model")
    images = str(digits / "model")
    text = str(letters / "model")
    for argv, code, value in (
        (("sample", "--model-folder", images), "model-unfit-for-command", "which takes images"),
        (
            ("predict", "--model-folder", text, str(rows)),
            "model-unfit-for-command",
            "which takes text",
        ),
        (("sample", "--model-folder", str(tmp_path)), "not-a-model-folder", "model.json"),
        (("predict", "--model-folder", images, "nowhere.csv"), "file-unreadable", "nowhere.csv"),
        (("eval", "--model-folder", str(moved)), "data-not-named", str(moved)),
        (("eval", "--model-folder", str(moved), "--out", "a"), "options-exclusive", "--out"),
        (("eval", "--weights", "final", "--out", "a"), "setting-without-effect", "--weights "),
    ):
        assert_one_error(alone(*argv, rc=2).stderr, code, value)
    found = json.loads(alone("eval", "--model-folder", str(moved), "--data", "digits").stdout)
    assert math.isfinite(found["loss"])
