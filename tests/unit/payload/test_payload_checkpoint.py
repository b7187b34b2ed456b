"""Checkpoints of one rank: what is written, when it is believed, and what is refused."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from payload.checkpoint.folder import FolderLock, complete, prepare
from payload.checkpoint.saver import Saver
from payload.checkpoint.session import ResumedState, choose, refuse_others, resume, start_of
from payload.checkpoint.shards import (
    BrokenError,
    CheckpointManifest,
    CheckpointReader,
    Shard,
    held_shards,
    read_manifest,
    scalars,
    verify,
)
from payload.checkpoint.writer import write
from payload.comm.base import Solo
from payload.device.base import Device
from payload.errors import PayloadError, UsageError
from payload.models import mlp
from payload.nn.embedding import Embedding
from payload.nn.module import LayerContext, Unit
from payload.optim.precision import PRECISIONS, LossScale
from payload.parallel.engine import Engine
from payload.parallel.mesh import alone
from tests.support.doubles.layers import batch_of, engine_of
from tests.support.doubles.strict import Strict
from tests.support.messages import refused

GOING_ON = "resuming from"
PRECISION = PRECISIONS["bf16"]
"""Weights that layers compute with are others than the masters, which are saved."""

ON_BOTH = pytest.mark.parametrize("device", ["real", "strict"], indirect=True)


@pytest.fixture
def device(request: pytest.FixtureRequest, real_device: Device) -> Device:
    """The real device, except in tests ``ON_BOTH``: the files of both are the same."""
    return Strict() if getattr(request, "param", "real") == "strict" else real_device


def make_engine(device: Device, *, seed: int = 0, classes: int = 2) -> Engine:
    units = mlp.build(LayerContext(device), inputs=3, classes=classes, hidden=(2,))
    scale = LossScale(4.0, dynamic=True, interval=2)
    return engine_of(device, alone(), units, seed=seed, precision=PRECISION, loss_scale=scale)


def describe(iteration: int, **identity: Any) -> CheckpointManifest:
    return CheckpointManifest(
        iteration, {"dp": 1}, {"hidden": (2,), **identity}, {}, {"lr": 0.1}, []
    )


def go_on(wanted: str, folder: Path, engine: Engine, now: CheckpointManifest) -> ResumedState:
    return resume(choose(wanted, folder, engine.mesh.world), engine, now)


class Records(list[dict[str, Any]]):
    """In the place of a run's ``ResultWriter``: the records, and the lines that were printed."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def write(self, kind: str, **fields: Any) -> None:
        assert kind == "checkpoint"
        self.append(fields)

    def print_line(self, line: str) -> None:
        self.lines.append(line)


def saver_of(engine: Engine, folder: Path, records: Any = None, **options: Any) -> Saver:
    chosen = {"interval": 1, "keep": 9, "wait": True, **options}
    return Saver(engine, folder, describe(0), Records() if records is None else records, **chosen)


Save = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def save(device: Device, tmp_path: Path) -> Iterator[Save]:
    """Train, and save after some iterations; what was recorded of it."""

    def run(*iterations: int, engine: Engine | None = None, **options: Any) -> list[dict[str, Any]]:
        engine = engine or make_engine(device)
        records = Records()
        options = {"wait": False, **options}
        prepare(tmp_path, engine.mesh.world)
        with saver_of(engine, tmp_path, records, **options) as saver:
            for iteration in iterations:
                step(engine, iteration)
                saver.after(iteration, saver.written())
        return records

    return run


def step(engine: Engine, iteration: int) -> None:
    x = np.random.default_rng(iteration).standard_normal((4, 3)).astype(PRECISION.compute)
    batch = batch_of(engine.device, x, np.array([0, 1, 1, 0]))
    engine.step([batch], targets=4, iteration=iteration, lr=0.1)


def numbers(engine: Engine) -> dict[str, Any]:
    return scalars(engine) | {
        shard.tensor: engine.device.to_host(array).tolist() for shard, array in held_shards(engine)
    }


