"""The kernel's limits for many nodes; sixteen real ones: tests/e2e/test_many.py, in `make
test-all`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.providers.local import system

INSTANCES = "fs/inotify/max_user_instances"
AUTOGROUP = "kernel/sched_autogroup_enabled"
ROOMY = "fs/inotify/max_user_watches"


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kernel with its defaults, but one limit that somebody raised."""
    for name in (*system._KERNEL_LIMITS, ROOMY):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("1048576\n" if name == ROOMY else "128\n")
    (tmp_path / AUTOGROUP).parent.mkdir()
    (tmp_path / AUTOGROUP).write_text("1\n")
    monkeypatch.setattr(system, "_SYS", tmp_path)
    monkeypatch.setattr(system, "_SETTINGS_RECORD", tmp_path / "record.json")
    return tmp_path


def settings(kernel: Path) -> dict[str, int]:
    return {name: int((kernel / name).read_text()) for name in (INSTANCES, ROOMY)}


def test_raise_kernel_limits_changes_nothing_for_a_few_nodes(kernel: Path) -> None:
    before = settings(kernel)
    assert system.raise_kernel_limits(system.NODES_IN_DEFAULT_LIMITS) == ()
    system.restore_kernel_settings()
    assert settings(kernel) == before


def test_raise_kernel_limits_is_reverted_by_restore(kernel: Path) -> None:
    before = settings(kernel)
    said = system.raise_kernel_limits(17)
    assert any("max_user_instances from 128" in one for one in said)
    # Nobody's higher limit is lowered.
    assert settings(kernel) == {INSTANCES: 8192, ROOMY: 1048576}
    # The second cluster finds them raised.
    assert system.raise_kernel_limits(40) == ()
    system.restore_kernel_settings()
    assert settings(kernel) == before
    system.restore_kernel_settings()  # nothing is left to put back
    assert settings(kernel) == before


def test_sessions_share_no_cpus_while_a_cluster_is_up(kernel: Path) -> None:
    (said,) = system.disable_autogroup()
    assert "kernel.sched_autogroup_enabled from 1" in said
    # The second cluster finds it so.
    assert system.disable_autogroup() == ()
    system.raise_kernel_limits(17)
    system.restore_kernel_settings()
    assert (kernel / AUTOGROUP).read_text() == "1"
    assert settings(kernel)[INSTANCES] == 128


def test_kernel_without_autogroups_is_left_alone(kernel: Path) -> None:
    (kernel / AUTOGROUP).unlink()
    assert system.disable_autogroup() == ()
    system.restore_kernel_settings()
    assert not (kernel / AUTOGROUP).exists()
