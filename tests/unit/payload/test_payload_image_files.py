"""The files that `predict` and `eval` read images from: MNIST's format and CSV."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from payload.data.inputs import read_images
from payload.errors import UsageError
from tests.support.messages import refused
from tests.support.payload import idx_file


@pytest.mark.parametrize(
    ("data", "why"),
    [
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


def test_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"\xff\xd8\xff\xe0 as of a JPEG")
    with refused("not-an-input", UsageError, str(file)):
        read_images(file, (5, 4, 1))


def test_columns_may_have_names_and_semicolons(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("\ufeffp0;p1;p2;p3\n\n1;2;3;4.5\n")
    assert read_images(file, (2, 2, 1)).tolist() == [[[[1], [2]], [[3], [4.5]]]]