@ON_BOTH
def test_checkpoint_restores_state_for_identical_training(
    device: Device, save: Save, tmp_path: Path
) -> None:
    engine = make_engine(device)
    other = make_engine(device, seed=1)
    records = save(1, 2, 3, engine=engine)
    assert [record["step"] for record in records] == [1, 2, 3]
    assert numbers(engine) != numbers(other)
    resumed = go_on("auto", tmp_path, other, describe(0))
    newest = tmp_path / "iteration-00000003"
    assert resumed == ResumedState(3, [f"{GOING_ON} {newest}"])
    assert numbers(engine) == numbers(other)
    for each in (engine, other):
        step(each, 4)
    assert numbers(engine) == numbers(other)


@ON_BOTH
def test_resume_pads_the_vocabulary_for_the_number_of_ranks(device: Device, tmp_path: Path) -> None:
    engine = engine_of(device, alone(), [Unit("e", Embedding(LayerContext(device), "e", 11, 2))])
    with saver_of(engine, tmp_path) as saver:
        saver.after(1, 0)
    (folder,) = complete(tmp_path).values()
    reader = CheckpointReader(folder, read_manifest(folder))
    rows = device.to_host(engine.storage.master_weights)[:22]
    wanted = Shard("weight", "e.weight", (640, 2), 0, 256, axis=0, part=0, parts=5, rows=11)
    parts = [reader.read(replace(wanted, part=part), np.dtype("float32")) for part in range(5)]
    assert parts[0].tolist() == [*rows.tolist(), *[0.0] * (256 - 22)]
    assert not any(part.any() for part in parts[1:])
    with refused(
        "checkpoint-other-shape", UsageError, "weight/e.weight", "float32 of shape (64, 2)"
    ):
        reader.read(replace(wanted, rows=12), np.dtype("float32"))


@ON_BOTH
def test_rank_state_is_loaded_only_in_the_same_layout(
    device: Device, save: Save, tmp_path: Path
) -> None:
    def engine(residual: float, size: int = 4) -> Engine:
        made = make_engine(device)
        made.own_state = {"residual": device.asarray(np.full(size, residual, "float32"))}
        return made

    def loaded(into: Engine, now: CheckpointManifest) -> tuple[list[float], str]:
        (note,) = go_on("auto", tmp_path, into, now).notes
        numbers: list[float] = device.to_host(into.own_state["residual"]).tolist()
        return numbers, note

    save(1, engine=engine(0.5))
    path = tmp_path / "iteration-00000001"
    assert loaded(engine(0), describe(0)) == ([0.5] * 4, f"{GOING_ON} {path}")
    assert loaded(engine(0, size=5), describe(0))[0] == [0] * 5
    assert loaded(engine(0), replace(describe(0), layout={"dp": 2})) == (
        [0] * 4,
        (
            f"{GOING_ON} {path}, from dp 1 to dp 2; the error feedback of compressed gradients "
            "is reset"
        ),
    )


@ON_BOTH
def test_checkpoint_contains_the_state_at_its_iteration(
    device: Device, save: Save, tmp_path: Path
) -> None:
    short = make_engine(device)
    long = make_engine(device)
    save(1, 2, engine=short, interval=2, wait=True)
    shutil.rmtree(tmp_path / "iteration-00000002")
    save(1, 2, 3, engine=long, interval=2)
    go_on("auto", tmp_path, long, describe(0))
    assert numbers(long) == numbers(short)


@ON_BOTH
def test_checkpoint_is_readable_by_the_safetensors_library(
    device: Device, save: Save, tmp_path: Path
) -> None:
    engine = make_engine(device)
    save(1, engine=engine)
    tensors = load_file(tmp_path / "iteration-00000001" / "rank-00000.safetensors")
    expected = {
        f"{shard.tensor}[0:{shard.stop}]": device.to_host(array).tolist()
        for shard, array in held_shards(engine)
    }
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == expected
    assert "weight/linear0.weight[0:6]" in tensors
    assert "optimizer.velocity/linear1.bias[0:2]" in tensors
    manifest = json.loads((tmp_path / "iteration-00000001" / "manifest.json").read_text())
    assert manifest["config"] == {"lr": 0.1}


