"""Data sets: files good and bad, what is made of them, and by whom."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from payload.comm.base import Solo
from payload.data import datasets, idx
from payload.data.base import Dataset
from payload.data.datasets import data_record, open_dataset
from payload.data.images import Images, Labelled
from payload.data.text import MaskedText, Text
from payload.data.tokenizer import BytePairs, Bytes, learn
from payload.device.base import Array
from payload.errors import UsageError
from payload.nn.module import RandomState
from tests.support.messages import refused
from tests.support.payload import idx_file, train_config

_IMAGES = "train-images-idx3-ubyte"
_LABELS = "t10k-labels-idx1-ubyte"
_TEXT = b"the cat sat on the mat, and the other cat sat on the other mat. " * 40


def _draw(samples: int, iteration: int = 1) -> RandomState:
    return RandomState(0, iteration, np.arange(samples, dtype="uint32"))


def _write(folder: Path, *, compressed: bool = False) -> tuple[Array, Array]:
    rng = np.random.default_rng(0)
    images = rng.integers(256, size=(7, 6, 5), dtype=np.uint8)
    labels = np.arange(7, dtype=np.uint8) % 3
    for kind in ("train", "t10k"):
        for name, array in (
            (f"{kind}-images-idx3-ubyte", images),
            (f"{kind}-labels-idx1-ubyte", labels),
        ):
            data = idx_file(array)
            if compressed:
                (folder / f"{name}.gz").write_bytes(gzip.compress(data))
            else:
                (folder / name).write_bytes(data)
    return images, labels


def _open(
    *flags: str, data_state: Mapping[str, Any] | None = None, eval_only: bool = False
) -> Dataset:
    return open_dataset(train_config(*flags), Solo(), data_state, eval_only=eval_only)


def _recorded(*flags: str) -> dict[str, Any]:
    config = train_config(*flags)
    record = data_record(config, open_dataset(config, Solo()))
    assert json.loads(json.dumps(record)) == record
    return record


def test_data_record_has_sizes_and_hashes_of_the_files(tmp_path: Path) -> None:
    digits = Path(datasets.__file__).with_name("digits.npz").read_bytes()
    assert _recorded() == {
        "name": "digits",
        "training": 1438,
        "held_out": 359,
        "bytes": len(digits),
        "sha256": {"digits.npz": hashlib.sha256(digits).hexdigest()},
    }
    _write(tmp_path, compressed=True)
    files = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in tmp_path.iterdir()
    }
    assert _recorded("--data", f"idx:{tmp_path}")["sha256"] == files
    assert _recorded("--data", "synthetic", "--model", "resnet18")["bytes"] == 0


def test_text_and_its_tokenizer_have_hashes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(_TEXT)
    flags = (
        "--model",
        "gpt-tiny",
        "--data",
        f"text:{tmp_path / 'a.txt'}",
        "--sequence-length",
        "8",
    )
    plain = _recorded(*flags)
    pairs = _recorded(*flags, "--tokenizer", "bpe:270")
    assert plain["sha256"] == pairs["sha256"] == {"a.txt": hashlib.sha256(_TEXT).hexdigest()}
    assert plain["tokenizer_sha256"] != pairs["tokenizer_sha256"]
    assert pairs == _recorded(*flags, "--tokenizer", "bpe:270")


def test_large_file_is_identified_by_its_size_and_ends(tmp_path: Path) -> None:
    """The file has a hole, which takes no space on the disk."""
    path = tmp_path / "a.txt"
    size = (256 << 20) + 1
    mebibyte = 1 << 20

    def sampled_hash(
        size: int, first: bytes = b"a", middle: bytes = b"", last: bytes = b"z"
    ) -> str:
        with path.open("wb") as file:
            file.write(first)
            file.seek(size // 2)
            file.write(middle)
            file.seek(size - 1)
            file.write(last)
        record: dict[str, Any] = {"bytes": 0}
        datasets.add_hash(record, path)
        assert record.keys() == {"bytes", "sampled_sha256"}
        assert record["bytes"] == size
        return str(record["sampled_sha256"]["a.txt"])

    known = sampled_hash(size)
    ends = b"a" + bytes(2 * mebibyte - 2) + b"z"
    assert known == hashlib.sha256(f"{size}\n".encode() + ends).hexdigest()
    assert sampled_hash(size, middle=b"m") == known
    others = [sampled_hash(size, first=b"b"), sampled_hash(size, last=b"y"), sampled_hash(size + 1)]
    assert known not in others


@pytest.mark.parametrize("compressed", [False, True])
def test_idx_files_are_read_back_equal(tmp_path: Path, compressed: bool) -> None:
    images, labels = _write(tmp_path, compressed=compressed)
    training, held_out = idx.load(tmp_path)
    np.testing.assert_array_equal(training.images[..., 0], images)
    np.testing.assert_array_equal(held_out.labels, labels)


def test_fashion_mnist_is_read_from_debians_files() -> None:
    source = _open("--data", "idx:/usr/share/datasets/fashion-mnist")
    assert (source.training, source.held_out, source.facts["classes"]) == (60_000, 10_000, 10)
    x, _ = source.held_out_batch(np.arange(10_000))
    assert x.shape == (10_000, 28, 28, 1)
    # The mean and deviation that everyone uses.
    assert x.min() == pytest.approx(-0.2860 / 0.3530, abs=1e-3)
    assert x.max() == pytest.approx((1 - 0.2860) / 0.3530, abs=1e-3)


@pytest.mark.parametrize(
    ("name", "spoil", "code", "value"),
    [
        (_IMAGES, lambda data: data[:-1], "idx-truncated", "225 bytes for 7x6x5"),
        (_IMAGES, lambda data: data + b"x", "idx-truncated", "227 bytes for 7x6x5"),
        (_IMAGES, lambda data: data[:6], "idx-truncated", "6 bytes for"),
        (_IMAGES, lambda _: b"", "not-idx", "nothing"),
        (_IMAGES, lambda data: b"\x89PNG" + data, "not-idx", "89504e47"),
        (_IMAGES, lambda data: b"\0\0\x0d" + data[3:], "not-idx", "00000d03"),
        (_LABELS, lambda data: gzip.compress(data)[:-9], "file-unreadable", "Compressed file"),
        (_LABELS, lambda data: b"\x1f\x8b" + data, "file-unreadable", "Unknown compression"),
        (
            _LABELS,
            lambda _: idx_file(np.zeros(6, np.uint8)),
            "images-labels-differ",
            "shape 6: each",
        ),
        (
            _LABELS,
            lambda _: idx_file(np.zeros((7, 1), np.uint8)),
            "images-labels-differ",
            "shape 7x1",
        ),
        (
            _IMAGES,
            lambda _: idx_file(np.zeros((7, 6, 0), np.uint8)),
            "images-labels-differ",
            "7x6x0",
        ),
    ],
)
def test_damaged_idx_file_is_refused_by_name(
    tmp_path: Path, name: str, spoil: Callable[[bytes], bytes], code: str, value: str
) -> None:
    _write(tmp_path)
    (tmp_path / name).write_bytes(spoil((tmp_path / name).read_bytes()))
    with refused(code, UsageError, name, value):
        idx.load(tmp_path)


@pytest.mark.parametrize(
    ("files", "code", "values"),
    [
        (("t10k", (7, 10, 10), 2), "images-other-size", ("held-out images of 10x10x1", "6x5x1")),
        (("t10k", (7, 6, 5), 3), "labels-too-high", ("held-out label 3,", "end at 2")),
        (("train", (0, 6, 5), 2), "images-labels-differ", ("train-images-idx3-ubyte", "0x6x5")),
        (("t10k", (0, 0, 0), 2), "images-labels-differ", ("t10k-images-idx3-ubyte", "0x0x0")),
    ],
)
def test_idx_images_and_labels_that_do_not_match_are_refused(
    tmp_path: Path, files: tuple[str, tuple[int, ...], int], code: str, values: tuple[str, ...]
) -> None:
    """files: train or t10k, the shape of the images, and the label of all."""
    _write(tmp_path)
    kind, shape, label = files
    (tmp_path / f"{kind}-images-idx3-ubyte").write_bytes(idx_file(np.zeros(shape, np.uint8)))
    (tmp_path / f"{kind}-labels-idx1-ubyte").write_bytes(
        idx_file(np.full(shape[0], label, np.uint8))
    )
    with refused(code, UsageError, *values):
        _open("--data", f"idx:{tmp_path}")


@pytest.mark.parametrize(
    ("flags", "code", "values"),
    [
        ("--data idx:/nowhere", "no-such-file", ("no folder /nowhere",)),
        ("--data idx:.", "no-such-file", ("train-images-idx", str(Path.cwd()))),
        ("--data text:/nowhere --model gpt-tiny", "file-unreadable", ("/nowhere",)),
        ("--data text:/etc/hostname", "data-unfit-for-model", ("takes images;", "idx:DIR")),
        (
            "--data digits --model bert-tiny",
            "data-unfit-for-model",
            ("takes masked text;", "text:FILE"),
        ),
        ("--data text:/dev/null --model gpt-tiny", "text-too-short", ("0 + 0 tokens", "128")),
    ],
)
def test_missing_or_unfit_data_is_refused(flags: str, code: str, values: tuple[str, ...]) -> None:
    with refused(code, UsageError, *values):
        _open(*flags.split())


def test_images_are_normalised_by_the_training_set() -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(100, 200, size=(50, 6, 6, 2), dtype=np.uint8)
    images[..., 1] //= 4
    one_level = np.full((50, 6, 6, 1), 7, np.uint8)
    samples = Labelled(np.concatenate([images, one_level], axis=-1), np.arange(50) % 4)
    source = Images("test", samples, samples, dtype="float64")
    x, labels = source.training_batch(np.arange(50), 1, _draw(50))
    assert x.mean(axis=(0, 1, 2)) == pytest.approx(np.zeros(3), abs=1e-12)
    assert x.std(axis=(0, 1, 2)) == pytest.approx([1, 1, 0], abs=1e-12)
    np.testing.assert_array_equal(labels, samples.labels)
    assert {"inputs": 108, "side": 6, "channels": 3, "classes": 4}.items() <= dict(
        source.facts
    ).items()


def test_cleaning_removes_and_counts_duplicates() -> None:
    images = np.arange(6, dtype=np.uint8).repeat(4).reshape(6, 2, 2, 1)
    training = Labelled(images[[0, 1, 1, 2]], np.array([0, 1, 1, 0]))
    held_out = Labelled(images[[2, 3]], np.array([0, 1]))
    source = Images("test", training, held_out, dtype="float32", clean=True)
    assert (source.training, source.held_out) == (3, 1)
    assert "2 repeated images" in source.about
    with refused("too-few-images", UsageError, "3 training", "0 held-out"):
        Images(
            "test", training, Labelled(images[:2], np.zeros(2, int)), dtype="float32", clean=True
        )


def test_image_augmentation_depends_on_the_draw_only() -> None:
    rng = np.random.default_rng(0)
    samples = Labelled(rng.integers(256, size=(40, 16, 16, 1), dtype=np.uint8), np.zeros(40, int))
    plain = Images("test", samples, samples, dtype="float32")
    varied = Images("test", samples, samples, dtype="float32", augment=("crop", "flip"))
    every = np.arange(40)
    places = np.arange(40, dtype="uint32")
    original, _ = plain.training_batch(every, 1, _draw(40))
    whole, _ = varied.training_batch(every, 1, _draw(40))
    again = [
        varied.training_batch(every[i::3], 1, RandomState(0, 1, places[i::3]))[0] for i in range(3)
    ]
    for part, batch in enumerate(again):
        np.testing.assert_array_equal(whole[part::3], batch)
    assert (whole != varied.training_batch(every, 1, _draw(40, iteration=2))[0]).any()
    np.testing.assert_array_equal(varied.held_out_batch(every)[0], original)

    flipped = 0
    for before, after in zip(original[..., 0], whole[..., 0], strict=True):
        found = [
            (dy, dx, turned)
            for dy in range(-2, 3)
            for dx in range(-2, 3)
            for turned in (False, True)
            if np.array_equal(
                before[max(0, dy) : 16 + min(0, dy), max(0, dx) : 16 + min(0, dx)],
                (after[:, ::-1] if turned else after)[
                    max(0, -dy) : 16 - max(0, dy), max(0, -dx) : 16 - max(0, dx)
                ],
            )
        ]
        assert len(found) == 1
        flipped += found[0][2]
    assert 8 <= flipped <= 32


def test_text_windows_cover_the_text_and_ask_for_the_next_token() -> None:
    text = bytes(np.random.default_rng(0).integers(256, size=2_433, dtype=np.uint8))
    source = Text("test", text, Bytes(), length=10, seed=0)
    boundary = len(text) - len(text) // 20
    starts = set()
    for epoch in (1, 2, 3):
        x, y = source.training_batch(np.arange(source.training), epoch, _draw(source.training))
        np.testing.assert_array_equal(x[:, 1:], y[:, :-1])
        np.testing.assert_array_equal(x[1:, 0], y[:-1, -1])  # windows follow on each other
        whole = bytes(np.append(x.ravel(), y[-1, -1]).astype(np.uint8))
        assert whole in text[:boundary]
        assert len(whole) > boundary - 20
        starts.add(text.index(whole))
    assert len(starts) > 1
    x, _ = source.held_out_batch(np.arange(source.held_out))
    assert bytes(x.ravel().astype(np.uint8)) == text[boundary:][: x.size]
    assert source.bytes_per_target == 1


def test_masked_text_has_the_shares_of_bert() -> None:
    length = 200
    text = bytes(np.random.default_rng(0).integers(97, 123, size=40_000, dtype=np.uint8))
    masked, plain = (
        kind("test", text, Bytes(), length=length, seed=0) for kind in (MaskedText, Text)
    )
    every = np.arange(plain.training)
    x, y = masked.training_batch(every, 1, _draw(len(every)))
    original, _ = plain.training_batch(every, 1, _draw(len(every)))
    chosen = y >= 0
    np.testing.assert_array_equal(y[chosen], original[chosen])
    np.testing.assert_array_equal(x[~chosen], original[~chosen])
    assert chosen.mean() == pytest.approx(0.15, abs=0.01)
    assert (x[chosen] == 256).mean() == pytest.approx(0.8, abs=0.02)
    assert (x[chosen] == original[chosen]).mean() == pytest.approx(0.1, abs=0.02)
    assert masked.targets == 0.15 * length
    assert masked.facts["vocabulary"] == 257  # the mask, too
    half = masked.training_batch(
        every[50:], 1, RandomState(0, 1, np.arange(50, len(every), dtype="uint32"))
    )
    np.testing.assert_array_equal(half[0], x[50:])
    np.testing.assert_array_equal(half[1], y[50:])
    short = MaskedText("test", text, Bytes(), length=3, seed=0)
    _, y = short.held_out_batch(np.arange(short.held_out))
    assert (y >= 0).any(axis=1).all()
    twice = [masked.held_out_batch(np.arange(masked.held_out)) for _ in range(2)]
    np.testing.assert_array_equal(twice[0][0], twice[1][0])


def test_byte_pairs_merge_the_most_frequent_first() -> None:
    pairs = learn(b"aaabdaaabac", 259)  # Wikipedia's example, within one word
    a = ord("a")
    b = ord("b")
    assert pairs.merges == ((a, a), (a, b), (256, 257))
    assert pairs.encode(b"aaabdaaabac").tolist() == [258, ord("d"), 258, a, ord("c")]


@pytest.mark.parametrize(
    "text", [b"", b" ", b"a", bytes(range(256)) * 2, "Ünïcode ß\n\n\tx_1 ".encode(), _TEXT]
)
def test_byte_pairs_encode_and_decode_any_text(text: bytes) -> None:
    pairs = learn(_TEXT, 300)
    assert pairs.decode(pairs.encode(text)) == text
    assert Bytes().decode(Bytes().encode(text)) == text


def test_wrong_merge_of_a_tokenizer_is_refused() -> None:
    for merges in ([[97, 300]], [[-1, 97]], [[256, 97]]):
        with pytest.raises(ValueError, match="not tokens yet"):
            BytePairs.read({"merges": merges})


def test_byte_pairs_of_zero_bytes_are_merged() -> None:
    """Files such as dumps of memory have many of them."""
    pairs = learn(b"a\0\0" * 100, 258)
    assert (0, 0) in pairs.merges or (97, 0) in pairs.merges
    assert pairs.decode(pairs.encode(b"\0\0a")) == b"\0\0a"


def test_byte_pairs_are_fewer_than_bytes_and_the_same_each_time() -> None:
    pairs = learn(_TEXT, 270)
    assert pairs.size == 270
    assert len(pairs.encode(_TEXT)) < 0.6 * len(_TEXT)
    assert (Bytes().encode(_TEXT).dtype, pairs.encode(_TEXT).dtype) == ("uint8", "uint16")
    assert learn(_TEXT, 270).merges == pairs.merges
    assert learn(b"abc", 300).merges == ()  # nothing repeats
    assert BytePairs(pairs.merges).encode(_TEXT).tolist() == pairs.encode(_TEXT).tolist()


def _text_flags(file: Path, tokenizer: str = "bpe:280") -> tuple[str, ...]:
    given = ("--data", f"text:{file}", "--model", "gpt-tiny", "--sequence-length", "8")
    return (*given, "--tokenizer", tokenizer)


def test_tokenizer_is_trained_on_the_training_text_only(tmp_path: Path) -> None:
    file = tmp_path / "text"
    boundary = len(_TEXT) - len(_TEXT) // 20
    file.write_bytes(_TEXT[:boundary] + b"zq" * ((len(_TEXT) - boundary) // 2))
    source = _open(*_text_flags(file))
    assert source.data_state == {"merges": learn(_TEXT[:boundary], 280).merges}
    assert source.facts["vocabulary"] == 273
    file.write_bytes(_TEXT)
    assert (_open(*_text_flags(file)).bytes_per_target or 0) > 1.6


@pytest.mark.parametrize(
    "data_state", [{}, {"merges": 1}, {"merges": [[1]]}, {"merges": [["a", "b"]]}]
)
def test_byte_pairs_that_were_not_learned_are_missed(
    tmp_path: Path, data_state: Mapping[str, Any]
) -> None:
    (tmp_path / "text").write_bytes(_TEXT)
    with refused("data-state-unfit", UsageError, "--tokenizer bpe:280", "fit bpe"):
        _open(*_text_flags(tmp_path / "text"), data_state=data_state)


def test_held_out_images_are_normalized_by_the_saved_data_state(tmp_path: Path) -> None:
    _write(tmp_path)
    run = _open("--data", f"idx:{tmp_path}")
    data_state = json.loads(json.dumps(dict(run.data_state)))
    expected = run.held_out_batch(np.arange(7))[0]
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx_file(np.zeros((7, 6, 5), np.uint8)))
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx_file(np.zeros(7, np.uint8)))
    resumed = _open("--data", f"idx:{tmp_path}", data_state=data_state)
    for file in tmp_path.glob("train-*"):
        file.unlink()
    judged = _open("--data", f"idx:{tmp_path}", data_state=data_state, eval_only=True)
    for source in (resumed, judged):
        np.testing.assert_array_equal(source.held_out_batch(np.arange(7))[0], expected)
        assert (source.facts, source.data_state) == (run.facts, run.data_state)
    assert (judged.training, judged.held_out) == (0, 7)
    with refused("no-such-file", UsageError, "train-images"):
        _open("--data", f"idx:{tmp_path}", "--clean", data_state=data_state, eval_only=True)


@pytest.mark.parametrize(
    ("changed", "code", "values"),
    [
        ({"shape": [9, 9, 1]}, "images-other-size", ("training images of 6x5x1", "9x9x1")),
        ({"classes": 2}, "labels-too-high", ("training label 2,", "end at 1")),
        ({"mean": []}, "data-state-unfit", ("fit images",)),
        ({"scale": None}, "data-state-unfit", ("fit images",)),
    ],
)
def test_images_of_another_shape_than_the_run_are_refused(
    tmp_path: Path, changed: dict[str, Any], code: str, values: tuple[str, ...]
) -> None:
    _write(tmp_path)
    data_state = {**_open("--data", f"idx:{tmp_path}").data_state, **changed}
    with refused(code, UsageError, *values):
        _open("--data", f"idx:{tmp_path}", data_state=data_state)


class _Crowd(Solo):
    """Six other nodes have read something else."""

    def allgather(self, value: Any) -> list[Any]:
        return (
            [value] if value is None else [value, *(("2 bytes", f"n{i // 2}") for i in range(12))]
        )


def test_data_that_differs_on_many_nodes_names_four() -> None:
    with refused("data-differs-on-nodes", UsageError, "2 bytes on n0, n1, n2, n3 and 2 more;"):
        open_dataset(train_config(), _Crowd())
