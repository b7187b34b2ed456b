"""The numbers that programs of others write: TensorBoard's event files, Lightning's metrics.csv."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryFile
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboardX import SummaryWriter
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.proto.tensor_pb2 import TensorProto
from tensorboardX.record_writer import RecordWriter

from clusterctl.runs.curve import STEP
from clusterctl.runs.metric_files import Block, MetricFiles
from clusterctl.runs.series import summarize
from clusterctl.runs.tensorboard import EventFiles, ReadBudget

Point = tuple[str, float | None, float]


def points(folder: Path) -> list[Point]:
    """Each value with its step, in the order of the files; None for a value without a step."""
    return [
        (name, x if block.axis == STEP else None, value)
        for block in blocks(folder)
        for name, column in block.columns.items()
        for x, value in zip(column.xs or (), column.ys, strict=True)
    ]


def blocks(folder: Path) -> list[Block]:
    return list(MetricFiles(folder).blocks())


def board(folder: Path, *scalars: tuple[str, float, int]) -> Path:
    """An event file, as PyTorch's SummaryWriter writes it."""
    suffix = f".{len(list(folder.glob('*')))}"
    with SummaryWriter(str(folder), filename_suffix=suffix) as writer:
        for tag, value, step in scalars:
            writer.add_scalar(tag, value, step, walltime=step + 0.5)
    return next(folder.glob(f"*{suffix}"))


def written(folder: Path, *events: Event) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"events.out.tfevents.{len(list(folder.iterdir()))}.host"
    writer = RecordWriter(str(path))
    for event in events:
        writer.write(event.SerializeToString())
    writer.close()
    return path


def event(step: int, **values: Any) -> Event:
    """``values``: of the tag ``x``."""
    return Event(
        wall_time=1.0, step=step, summary=Summary(value=[Summary.Value(tag="x", **values)])
    )


def test_scalars_have_their_names_steps_and_times(tmp_path: Path) -> None:
    losses = (("loss/train", 2.0, 1), ("loss/train", 1.5, 2))
    board(tmp_path / "runs/Nov23_10-00-00_demo-1", *losses, ("epoch", 1, 2))
    (tmp_path / "runs/checkpoint").mkdir()
    (block,) = blocks(tmp_path)
    (name,) = block.columns
    column = block.columns[name]
    assert (name, block.axis, column.xs, column.ys, column.times) == (
        "loss/train", "step", (1, 2), (2.0, 1.5), (1.5, 2.5)
    )  # fmt: skip
    loss = summarize(tmp_path).metrics["loss/train"]
    assert (loss.last, loss.last_step, loss.max, loss.count) == (1.5, 2, 2.0, 2)


def test_numbers_are_read_as_each_library_writes_them(tmp_path: Path) -> None:
    def tensor(**fields: Any) -> Event:
        return event(0, tensor=TensorProto(**fields))

    written(
        tmp_path,
        Event(wall_time=1.0, file_version="brain.Event:2"),
        event(-1, simple_value=0.5),
        tensor(dtype=1, float_val=[1.5]),
        tensor(dtype=1, tensor_content=struct.pack("<f", 2.5)),
        tensor(dtype=2, double_val=[3.5]),
        tensor(dtype=2, tensor_content=struct.pack("<d", 4.5)),
        event(2**62, simple_value=float("nan")),
        # None of these is a scalar.
        tensor(dtype=1, float_val=[1.0, 2.0]),
        tensor(dtype=7, string_val=[b"text"]),
        tensor(dtype=1, tensor_content=b"12345678" * 1000),
        event(3, image=Summary.Image(height=1, encoded_image_string=b"x" * 100)),
        event(3, histo={"min": 1.0}),
        event(4, image=Summary.Image(encoded_image_string=b"x" * (1 << 20))),
        event(5, simple_value=6.5),
    )
    found = points(tmp_path)
    assert [value for _, _, value in found][:5] == [0.5, 1.5, 2.5, 3.5, 4.5]
    assert [step for _, step, _ in found] == [-1, 0, 0, 0, 0, 2**62, 5]
    assert summarize(tmp_path).metrics["x"].nonfinite == 1


