"""What the tests set in this machine's kernel is put back, however they end."""

from __future__ import annotations

from pathlib import Path

from tests.support.autogroup import without_autogroup


def test_it_is_put_back_also_after_an_interrupt(tmp_path: Path) -> None:
    (setting := tmp_path / "sched_autogroup_enabled").write_text("1\n")
    context = without_autogroup(setting)
    context.__enter__()
    assert setting.read_text() == "0"
    assert not context.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None), "it goes on"
    assert setting.read_text() == "1"


def test_what_others_set_is_theirs_to_put_back(tmp_path: Path) -> None:
    (setting := tmp_path / "sched_autogroup_enabled").write_text("0\n")
    with without_autogroup(setting):
        setting.write_text("1")  # the last cluster of another went down
    assert setting.read_text() == "1"


def test_a_kernel_without_autogroups_is_left_alone(tmp_path: Path) -> None:
    with without_autogroup(tmp_path / "none"):
        pass
    assert not (tmp_path / "none").exists()