@pytest.mark.parametrize("wait", [False, True])
def test_checkpoints_keeps_the_newest(save: Save, tmp_path: Path, wait: bool) -> None:
    save(*range(1, 8), interval=2, keep=2, wait=wait)
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        "iteration-00000004",
        "iteration-00000006",
    ]
    save(8, 9, keep=1)
    assert list(complete(tmp_path)) == [9]


def test_checkpoint_with_any_damaged_byte_is_refused(save: Save, tmp_path: Path) -> None:
    """Every cut, every flipped bit of some pattern, an added byte, and a missing file, of each
    there is.
    """
    save(1, data_state={"mean": [0.5]})
    folder = tmp_path / "iteration-00000001"

    def broken() -> bool:
        try:
            for facts in read_manifest(folder).files:
                verify(folder, facts)
        except BrokenError:
            return True
        return False

    assert not broken()
    names = [facts.name for facts in read_manifest(folder).files]
    assert {path.name for path in folder.iterdir()} == {"manifest.json", *names}
    for name in ("manifest.json", *names):
        path = folder / name
        whole = path.read_bytes()
        with path.open("r+b", buffering=0) as file:
            for at, byte in enumerate(whole):
                os.pwrite(file.fileno(), bytes([byte ^ 1 << at % 8]), at)
                assert broken(), (name, "flipped", at)
                os.pwrite(file.fileno(), bytes([byte]), at)
            assert not broken()
            os.pwrite(file.fileno(), b"\n", len(whole))
            assert broken(), (name, "longer")
            for at in reversed(range(len(whole))):
                file.truncate(at)
                assert broken(), (name, "cut", at)
        path.unlink()
        assert broken(), (name, "missing")
        path.write_bytes(whole)
        assert not broken()


def test_broken_checkpoint_is_named_and_the_previous_used(
    device: Device, save: Save, tmp_path: Path
) -> None:
    save(1, 2, 3)
    engine = make_engine(device, seed=1)
    newest = tmp_path / "iteration-00000003"
    (newest / "rank-00000.safetensors").write_bytes(b"")
    resumed = go_on("auto", tmp_path, engine, describe(0))
    assert resumed.iteration == 2
    assert f"{newest} is broken: " in resumed.notes[0]
    assert "rank-00000.safetensors has 0 bytes" in resumed.notes[0]
    refuse_others(tmp_path, "auto", engine.mesh.world)
    with refused("checkpoint-damaged", UsageError, str(newest), "rank-00000.safetensors has 0"):
        go_on(str(newest), tmp_path, engine, describe(0))
    shutil.rmtree(tmp_path / "iteration-00000001")
    (tmp_path / "iteration-00000002" / "manifest.json").unlink()
    with refused("checkpoints-all-damaged", UsageError, str(newest), "manifest.json is missing"):
        go_on("auto", tmp_path, engine, describe(0))


def test_checkpoint_has_its_own_data_state(device: Device, save: Save, tmp_path: Path) -> None:
    save(1, data_state={"mean": [0.25]})
    save(2, data_state={"mean": [0.5]})
    assert [chosen(tmp_path), chosen(tmp_path, "iteration-00000001")] == [
        {"mean": [0.5]},
        {"mean": [0.25]},
    ]
    (tmp_path / "iteration-00000002" / "data.json").write_text("")
    assert go_on("auto", tmp_path, make_engine(device), describe(0)).iteration == 1
    assert chosen(tmp_path) == {"mean": [0.25]}
    with refused("checkpoint-damaged", UsageError, "data.json has 0 bytes, not 16"):
        chosen(tmp_path, "iteration-00000002")


def chosen(folder: Path, name: str = "") -> Any:
    """What is known of the data, by the newest that is whole or the one of that name."""
    found = choose(str(folder / name) if name else "auto", folder, Solo())
    return found and found.data_state