def test_bundled_train_and_other_programs_that_write_both(tmp_path: Path) -> None:
    ours = tmp_path / "ours"
    other = tmp_path / "other"
    for folder, kind in ((ours, "run"), (other, "start")):
        board(folder / "tensorboard", ("loss", 9.0, 1), ("accuracy", 0.5, 1))
        lines = ({"kind": kind}, {"kind": "iteration", "step": 1, "loss": 9.0, "time": 3.0})
        (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    assert points(ours) == [("loss", 1, 9.0)]
    assert points(other) == [("loss", 1, 9.0), ("accuracy", 1, 0.5)]
    assert [block.kind for block in blocks(other)] == ["start", "iteration", ""]


def test_folders_tell_names_apart_and_starts_of_a_program_do_not(tmp_path: Path) -> None:
    for part, value in (("train", 1.0), ("validation", 2.0)):
        board(tmp_path / "logs/fit/20261123-101500" / part, ("epoch_loss", value, 1))
    assert points(tmp_path) == [("train/epoch_loss", 1, 1.0), ("validation/epoch_loss", 1, 2.0)]
    again = tmp_path / "again"
    for number in (2, 10):  # after a requeue
        (again / f"lightning_logs/version_{number}").mkdir(parents=True)
        table = f"epoch,step,loss\n0,{number},{number}.5\n"
        (again / f"lightning_logs/version_{number}/metrics.csv").write_text(table)
    assert points(again) == [("loss", 2, 2.5), ("loss", 10, 10.5)]


def test_lightnings_table_has_a_row_for_what_was_logged_at_once(tmp_path: Path) -> None:
    board(tmp_path / "lightning_logs/version_0", ("loss", 0.5, 9))
    (tmp_path / "lightning_logs/version_0/metrics.csv").write_text(
        "epoch,loss,step,val_loss\r\n"
        "0,0.5,9,\r\n"
        "0,,9,0.75\r\n"
        "1,nan,,inf\r\n"
        '1,a,x,"0.25"\r\n'
        "\0,\0\r\n"
        "1,0.5\r\n"
    )
    found = points(tmp_path)
    losses = [(9, 0.75), (None, float("inf")), (None, 0.25)]
    assert found == [("loss", 9, 0.5), *(("val_loss", *one) for one in losses)]
    (tmp_path / "results").mkdir()
    (tmp_path / "results/metrics.csv").write_text("class,precision\n1,0.5\n")  # not over time
    assert points(tmp_path) == found


def test_trainer_state_of_transformers_is_read_once(tmp_path: Path) -> None:
    """Each checkpoint repeats the history until its step."""
    history = [
        {"step": 1, "epoch": 0.5, "loss": 3.0, "learning_rate": 0.1, "note": "x"},
        {"step": 2, "epoch": 1.0, "eval_loss": 2.0},
        "damaged",
        {"step": "2", "loss": float("nan")},
    ]
    for folder, count in (
        ("out/checkpoint-1", 1),
        ("out/checkpoint-10", 4),
        ("out/checkpoint-2", 2),
    ):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "trainer_state.json").write_text(
            json.dumps({"log_history": history[:count]})
        )
    first = [("loss", 1, 3.0), ("learning_rate", 1, 0.1)]
    assert points(tmp_path)[:-1] == [*first, ("eval_loss", 2, 2.0)]
    assert summarize(tmp_path).metrics["loss"].nonfinite == 1
    for text in ("{", '{"log_history": 3}', "[]", '{"log_history": [[]]}'):
        (tmp_path / "out/checkpoint-10/trainer_state.json").write_text(text)
        assert points(tmp_path) == [*first, ("eval_loss", 2, 2.0)]
    (tmp_path / "metrics.jsonl").write_text('{"loss": 9.0, "step": 1}\n')
    assert ("loss", 1, 3.0) not in points(tmp_path)


def test_points_ignore_what_was_sent_with_the_job(tmp_path: Path) -> None:
    old = board(tmp_path / "runs/a", ("loss", 3.0, 1))
    grown = board(tmp_path / "runs/a", ("other", 1.0, 1))
    sums = {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in (old, grown)}
    sent = [{"path": str(path.relative_to(tmp_path)), "sha256": one} for path, one in sums.items()]
    (tmp_path / "source.json").write_text(json.dumps({"files": sent}))
    assert points(tmp_path) == []
    with grown.open("ab") as file:
        file.write(old.read_bytes())
    assert points(tmp_path) == [("other", 1, 1.0), ("loss", 1, 3.0)]
    (tmp_path / "source.json").write_text("[" * 100_000)
    assert len(points(tmp_path)) == 3


GOOD = event(1, simple_value=1.0).SerializeToString()


def framed(message: bytes, length: int | None = None) -> bytes:
    """A record, whose header may say another length than it has."""
    head = struct.pack("<Q", len(message) if length is None else length)
    return head + b"\0" * 4 + message + b"\0" * 4


