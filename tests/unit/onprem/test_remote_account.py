"""What runs as root on a machine to make our account there."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from clusterctl.providers.onprem import remote_account


def test_a_link_that_waits_in_an_accounts_home_leads_nowhere(tmp_path: Path) -> None:
    shadow = tmp_path / "shadow"
    shadow.write_text("root")
    (tmp_path / ".authorized_keys.clusterctl").symlink_to(shadow)
    keys = tmp_path / "authorized_keys"
    assert remote_account.write(keys, "a key\n", 0o600, os.getuid(), os.getgid())
    assert (shadow.read_text(), keys.read_text(), keys.is_symlink()) == ("root", "a key\n", False)
    assert not remote_account.write(keys, "a key\n", 0o600, os.getuid(), os.getgid())


def test_its_lock_is_roots_alone_and_tells_of_its_holder(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.touch(mode=0o644)
    with remote_account.alone(str(lock)):
        assert stat.S_IMODE(lock.stat().st_mode) == 0o600
        with (
            pytest.raises(remote_account.RefusedError, match=f"pid {os.getpid()}, since "),
            remote_account.alone(str(lock), wait_s=0),
        ):
            pass
    with remote_account.alone(str(lock), wait_s=0):
        pass
