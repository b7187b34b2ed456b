"""Values on the command line of the bundled programs that depend on the files of the node."""

from __future__ import annotations

from pathlib import Path

import pytest

from payload.cli.values import input_path


@pytest.mark.parametrize(
    ("where", "found"),
    [
        (("home",), "home/data"),
        (("job",), "data"),
        # What the job itself has comes first.
        (("home", "job"), "data"),
        ((), "data"),
    ],
)
def test_file_to_read_may_be_below_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: tuple[str, ...], found: str
) -> None:
    for name in ("home", "job"):
        (tmp_path / name).mkdir()
    for name in where:
        (tmp_path / name / "data").touch()
    monkeypatch.chdir(tmp_path / "job")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    expected = tmp_path / found if found != "data" else Path(found)
    assert input_path.read("data") == expected