@pytest.mark.parametrize(
    "damage",
    [
        b"\0" * 1000,
        framed(GOOD, length=2**64 - 1),
        framed(b"\x0b"),  # a group, which no event has
        framed(b"\xff" * 50),
        framed(b"\x2a\xff\xff\xff\x0f" + b"x" * 10),  # a summary that is longer than the record
        framed(b"\x2a\x04\x0a\x02\x15\x00"),
        framed(b"\x09\x00"),
        b"\x89PNG" * 10,
    ],
    ids=["zeros", "length", "group", "number", "longer", "value", "time", "other"],
)
def test_file_is_read_up_to_the_first_record_that_is_damaged(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "a.tfevents.1").write_bytes(framed(GOOD) + damage + framed(GOOD))
    (tmp_path / "a.tfevents.2").write_bytes(framed(GOOD))
    assert points(tmp_path) == [("x", 1, 1.0)] * 2


def test_points_of_a_file_cut_or_damaged_at_any_byte(tmp_path: Path) -> None:
    path = written(
        tmp_path, event(1, simple_value=1.0), event(2, tensor=TensorProto(dtype=1, float_val=[2.0]))
    )
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place])
        assert len(points(tmp_path)) < 2
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        assert len(points(tmp_path)) <= 2


def test_blocks_beyond_the_limit_of_bytes_are_left_out_and_named(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"{number}").mkdir()
        (tmp_path / f"{number}/a.tfevents.1").write_bytes(framed(GOOD) * 10)
    assert len(points(tmp_path)) == 40
    files = MetricFiles(tmp_path, ReadBudget(8 * (4 << 10) + 1000))
    values = [value for block in files.blocks() for value in block.columns.values()]
    assert sum(len(column.ys) for column in values) in range(1, 16)
    assert len(files.left_out) == 1


@pytest.mark.parametrize("more", [0, 1 << 20])
def test_spent_limit_is_named_beside_other_damage_if_it_left_something_out(
    tmp_path: Path, more: int
) -> None:
    text = '{"step": 1, "loss": 1.0}\n'
    long = f'{{"x": "{"y" * (3 << 20)}"}}\n'
    (tmp_path / "metrics.jsonl").write_text(text + long + text)
    (tmp_path / "metrics.csv").write_text("step,val\n1,2.0\n")
    files = MetricFiles(tmp_path, ReadBudget(2 * len(text) + len(long) + more))
    names = {name for block in files.blocks() for name in block.columns}
    assert names == ({"loss", "val"} if more else {"loss"})
    assert len(files.left_out) == (1 if more else 2)


def test_limit_that_is_just_enough_leaves_nothing_out(tmp_path: Path) -> None:
    (tmp_path / "a.tfevents.1").write_bytes(framed(GOOD))
    files = MetricFiles(tmp_path)
    assert len([*files.blocks()]) == 1
    spent = ReadBudget().left - files.budget.left
    exact = MetricFiles(tmp_path, ReadBudget(spent))
    assert len([*exact.blocks()]) == 1
    assert exact.left_out == []


def test_blocks_after_very_many_files_are_left_out_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other files count. The folder that comes after them is not read."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/a.tfevents.1").write_bytes(framed(GOOD))
    assert len(points(tmp_path)) == 1
    other = SimpleNamespace(name="file", is_dir=lambda **_: False)
    listings = {
        tmp_path: [*os.scandir(tmp_path), *[other] * 270_000],
        tmp_path / "folder": [*os.scandir(tmp_path / "folder")],
    }
    monkeypatch.setattr(os, "scandir", lambda folder: nullcontext(listings[Path(folder)]))
    files = MetricFiles(tmp_path)
    assert [*files.blocks()] == []
    assert len(files.left_out) == 1


@pytest.mark.parametrize(
    ("message", "least"),
    [(b"\x3a\xe8\x07" + b"x" * 1000, 1000), (b"\x10\0" * 1000, 8000)],
    ids=["long", "fields"],
)
def test_event_files_limit_counts_records_without_a_scalar(message: bytes, least: int) -> None:
    content = framed(message) * 100 + framed(GOOD)

    def events(*limit: int) -> int:
        with TemporaryFile() as file:
            file.write(content)
            file.seek(0)
            return len([*EventFiles(ReadBudget(*limit)).events(file)])

    assert (events(), events(100 * least)) == (1, 0)


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "linked-folder"])
def test_links_and_pipes_are_not_read(tmp_path: Path, kind: str) -> None:
    real = board(tmp_path / "elsewhere", ("loss", 1.0, 1))
    run = tmp_path / "run"
    run.mkdir()
    path = run / "a.tfevents.1"
    {
        "link": lambda: path.symlink_to(real),
        "pipe": lambda: os.mkfifo(path),
        "folder": path.mkdir,
        "linked-folder": lambda: (run / "runs").symlink_to(real.parent),
    }[kind]()
    assert points(run) == []
