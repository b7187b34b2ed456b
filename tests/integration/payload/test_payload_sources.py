"""The batches of several ranks, and data that differs between nodes."""

from __future__ import annotations

from pathlib import Path

from tests.integration.payload.conftest import Runner
from tests.unit.payload.test_payload_sources import _TEXT, _write


def test_ranks_read_their_shares_of_the_same_batches(program: Runner, tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(_TEXT)
    program(4, "feeds.py", str(file))


def test_data_that_differs_between_nodes_is_refused_by_all(program: Runner, tmp_path: Path) -> None:
    for place in ("0", "1"):
        (tmp_path / place).mkdir()
        _write(tmp_path / place)
        (tmp_path / place / "text").write_bytes(_TEXT)
        (tmp_path / place / "longer").write_bytes(_TEXT * (1 + int(place)))
    labels = tmp_path / "1" / "train-labels-idx1-ubyte"
    labels.write_bytes(labels.read_bytes()[:-2] + b"\1\1")
    (tmp_path / "1" / "text").write_bytes(_TEXT.replace(b"cat", b"dog", 1))
    program(2, "differing.py", str(tmp_path), seconds=60)
