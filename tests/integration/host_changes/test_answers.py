"""A file server that does not answer does not keep `down` waiting."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.plays import program


# The end of a program that the kernel may not end is not awaited.
@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
@pytest.mark.parametrize(
    ("script", "answered"), [("exit 0", True), ("exit 1", True), ("exec sleep 600", False)]
)
def test_answers_is_false_if_the_look_at_a_path_does_not_end(
    util: Callable[[str], ModuleType],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: str,
    answered: bool,
) -> None:
    (tmp_path / "bin").mkdir()
    program(tmp_path, "stat", script)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    mounts = util("host_mounts")
    assert mounts.answers(str(tmp_path), 60.0 if answered else 0.5) is answered
