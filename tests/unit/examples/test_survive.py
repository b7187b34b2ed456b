"""examples/survive.py: a crash leaves whole checkpoints, and a killed training resumes from
them.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from examples import survive
from tests.support.manual import ROOT, blocks


@pytest.fixture(scope="module", autouse=True)
def unpatched_intern() -> Iterator[None]:
    """Tests that import Ansible replace sys.intern, and PyTorch's optimizers can't be loaded
    then.
    """
    intern = sys.intern
    sys.intern = getattr(intern, "unpatched_implementation", intern)
    yield
    sys.intern = intern


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    return tmp_path / "checkpoints"


@pytest.fixture
def single_rank() -> Iterator[None]:
    """A process group with this process as its only rank. Signal handlers are restored
    afterwards.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    for number, handler in handlers.items():
        signal.signal(number, handler)


def writer(value: object) -> Callable[[Path], None]:
    return lambda path: torch.save(value, path)


def flip(data: bytes) -> bytes:
    """Change a byte of the tensor ``torch.arange(64)``."""
    place = data.index(bytes(range(16, 24)))
    return data[:place] + b"\xff" + data[place + 1 :]


def train(steps: int, **options: Any) -> tuple[survive.Training, torch.nn.Linear]:
    """Train a tiny model until ``steps`` steps are done."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters())
    run = survive.Training(model=model, optimizer=optimizer, **options)
    for step in range(run.step, steps):
        optimizer.zero_grad()
        model(torch.full((1, 3), float(step))).sum().backward()
        optimizer.step()
        run.end_step()
    return run, model


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "half": lambda data: data[: len(data) // 2],
    "without its end": lambda data: data[:-1],
    "a changed byte": flip,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_checkpoint_is_skipped(damage: Callable[[bytes], bytes], folder: Path) -> None:
    value = torch.arange(64, dtype=torch.uint8)
    for step in (9, 10):
        survive.save(folder, step, writer(value))
    assert survive.newest(folder) == folder / "step-00000010.pt"
    broken = folder / "step-00000010.pt"
    broken.write_bytes(damage(broken.read_bytes()))
    assert survive.newest(folder) == folder / "step-00000009.pt"


def test_only_damaged_checkpoints_are_an_error(folder: Path) -> None:
    """A training of weeks must not begin from zero because a disk failed."""
    assert survive.newest(folder) is None
    survive.save(folder, 1, writer(1))
    (folder / "step-00000001.pt").write_bytes(b"")
    with pytest.raises(RuntimeError):
        survive.newest(folder)


def crash(*_: object) -> None:
    raise KeyboardInterrupt


def write_half(path: Path) -> None:
    path.write_bytes(b"half")
    crash()


@pytest.mark.parametrize("place", ["write", "fsync", "replace"])
def test_crash_during_save_keeps_checkpoint(
    place: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    survive.save(folder, 1, writer(1))
    with monkeypatch.context() as patch:
        if place != "write":
            patch.setattr({"fsync": os, "replace": Path}[place], place, crash)
        with pytest.raises(KeyboardInterrupt):
            survive.save(folder, 2, write_half if place == "write" else writer(2))
    assert survive.newest(folder) == folder / "step-00000001.pt"
    assert torch.load(folder / "step-00000001.pt") == 1
    assert len(list(folder.glob("*.tmp"))) == 1
    survive.save(folder, 3, writer(3))
    assert sorted(path.name for path in folder.iterdir()) == [
        "step-00000001.pt",
        "step-00000003.pt",
    ]


def test_restart_does_not_share_temporary_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank 0 of a node that was cut off writes the same step as its successor, at the same
    time.
    """
    paths = []

    def write(path: Path) -> None:
        paths.append(path)
        torch.save(len(paths), path)
        if len(paths) == 1:
            monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
            survive.save(folder, 7, write)
            torch.save(1, path)

    survive.save(folder, 7, write)
    assert len(set(paths)) == 2
    assert torch.load(folder / "step-00000007.pt") == 1


def test_newest_two_checkpoints_are_kept(folder: Path) -> None:
    for step in (8, 9, 10, 100):
        survive.save(folder, step, writer(step))
    assert [path.stem for path in sorted(folder.iterdir())] == ["step-00000010", "step-00000100"]


@pytest.mark.usefixtures("single_rank")
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_signal_saves_and_exits_with_75(
    number: signal.Signals, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "_exit", sys.exit)
    run, model = train(3, folder=folder)
    assert not folder.exists()
    os.kill(os.getpid(), number)
    with pytest.raises(SystemExit, check=lambda error: error.code == 75):
        run.end_step()
    again, restored = train(4, folder=folder)
    assert again.step == 4
    assert torch.equal(restored.weight, model.weight)


@pytest.mark.usefixtures("single_rank")
def test_lines_of_the_manual_resume_within_an_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "_exit", sys.exit)
    page = blocks(ROOT / "docs" / "restarts.md")
    (lines,) = (block.text for block in page if block.language == "python" and not block.file)
    steps: list[tuple[int, str]] = []

    def step(*place: Any) -> None:
        steps.append(place)
        if len(steps) == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    def attempt() -> None:
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.Adam(model.parameters())
        values = {"model": model, "optimizer": optimizer, "batches": "abc", "epochs": 3}
        exec(  # noqa: S102 - lines of the manual
            lines.replace("...", "step(epoch, batch)"),
            {**values, "survive": survive, "islice": islice, "step": step},
        )

    with pytest.raises(SystemExit, check=lambda error: error.code == 75):
        attempt()
    attempt()
    assert steps == [(epoch, batch) for epoch in range(3) for batch in "abc"]


@pytest.mark.usefixtures("single_rank")
def test_resumed_training_equals_undisturbed(folder: Path) -> None:
    train(5, folder=folder, seconds=0)
    run, resumed = train(9, folder=folder, seconds=0)
    assert run.step == 9
    assert [path.stem for path in sorted(folder.iterdir())] == ["step-00000008", "step-00000009"]
    _, undisturbed = train(9, folder=folder.with_name("other"))
    assert torch.equal(resumed.weight, undisturbed.weight)


@pytest.mark.usefixtures("single_rank")
def test_each_step_is_in_heartbeat(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heartbeat = tmp_path / "heartbeat"
    monkeypatch.setenv("CLUSTERCTL_HEARTBEAT", str(heartbeat))
    run, _ = train(1, folder=folder)
    assert heartbeat.read_text() == "1\n"
    heartbeat.write_text("100000\n")
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", crash)
        with pytest.raises(KeyboardInterrupt):
            run.end_step()
    assert heartbeat.read_text() == "100000\n"
    run.end_step()
    assert heartbeat.read_text().split()[0] == "3"