def test_checkpoint_of_another_format_is_refused(save: Save, tmp_path: Path) -> None:
    save(1)
    path = tmp_path / "iteration-00000001" / "manifest.json"
    text = re.sub(r'"crc32": "\w{8}"', '"crc32": "00000000"', path.read_text(), count=1)
    text = text.replace('"format": 4', '"format": 1')
    path.write_text(text.replace('"00000000"', f'"{zlib.crc32(text.encode()):08x}"'))
    with refused("checkpoints-all-damaged", UsageError, "format 1,", "reads 4"):
        choose("auto", tmp_path, Solo())


def test_broken_checkpoint_is_replaced_by_the_next_save(
    device: Device, save: Save, tmp_path: Path
) -> None:
    save(1, 2, 3)
    (tmp_path / "iteration-00000003" / "manifest.json").write_text("")
    save(3)
    assert go_on("auto", tmp_path, make_engine(device), describe(0)).iteration == 3


def test_resume_from_an_older_checkpoint_is_refused_beside_newer(
    device: Device, save: Save, tmp_path: Path
) -> None:
    save(1, 2)
    first = str(tmp_path / "iteration-00000001")
    resumed = go_on(first, tmp_path, make_engine(device), describe(0))
    assert resumed.iteration == 1
    refuse_others(tmp_path, str(tmp_path / "." / "iteration-00000002"), Solo())
    # From an iteration above these, a run would take them for its own old ones.
    aims = {path: path for path in (first, str(tmp_path / "other" / "iteration-00000004"))}
    for wanted, aim in {**aims, "never": "zero"}.items():
        with refused("checkpoint-newer-exists", UsageError, "iteration-00000002", aim):
            refuse_others(tmp_path, wanted, Solo())
        # What the message advises.
        refuse_others(tmp_path, "auto", Solo())
        refuse_others(tmp_path / "other", wanted, Solo())


