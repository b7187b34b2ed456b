"""The heartbeat of the payload's commands: when it changes, and which silent work calls it."""

from __future__ import annotations

import threading
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from payload.checkpoint.shards import (
    _CHUNK,
    CheckpointManifest,
    CheckpointReader,
    FileFacts,
    Shard,
    plan_shards,
    verify,
)
from payload.checkpoint.writer import write
from payload.comm.base import Solo
from payload.commands.bench import BenchRun
from payload.data.datasets import open_dataset
from payload.data.loader import Loader
from payload.data.tokenizer import BytePairs, learn
from payload.device.base import CpuDevice
from payload.node import heartbeat
from payload.parallel.mesh import alone
from payload.saved_model.folder import TrainedModel
from payload.saved_model.record import ModelRecord
from payload.saved_model.safetensors import SafetensorsWriter
from tests.support.clocks import replace_clock
from tests.support.payload import train_config

RANKS = ("OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "PMI_RANK")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file of the heartbeat, with the number of steps that a program has written."""
    file = tmp_path / "heartbeat"
    file.write_text("7\n")
    monkeypatch.setenv("CLUSTERCTL_HEARTBEAT", str(file))
    for name in RANKS:
        monkeypatch.delenv(name, raising=False)
    return file


@pytest.fixture
def beats(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the times of the clock at which ``beat`` was called, a second apart."""
    times: list[float] = []

    def monotonic() -> float:
        times.append(float(len(times)))
        return times[-1]

    replace_clock(monkeypatch, heartbeat, monotonic=monotonic)
    monkeypatch.setattr(heartbeat, "_due_s", 0.0)
    return times


def changes(file: Path, monkeypatch: pytest.MonkeyPatch, *times: float) -> list[bool]:
    """Return for each call of ``beat`` at these seconds whether the time of the file changes."""
    monkeypatch.setattr(heartbeat, "_due_s", 0.0)
    found = []
    for now in times:
        replace_clock(monkeypatch, heartbeat, monotonic=lambda now=now: now)
        before = file.stat().st_mtime_ns
        heartbeat.beat()
        found.append(file.stat().st_mtime_ns != before)
    return found


def test_beat_changes_the_time_of_the_file_at_most_once_a_second(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = changes(file, monkeypatch, 5.0, 5.1, 5.9, 6.0, 6.1, 9.0)
    assert found == [True, False, False, True, False, True]
    assert file.read_text() == "7\n"


def test_beat_creates_the_file(file: Path, beats: list[float]) -> None:
    file.unlink()
    heartbeat.beat()
    assert file.exists()


@pytest.mark.parametrize("name", RANKS)
def test_beat_is_that_of_rank_0(file: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "1")
    assert changes(file, monkeypatch, 5.0) == [False]
    monkeypatch.setenv(name, "0")
    assert changes(file, monkeypatch, 5.0) == [True]


@pytest.mark.parametrize("path", [None, "", "missing/heartbeat"])
def test_beat_without_a_file_does_nothing(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    if path is None:
        monkeypatch.delenv("CLUSTERCTL_HEARTBEAT")
    else:
        monkeypatch.setenv("CLUSTERCTL_HEARTBEAT", path)
    assert changes(file, monkeypatch, 5.0) == [False]
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("work", ["held_out", "training"])
def test_each_micro_batch_is_a_beat(beats: list[float], work: str) -> None:
    dataset = open_dataset(train_config(), Solo())
    loader = Loader(
        dataset, CpuDevice(), alone(), global_batch=10, micro_batch=4, eval_samples=10, seed=1
    )
    assert len([*(loader.held_out() if work == "held_out" else loader.training(1, 1))]) > 0
    assert len(beats) == 3


def test_each_prediction_of_a_trained_model_is_a_beat(beats: list[float]) -> None:
    model = TrainedModel(ModelRecord("mlp", {}, {}, 2, None), [], CpuDevice())
    for _ in range(3):
        model.forward(np.zeros(1))
    assert len(beats) == 3


def test_each_iteration_of_a_benchmark_is_a_beat(beats: list[float]) -> None:
    double: Any = SimpleNamespace(
        batches=[], targets=1, step=lambda *_, **__: None, take=lambda: None, device=CpuDevice()
    )
    BenchRun(double, double, double, double, None).train(3)
    assert len(beats) == 3


def test_each_part_of_a_checkpoint_is_a_beat(tmp_path: Path, beats: list[float]) -> None:
    memory = np.zeros(2 * _CHUNK + 1, np.uint8)
    write(memory, tmp_path / "rank-0", threading.Event())
    assert len(beats) == 3
    verify(tmp_path, FileFacts("rank-0", memory.nbytes, zlib.crc32(memory)))
    assert len(beats) == 6


def test_each_tensor_that_is_loaded_is_a_beat(tmp_path: Path, beats: list[float]) -> None:
    shards = [Shard("weight", name, (3,), 0, 3) for name in ("a", "b")]
    layout, _ = plan_shards([(shard, np.zeros(3)) for shard in shards])
    (tmp_path / "rank-0").write_bytes(layout.header.ljust(layout.size, b"\0"))
    reader = CheckpointReader(
        tmp_path, CheckpointManifest(0, {}, {}, {}, {}, [FileFacts("rank-0", layout.size, 0)])
    )
    for shard in shards:
        reader.read(shard, np.dtype("float64"))
    assert len(beats) == 2


def test_each_tensor_of_a_model_is_a_beat(tmp_path: Path, beats: list[float]) -> None:
    stream = SafetensorsWriter(tmp_path / "model", {"a": (2,), "b": (3,)})
    stream.write(np.zeros(2))
    stream.write(np.zeros(3))
    stream.close()
    assert len(beats) == 2


def test_each_learned_token_and_each_new_word_is_a_beat(beats: list[float]) -> None:
    assert len(learn(b"aaabdaaabac", 259).merges) == 3
    learned = len(beats)
    assert learned >= 3
    BytePairs([]).encode(b"one two one two")
    # The first word has no blank before it.
    assert len(beats) - learned == 3
