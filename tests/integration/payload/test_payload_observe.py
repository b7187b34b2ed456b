"""The progress of a job as its files show it, and the comparison of its results."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from payload.node import observe
from tests.support.played.batch import play


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(observe, "LOOK_S", 0.0)
    return tmp_path


def saved(path: Path, name: str, data: bytes, method: int = zipfile.ZIP_STORED) -> Path:
    """Write a file as torch.save does, which names its first folder by the file."""
    path.parent.mkdir(exist_ok=True, parents=True)
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr(f"{name}/data/0", data)
        archive.writestr(f"{name}/.data/serialization_id", name)
    return path


def test_equal_tensors_have_the_same_hash(folder: Path) -> None:
    hashes = [
        observe.hash_of(str(saved(folder / name, *content)))
        for name, *content in (
            ("a.pt", "step-1.0", b"x"),
            ("b.pt", "step-1.1", b"x"),
            ("c.pt", "step-1.0", b"y"),
        )
    ]
    assert hashes[0] == hashes[1] != hashes[2]


def test_torn_zip_file_is_hashed_by_its_bytes(folder: Path) -> None:
    path = saved(folder / "a.pt", "a", b"x")
    whole = observe.hash_of(str(path))
    os.truncate(path, path.stat().st_size // 2)
    assert observe.hash_of(str(path)) not in {whole, ""}


def test_observe_reports_steps_events_and_complete_checkpoints(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observe, "LOOK_S", 2 * observe.STEP_S)
    watch = observe.FolderWatch()
    (folder / "heartbeat").write_text("7\n")
    (folder / "job.events").write_text('{"event": "start"}\n')
    program = folder / observe.FILES
    saved(program / "checkpoints" / "step-00000007.pt", "x", b"x")
    (program / "checkpoints" / "step-00000009.tmp").touch()
    (program / "iteration-00000005").mkdir()
    (program / "iteration-00000005" / "rank-0.safetensors").write_bytes(b"1234")
    look = watch.look()
    assert [step for _, step in look["steps"]] == [7]
    assert look["events"] == '{"event": "start"}\n'
    numbers = {path: (number, size) for path, (number, _, size, _) in look["checkpoints"].items()}
    assert numbers["files/iteration-00000005"] == (5, 4)
    assert {path: number for path, (number, _) in numbers.items()} == {
        "files/checkpoints/step-00000007.pt": 7,
        "files/iteration-00000005": 5,
    }
    assert watch.look()["steps"] == []


def test_heartbeat_that_is_being_replaced_is_no_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a training that continues would seem to start from zero."""
    monkeypatch.setattr(observe, "LOOK_S", 2 * observe.STEP_S)
    watch = observe.FolderWatch()
    found = []
    for text in ("7\n", "", "8\n", "1\n"):
        (folder / "heartbeat").write_text(text)
        found += [step for _, step in watch.look()["steps"]]
    assert found == [7, 8, 1]


@pytest.mark.parametrize(("created", "expected"), [("100.25", 3.25), ("0.000000", None)])
def test_slow_write_takes_until_the_rename(
    folder: Path, monkeypatch: pytest.MonkeyPatch, created: str, expected: float | None
) -> None:
    """A file system may not tell when a file was created. A rename changes only the time of the
    status.
    """
    play(
        folder / "stat",
        f'text=${{1/"%.6W"/{created}}}; text=${{text/"%.6Z"/103.5}}; echo "${{text#*=}}"',
    )
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    assert observe.seconds_to_write("a.pt") == expected


def test_results_leave_out_files_of_clusterctl_and_older_files(folder: Path) -> None:
    start = {"time": 1000.0, "event": "start", "restarts": 0}
    (folder / "job.events").write_text(json.dumps(start) + "\n")
    program = folder / observe.FILES
    program.mkdir()
    for name in ("input.txt", "metrics.jsonl", "own.log", "result.txt"):
        (program / name).write_text(name)
    os.utime(program / "input.txt", (999, 999))
    saved(program / "checkpoints" / "step-2.pt", "x", b"x")
    saved(program / "model.pt", "x", b"x")
    os.utime(program / "checkpoints" / "step-2.pt", (2000, 2000))
    (program / "iteration-00000003").mkdir()
    for name in ("manifest.json", "rank-0.safetensors"):
        (program / "iteration-00000003" / name).write_text(name)
    os.utime(program / "iteration-00000003", (1500, 1500))
    (folder / "stdout.log").write_text(
        "epoch 0\n\nclusterctl: restart 1 of this job\nepoch 1\nepoch 12\n"
    )
    results = observe.results()
    assert list(results["outputs"]) == ["files/result.txt"]
    checkpoints = results["checkpoints"]
    assert list(checkpoints) == [
        f"files/{name}" for name in ("iteration-00000003", "checkpoints/step-2.pt", "model.pt")
    ]
    # The manifest may contain times.
    (folder_of_ranks,) = (path for path in checkpoints if "iteration" in path)
    assert list(checkpoints[folder_of_ranks]) == [f"{folder_of_ranks}/rank-0.safetensors"]
    assert results["lines"] == {"epoch N": 2}