def test_auto_without_checkpoints_takes_those_of_the_earlier_run(
    save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `clusterctl submit train --from-run RUN` asks for."""
    save(1)
    earlier = tmp_path / "earlier"
    earlier.mkdir()
    (tmp_path / "iteration-00000001").rename(earlier / "iteration-00000001")
    earlier.rename(tmp_path / "checkpoints")
    monkeypatch.setenv("CLUSTERCTL_FROM_RUN", str(tmp_path))
    found = [choose(resume_from, tmp_path, Solo()) for resume_from in ("auto", "never")]
    assert [each and each.path for each in found] == [
        tmp_path / "checkpoints" / "iteration-00000001",
        None,
    ]
    monkeypatch.setenv("CLUSTERCTL_FROM_RUN", str(tmp_path / "other"))
    with refused("run-without-checkpoints", UsageError):
        choose("auto", tmp_path, Solo())
    save(2)
    found = [choose("auto", tmp_path, Solo())]
    assert [each and each.path for each in found] == [tmp_path / "iteration-00000002"]


@pytest.mark.parametrize("resume_from", ["never", "elsewhere/iteration-00000009", "auto"])
def test_restarted_job_continues_from_its_own_checkpoint(
    save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume_from: str
) -> None:
    """A requeued run would otherwise be refused, as its folder has checkpoints."""
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert start_of(resume_from, tmp_path, Solo()) == resume_from
    save(1)
    assert start_of(resume_from, tmp_path, Solo()) == "auto"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    assert start_of(resume_from, tmp_path, Solo()) == resume_from


def test_resume_without_checkpoints_starts_from_zero(device: Device, tmp_path: Path) -> None:
    assert go_on("auto", tmp_path / "none", make_engine(device), describe(0)) == ResumedState()


def test_checkpoint_of_another_run_is_refused(device: Device, save: Save, tmp_path: Path) -> None:
    save(1)
    made = str(tmp_path / "iteration-00000001")
    differences = ("hidden 2, seed none", "hidden 4,2, seed 3")
    with refused("checkpoint-other-settings", UsageError, made, *differences):
        go_on("auto", tmp_path, make_engine(device), describe(0, hidden=(4, 2), seed=3))
    with refused("checkpoint-other-shape", UsageError, "weight/linear1.weight", "(2, 2)", "(2, 3)"):
        go_on("auto", tmp_path, make_engine(device, classes=3), describe(0))
    engine = make_engine(device)
    engine.optimizer.state["second_moment"] = engine.optimizer.state.pop("velocity")
    with refused(
        "checkpoint-other-model", UsageError, "contain optimizer.second_moment/linear0.weight"
    ):
        go_on("auto", tmp_path, engine, describe(0))


def test_checkpoint_folder_of_a_killed_run_is_removed(tmp_path: Path) -> None:
    left = tmp_path / "iteration-00000007.incomplete"
    left.mkdir()
    (left / "rank-00000.safetensors").touch()
    (tmp_path / "mine.txt").touch()
    prepare(tmp_path, Solo())
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    with refused("checkpoints-unusable", UsageError, "mine.txt", os.strerror(errno.ENOTDIR)):
        prepare(tmp_path / "mine.txt" / "in", Solo())


def test_checkpoint_that_cannot_be_written_fails_the_run(device: Device, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    aside = tmp_path / "aside"
    with saver_of(make_engine(device), folder) as saver:
        saver.after(1, 0)
        folder.rename(aside)
        folder.touch()
        with refused(
            "checkpoint-unwritable", PayloadError, "00000002.", os.strerror(errno.ENOTDIR)
        ):
            saver.after(2, 0)
    assert list(complete(aside)) == [1]


def test_unwritable_last_checkpoint_fails_and_leaves_no_thread(
    device: Device, tmp_path: Path
) -> None:
    before = threading.enumerate()
    (tmp_path / "file").touch()
    with refused("checkpoint-unwritable", PayloadError):  # noqa: SIM117
        with saver_of(make_engine(device), tmp_path / "file", wait=False) as saver:
            saver.after(1, 0, last=True)
    assert threading.enumerate() == before


def test_run_that_fails_does_not_finish_its_file(tmp_path: Path) -> None:
    cancelled = threading.Event()
    write(np.ones(4, np.uint8), tmp_path / "whole", cancelled)
    cancelled.set()
    write(np.ones(4, np.uint8), tmp_path / "begun", cancelled)
    assert [(tmp_path / name).stat().st_size for name in ("whole", "begun")] == [4, 0]


def test_earlier_checkpoint_is_complete_before_an_evaluation(
    device: Device, tmp_path: Path
) -> None:
    with saver_of(make_engine(device), tmp_path, interval=3, wait=False) as saver:
        saver.after(3, 0)
        assert list(complete(tmp_path)) == []
        saver.after(4, 0, evaluated=False)
        assert list(complete(tmp_path)) == [3]


def test_old_checkpoint_that_cannot_be_removed_ends_no_run(device: Device, tmp_path: Path) -> None:
    in_the_way = tmp_path / "iteration-00000001.old.incomplete"
    report = Records()
    with saver_of(make_engine(device), tmp_path, report, keep=1) as saver:
        saver.after(1, 0)
        in_the_way.touch()
        saver.after(2, 0)
        assert list(complete(tmp_path)) == [1, 2]
        assert "old checkpoint could not be removed" in report.lines[0]
        in_the_way.unlink()
        in_the_way.with_name("iteration-00000000.old.incomplete").mkdir()  # half removed
        saver.after(3, 0)
    assert list(tmp_path.iterdir()) == [tmp_path / "iteration-00000003"]


def test_folder_in_use_is_refused_naming_the_run(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    with saver_of(make_engine(device), tmp_path, lock=FolderLock(tmp_path, patience_s=0)):  # noqa: SIM117
        with refused("checkpoints-in-use", UsageError, f"process {os.getpid()} on ", "of job 17"):
            FolderLock(tmp_path, patience_s=0)
    FolderLock(tmp_path, patience_s=0).close()
    with refused("checkpoints-unusable", UsageError, ".lock", os.strerror(errno.ENOTDIR)):
        FolderLock(tmp_path / ".lock" / "in", patience_s=0)
