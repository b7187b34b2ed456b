"""The role common: the name of a host in /etc/hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.util.assets import data_folder, read_table
from tests.support.plays import run_play

HOSTS = [{"name": "node", "address": "10.0.0.2"}, {"name": "other", "address": "10.0.0.3"}]
BLOCK = "# BEGIN hosts of this cluster (clusterctl)\n10.0.0.2 node\n10.0.0.3 other\n# END\n"


@pytest.mark.parametrize("is_users", [True, False], ids=["own machine", "local node"])
def test_common_role_removes_the_second_hosts_line_of_a_node(
    tmp_path: Path, is_users: bool
) -> None:
    file = tmp_path / "hosts"
    first = "127.0.0.1 localhost\n"
    other_lines = "10.0.0.3 other\n10.0.0.20 node\n"
    file.write_text(f"{first}10.0.0.2 node\n{other_lines}{BLOCK}")
    tasks = read_table(data_folder("ansible") / "roles/common/tasks/configure.yml", list)
    (task,) = (task for task in tasks if "ansible.builtin.replace" in task)
    task["ansible.builtin.replace"]["path"] = str(file)
    play = {"hosts": "node", "gather_facts": False, "tasks": [task]}
    known = {"common_hosts": HOSTS, "clusterctl_keeps": is_users}
    assert run_play(tmp_path, play, ("ctl", "node"), known=known).returncode == 0
    assert (
        file.read_text()
        == f"{first}{'10.0.0.2 node' + chr(10) if is_users else ''}{other_lines}{BLOCK}"
    )
