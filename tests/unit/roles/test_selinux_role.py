"""The role selinux labels the programs that Slurm and systemd start."""

from __future__ import annotations

from clusterctl.scheduler.slurm.conf import PROLOG, TASK_PROLOG
from clusterctl.spec.names import ROOT
from clusterctl.state.inventory import HEALTH_PROGRAM
from clusterctl.util.assets import data_folder
from tests.support.plays import role_data


def test_selinux_role_labels_the_paths_of_the_programs() -> None:
    programs = [
        TASK_PROLOG,
        f"{ROOT}/watcher",
        f"{ROOT}/fence",
        HEALTH_PROGRAM,
        PROLOG,
        f"{ROOT}/env/bin(/.*)?",
    ]
    root = role_data("selinux", "defaults/main.yml")["selinux_root"]
    assert [f"{root}{path}" for path in role_data("selinux")["selinux_programs"]] == programs


def test_no_role_changes_the_mode_of_selinux() -> None:
    roles = data_folder("ansible") / "roles"
    tasks = "".join(path.read_text() for path in roles.glob("*/tasks/*.yml"))
    assert [word for word in ("setenforce", "/etc/selinux/config") if word in tasks] == []
