"""A trained model in use: sample, predict, and eval by a model folder; and the files that images
come in.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from payload.cli.config import SampleConfig
from payload.commands.predict import probabilities
from payload.commands.sample import tokens
from payload.data import png
from payload.data.datasets import load_digits, tokenizer_of
from payload.data.inputs import read_images
from payload.device.base import Device
from payload.errors import UsageError
from payload.saved_model.folder import load
from tests.support.messages import refused
from tests.unit.payload.conftest import Runner, assert_one_error, idx_file, python

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


def encoded(
    rows: NDArray[np.uint8],
    width: int,
    depth: int,
    color: int,
    *,
    kind: int = 0,
    palette: bytes = b"",
    interlaced: int = 0,
) -> bytes:
    """A PNG of packed rows, each filtered by ``kind``."""
    step = max(1, {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[color] * depth // 8)
    above = np.zeros(rows.shape[1], int)
    raw = bytearray()
    for row in rows.astype(int):
        left, corner = (np.concatenate([np.zeros(step, int), one[:-step]]) for one in (row, above))
        guess = left + above - corner
        nearest = np.where(
            (abs(guess - left) <= abs(guess - above)) & (abs(guess - left) <= abs(guess - corner)),
            left,
            np.where(abs(guess - above) <= abs(guess - corner), above, corner),
        )
        predicted = (0 * row, left, above, (left + above) // 2, nearest)[kind]
        raw += bytes([kind]) + ((row - predicted) % 256).astype(np.uint8).tobytes()
        above = row
    header = struct.pack(">IIBBBBB", width, len(rows), depth, color, 0, 0, interlaced)
    parts = [
        (b"IHDR", header),
        (b"PLTE", palette),
        (b"IDAT", zlib.compress(bytes(raw))),
        (b"IEND", b""),
    ]
    return png.SIGNATURE + b"".join(
        struct.pack(">I4s", len(content), name)
        + content
        + struct.pack(">I", zlib.crc32(name + content))
        for name, content in parts
        if content or name == b"IEND"
    )


NOISE = np.random.default_rng(0).integers(256, size=(5, 4, 4), dtype=np.uint8)


@pytest.mark.parametrize("kind", range(5))
def test_pngs_of_8_bits_by_each_filter(kind: int) -> None:
    for color, channels in ((0, 1), (2, 3), (4, 2), (6, 4)):
        pixels = NOISE[..., :channels]
        data = encoded(pixels.reshape(5, -1), 4, 8, color, kind=kind)
        seen = pixels[..., : 1 if channels < 3 else 3]
        assert (png.read(data, (5, 4, seen.shape[2])) == seen).all()


def test_pngs_in_gray_and_in_color() -> None:
    gray = encoded(NOISE[..., 0], 4, 8, 0)
    assert (png.read(gray, (5, 4, 3)) == NOISE[..., :1]).all()
    color = encoded(NOISE[..., :3].reshape(5, -1), 4, 8, 2)
    luma = NOISE[..., :3] @ np.array([0.299, 0.587, 0.114])
    assert abs(png.read(color, (5, 4, 1))[..., 0] - luma).max() <= 0.5


@pytest.mark.parametrize("depth", [1, 2, 4, 16])
def test_pngs_of_other_depths_and_with_a_palette(depth: int) -> None:
    if depth == 16:
        rows = np.stack([NOISE[..., 0], NOISE[..., 1]], axis=2).reshape(5, -1)
        assert (png.read(encoded(rows, 4, 16, 0, kind=2), (5, 4, 1)) == NOISE[..., :1]).all()
        return
    values = NOISE[..., 0] >> (8 - depth)
    bits = (values[..., None] >> np.arange(depth)[::-1]) & 1
    rows = np.packbits(bits.reshape(5, -1), axis=1)
    gray = png.read(encoded(rows, 4, depth, 0), (5, 4, 1))[..., 0]
    assert (gray == values.astype(int) * 255 // (2**depth - 1)).all()
    palette = np.random.default_rng(1).integers(256, size=(2**depth, 3), dtype=np.uint8)
    found = png.read(encoded(rows, 4, depth, 3, palette=palette.tobytes()), (5, 4, 3))
    assert (found == palette[values]).all()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (encoded(NOISE[..., 0], 4, 8, 0, interlaced=1), "interlaced"),
        (encoded(NOISE[:3, :, 0], 4, 8, 0), "4x3 pixels"),
        (encoded(NOISE[..., 0], 4, 8, 0)[:-30], "truncated"),
        (png.SIGNATURE, "damaged"),
        (png.SIGNATURE + struct.pack(">I4sIIBBBBB", 13, b"IHDR", 4, 5, 8, 9, 0, 0, 0), "damaged"),
        (encoded(NOISE[..., 0], 4, 8, 3, palette=b"abc"), "damaged"),
        (b"1,2,3\n", "line 1 has 3 numbers"),
        (",".join("1" * 21).encode(), "column of labels"),
        (b"a,b\nc,d\n", "line 2 must"),
        (b"nan," * 19 + b"1", "not finite"),
        (b"a,b\n", "no rows"),
        (idx_file(np.zeros((1, 2, 2), np.uint8)), "images are 2x2,"),
    ],
)
def test_files_without_such_images_are_refused(data: bytes, why: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(data)
    with refused("bad-input", UsageError, str(file), why):
        read_images(file, (5, 4, 1))


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"\xff\xd8\xff\xe0 as of a JPEG")
    with refused("not-an-input", UsageError, str(file)):
        read_images(file, (5, 4, 1))


def test_columns_may_have_names_and_semicolons(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("\ufeffp0;p1;p2;p3\n\n1;2;3;4.5\n")
    assert read_images(file, (2, 2, 1)).tolist() == [[[[1], [2]], [[3], [4.5]]]]


def test_digits_are_predicted_the_same_of_each_kind_of_file(
    alone: Runner, digits: Path, tmp_path: Path
) -> None:
    held_out = load_digits()[1]
    images = held_out.images[:50]
    labels = held_out.labels[:50]
    rows = images_csv(tmp_path / "rows.csv", images)
    packed = tmp_path / "images"
    one = tmp_path / "one.png"
    packed.write_bytes(idx_file(images[..., 0]))
    one.write_bytes(encoded(images[0, ..., 0], 8, 8, 0))
    argv = ("predict", "--model-folder", str(digits / "model"), str(rows), str(packed), str(one))
    said = alone(*argv)
    assert (said.returncode, said.stderr) == (0, "")
    lines = [line.rpartition(": ") for line in said.stdout.splitlines()]
    assert [place for place, _, _ in lines[48:52]] == [
        f"{rows}:49",
        f"{rows}:50",
        f"{packed}:1",
        f"{packed}:2",
    ]
    assert lines[100] == (str(one), ": ", lines[0][2])
    assert [found for _, _, found in lines[:50]] == [found for _, _, found in lines[50:100]]
    classes = [int(found.split()[0]) for _, _, found in lines[:50]]
    assert sum(classes == labels for classes, labels in zip(classes, labels, strict=True)) >= 45
    found = json.loads(alone(*argv, "--output", "json").stdout)["predictions"]
    assert [f"{one['class']} {one['probability']:.4f}" for one in found] == [
        text for _, _, text in lines
    ]
    assert found[1].keys() == {"file", "row", "class", "probability"}


def test_eval_by_a_model_is_what_the_training_said(
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


def test_on_a_gpu_the_answers_are_the_same(device: Device, digits: Path, letters: Path) -> None:
    seen = load(digits / "model", "best", device)
    pixels = load_digits()[1].images[:3].astype(float)
    assert probabilities(seen, pixels).sum(axis=1) == pytest.approx([1, 1, 1])
    written = load(letters / "model", "best", device)
    config = SampleConfig(model_folder=letters / "model", tokens=6, temperature=0.0)
    tokenizer = tokenizer_of(written.record.tokenizer or {})
    found = tokens(written, tokenizer.encode(b"the cat").tolist(), config, limit=tokenizer.size)
    assert tokenizer.decode(found).startswith(b" sat on")


def test_a_model_is_used_where_there_is_no_mpi(digits: Path, letters: Path, tmp_path: Path) -> None:
    rows = images_csv(tmp_path / "rows.csv", load_digits()[1].images[:1])
    commands = (
        ["predict", "--model-folder", str(digits / "model"), str(rows)],
        ["sample", "--model-folder", str(letters / "model"), "--tokens", "1"],
        ["eval", "--model-folder", str(digits / "model")],
    )
    program = "import sys; sys.modules['mpi4py'] = None; from payload.__main__ import main; "
    program += f"sys.exit(any([main(argv) for argv in {commands}]))"
    assert python("-c", program).stderr == ""


def test_what_a_model_can_not_do_is_told(
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
        (("predict", "--model-folder", images, "nowhere.png"), "file-unreadable", "nowhere.png"),
        (("eval", "--model-folder", str(moved)), "data-not-named", str(moved)),
        (("eval", "--model-folder", str(moved), "--out", "a"), "options-exclusive", "--out"),
        (("eval", "--weights", "final", "--out", "a"), "setting-without-effect", "--weights "),
    ):
        assert_one_error(alone(*argv, rc=2).stderr, code, value)
    found = json.loads(alone("eval", "--model-folder", str(moved), "--data", "digits").stdout)
    assert math.isfinite(found["loss"])
