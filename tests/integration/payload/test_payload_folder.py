"""A run's files: who may write them, what is left of what is not whole, and what a full disk comes
to.
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from payload.checkpoint.folder import FolderLock
from payload.checkpoint.writer import publish
from payload.cli.config import COMPRESSORS
from payload.cli.jsonl import JsonLines
from payload.errors import RankError
from payload.training.tensorboard import EventFile
from tests.integration.payload.conftest import Runner, Starter
from tests.support.messages import refused
from tests.support.payload import assert_one_error, records


def test_publish_with_a_missing_or_short_file_keeps_the_old_one(tmp_path: Path) -> None:
    old = tmp_path / "iteration-00000001"
    new = tmp_path / "iteration-00000002"
    work = tmp_path / "iteration-00000002.ab.incomplete"
    old.mkdir()
    work.mkdir()
    (work / "rank-00000.safetensors").write_bytes(b"1234")

    def tried(sizes: dict[str, int]) -> str:
        with pytest.raises(OSError, match="rank-0000") as caught:
            publish(work, new, {"manifest.json": "{}"}, sizes, [old])
        assert (old.exists(), new.exists()) == (True, False)
        return str(caught.value)

    assert "No such file" in tried({"rank-00000.safetensors": 4, "rank-00001.safetensors": 4})
    assert "has 4 bytes, not 5" in tried({"rank-00000.safetensors": 5})


def test_second_run_in_a_folder_waits_and_resumes_from_the_first(
    alone: Runner, launch: Starter, tmp_path: Path
) -> None:
    flags = (
        "train",
        *"--peak-tflops 1 --save-interval 5 --resume auto --out".split(),
        str(tmp_path),
    )
    elsewhere = tmp_path / "elsewhere"
    checkpoints = tmp_path / "checkpoints"
    alone(*flags, "--iterations", "5", "--checkpoints", str(elsewhere))
    held = FolderLock(checkpoints, patience_s=0)
    with launch(1, "-m", "payload", *flags, "--iterations", "10") as second:
        try:
            assert second.stderr
            assert ", which process " in second.stderr.readline()
            (elsewhere / "iteration-00000005").rename(checkpoints / "iteration-00000005")
            held.close()
            output, errors = second.communicate(timeout=60)
        finally:
            second.terminate()
    assert (second.returncode, errors) == (0, "")
    assert "resuming from " in output


@pytest.mark.parametrize("compress", COMPRESSORS)
def test_residual_is_restored_unless_the_loss_scale_differs(
    mpirun: Runner, tmp_path: Path, compress: str
) -> None:
    def hashes(out: str, iterations: str, scale: str, *, anew: bool = False) -> list[str]:
        flags = (
            "--hidden",
            "16",
            "--compress",
            compress,
            "--save-interval",
            "2",
            "--resume",
            "auto",
        )
        given = ("--iterations", iterations, "--loss-scale", scale, "--out", str(tmp_path / out))
        output = mpirun(2, "train", *flags, *given).stdout
        assert ("compressed gradients is reset" in output) == anew
        return list(records(tmp_path / out, "result")[0]["param_hashes"])

    whole = hashes("whole", "4", "2")
    hashes("parted", "2", "2")
    assert hashes("parted", "4", "2") == whole
    hashes("parted", "5", "4", anew=True)


def test_full_disk_of_metrics_ends_all_ranks_in_one_line(mpirun: Runner, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    answer = mpirun(2, "train", "--iterations", "1", "--out", str(tmp_path), launched=True, rc=1)
    assert "Traceback" not in answer.stderr
    # The other lines are mpirun's.
    (line,) = (line for line in answer.stderr.splitlines() if "payload: error" in line)
    assert_one_error(
        line, "file-unwritable", "rank 0 on ", "metrics.jsonl", os.strerror(errno.ENOSPC)
    )


@pytest.mark.usefixtures("tensorboard_alone")
def test_full_disk_of_tensorboard_files_is_one_line(tmp_path: Path) -> None:
    board = EventFile(tmp_path)
    (file,) = tmp_path.iterdir()
    opened = Path("/proc/self/fd")
    (number,) = (one.name for one in opened.iterdir() if one.exists() and one.samefile(file))
    with Path("/dev/full").open("wb") as full:
        os.dup2(full.fileno(), int(number))
    much = {f"loss{number}": 1.0 for number in range(1000)}  # more than a buffer takes
    with refused("file-unwritable", RankError, f"--out: {tmp_path}", os.strerror(errno.ENOSPC)):
        board.write("training", 1, much)
    with file.open("ab") as again:
        os.dup2(again.fileno(), int(number))
    board.close()


def test_metrics_file_continues_after_existing_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with JsonLines(path) as file:
        for number in range(4):
            file.write("iteration", step=number)
    path.write_text(path.read_text() + '{"kind": "iteration", "st')  # killed while it wrote
    broken = b'\xff\xfe\n\0\0\0\n{"kind": "iter{"kind": "run"}\n7\n\n'  # a node lost power
    path.write_bytes(broken + path.read_bytes())
    with JsonLines(path, keep=lambda record: record["step"] < 2) as file:
        file.write("run")
    kinds = [
        (line["kind"], line.get("step")) for line in map(json.loads, path.read_text().splitlines())
    ]
    assert kinds == [("iteration", 0), ("iteration", 1), ("run", None)]
    with JsonLines(path):
        pass
    assert path.read_text() == ""
