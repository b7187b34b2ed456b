"""Limits of the kernel for many nodes. A cluster of 16 nodes is in tests/e2e/test_many.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.providers.local import system

INSTANCES = "fs/inotify/max_user_instances"
AUTOGROUP = "kernel/sched_autogroup_enabled"
ROOMY = "fs/inotify/max_user_watches"


@pytest.fixture
def kernel(tmp_path: Path) -> system.KernelFiles:
    """A kernel with its default settings, except for one limit that was raised before."""
    for name in (*system._KERNEL_LIMITS, ROOMY):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("1048576\n" if name == ROOMY else "128\n")
    (tmp_path / AUTOGROUP).parent.mkdir()
    (tmp_path / AUTOGROUP).write_text("1\n")
    return system.KernelFiles(tmp_path, tmp_path / "record.json")


def settings(kernel: system.KernelFiles) -> dict[str, int]:
    return {name: int((kernel.settings / name).read_text()) for name in (INSTANCES, ROOMY)}


def test_raise_kernel_limits_changes_nothing_for_a_few_nodes(kernel: system.KernelFiles) -> None:
    before = settings(kernel)
    assert system.raise_kernel_limits(system.NODES_IN_DEFAULT_LIMITS, kernel) == ()
    system.restore_kernel_settings(kernel)
    assert settings(kernel) == before


def test_raise_kernel_limits_is_reverted_by_restore(kernel: system.KernelFiles) -> None:
    before = settings(kernel)
    notes = system.raise_kernel_limits(17, kernel)
    assert any("max_user_instances from 128" in note for note in notes)
    # Nobody's higher limit is lowered.
    assert settings(kernel) == {INSTANCES: 8192, ROOMY: 1048576}
    # The second cluster finds them raised.
    assert system.raise_kernel_limits(40, kernel) == ()
    system.restore_kernel_settings(kernel)
    assert settings(kernel) == before
    system.restore_kernel_settings(kernel)  # nothing is left to put back
    assert settings(kernel) == before


def test_sessions_share_no_cpus_while_a_cluster_is_up(kernel: system.KernelFiles) -> None:
    (note,) = system.disable_autogroup(kernel)
    assert "kernel.sched_autogroup_enabled from 1" in note
    # The second cluster finds it so.
    assert system.disable_autogroup(kernel) == ()
    system.raise_kernel_limits(17, kernel)
    system.restore_kernel_settings(kernel)
    assert (kernel.settings / AUTOGROUP).read_text() == "1"
    assert settings(kernel)[INSTANCES] == 128


def test_kernel_without_autogroups_is_left_alone(kernel: system.KernelFiles) -> None:
    (kernel.settings / AUTOGROUP).unlink()
    assert system.disable_autogroup(kernel) == ()
    system.restore_kernel_settings(kernel)
    assert not (kernel.settings / AUTOGROUP).exists()
