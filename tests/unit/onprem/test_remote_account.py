"""What runs as root on a machine to make our account there."""

from __future__ import annotations

import os
from pathlib import Path

from clusterctl.providers.onprem import remote_account


def test_a_link_that_waits_in_an_accounts_home_leads_nowhere(tmp_path: Path) -> None:
    shadow = tmp_path / "shadow"
    shadow.write_text("root")
    (tmp_path / ".authorized_keys.clusterctl").symlink_to(shadow)
    keys = tmp_path / "authorized_keys"
    assert remote_account.write(keys, "a key\n", 0o600, os.getuid(), os.getgid())
    assert (shadow.read_text(), keys.read_text(), keys.is_symlink()) == ("root", "a key\n", False)
    assert not remote_account.write(keys, "a key\n", 0o600, os.getuid(), os.getgid())
