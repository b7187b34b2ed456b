"""Tables of a sweep's values in CSV files."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.errors import UsageError
from clusterctl.spec.base import HERE
from clusterctl.spec.job_options import job_options
from clusterctl.spec.sweep import Sweep, as_sweep
from tests.support.messages import refused

TABLE = 'lr,tag,note\n-1e-3,-x,"a, ""b"""\n\n0.1,, c=d\n,,\n'
ROWS = [{"lr": "-1e-3", "tag": "-x", "note": 'a, "b"'}, {"lr": "0.1", "note": "c=d"}]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", TABLE),
        ("A.CSV", "\ufeff" + TABLE.replace("\n", "\r\n")),
        ("b.tsv", 'lr\ttag\tnote\n-1e-3\t-x\t"a, ""b"""\n0.1\t\tc=d\n'),
        ("c.csv", 'lr;tag;note\n-1e-3;-x;"a, ""b"""\n0.1;;c=d'),
    ],
)
def test_table_has_a_combination_in_each_line(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_bytes(text.encode())
    folder = {HERE: tmp_path}
    assert [*map(dict, Sweep.model_validate({"list": name}, context=folder).tasks)] == ROWS
    found = Sweep.model_validate(as_sweep([name, "seed=0..1"]), context=folder).tasks
    assert [*found] == [{**row, "seed": seed} for row in ROWS for seed in "01"]


@pytest.mark.parametrize(
    ("text", "code", "line"),
    [
        ("", "table-line", 1),
        ("lr,tag\n", "table-line", 1),
        ("lr,tag\n1,2\n1,2,3\n", "table-line", 3),
        ("lr,tag\n1\n", "table-line", 2),
        ("lr,tag\n1,a\n2,b\n1,a\n", "table-line", 4),
        ("lr,lr\n1,2\n", "table-line", 1),
        (",lr\n0,1\n", "table-line", 1),
        ('lr,tag\n1,"a"b\n', "table-line", 2),
        ('lr,tag\n1,"a\n', "table-line", 2),
        ("0.1,0.2\n1,2\n", "not-an-option-name", 1),
    ],
)
def test_table_with_a_wrong_line_is_refused_with_its_number(
    tmp_path: Path, text: str, code: str, line: int
) -> None:
    (tmp_path / "p.csv").write_text(text)
    with refused(code, UsageError, f"p.csv, line {line}: "):
        job_options({"sweep": [str(tmp_path / "p.csv")]})


@pytest.mark.parametrize("content", [None, b"a,b\n\xff,1\n", b"x" * (4 << 20) + b"y"])
def test_table_that_can_not_be_read_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "p.csv").write_bytes(content)
    with refused("table-unreadable", UsageError, "p.csv"):
        job_options({"sweep": [str(tmp_path / "p.csv")]})
