"""The decisions of clusterctl's Ansible modules."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.support.plays import load_module

# As `sacctmgr show` printed them once everything below was entered.
TABLES = {
    "associations": [
        ["root", "", "high,normal"],
        ["root", "root", "high,normal"],
        ["clusterctl", "", "high,normal"],
        ["clusterctl", "ada", "high,normal"],
        ["default", "", "high,normal"],
        ["default", "ada", "high,normal"],
    ],
    "user": [["ada", "default"]],
    "qos": [["normal", "0", "", ""], ["high", "100", "00:02:00", "DenyOnLimit"]],
}
FRESH: dict[str, list[list[str]]] = {
    "associations": [],
    "user": [["root", "root"]],
    "qos": [["normal", "0", "", ""]],
}


def wanted(**more: Any) -> dict[str, Any]:
    return {
        "cluster": "demo",
        "accounts": ["clusterctl", "default"],
        "users": [
            {"name": "ada", "accounts": ["default", "clusterctl"]},
        ],
        "qos": [{"name": "high", "priority": 100, "max_time_s": 90}],
        **more,
    }


class TestAccounting:
    def test_accounting_plan_fills_an_empty_database_in_order(self) -> None:
        commands = [
            " ".join(words) for words in load_module("slurm_accounting").plan(wanted(), FRESH)
        ]
        assert commands == [
            "add cluster demo",
            "add qos high priority=100 maxwall=00:02:00 flags=DenyOnLimit",
            "modify account where name=root cluster=demo set qos=high,normal",
            "add account clusterctl,default cluster=demo",
            "add user ada account=default,clusterctl cluster=demo",
        ]

    def test_accounting_plan_of_a_complete_database_is_empty(self) -> None:
        assert load_module("slurm_accounting").plan(wanted(), TABLES) == []

    def test_accounting_plan_adds_an_account_and_changes_the_default(self) -> None:
        users = [{"name": "ada", "accounts": ["physics", "default"]}]
        commands = load_module("slurm_accounting").plan(
            wanted(accounts=["physics"], users=users), TABLES
        )
        assert [" ".join(words) for words in commands] == [
            "add account physics cluster=demo",
            "add user ada account=physics cluster=demo",
            "modify user where name=ada set defaultaccount=physics",
        ]

    def test_accounting_plan_changes_and_removes_limits(self) -> None:
        plan = load_module("slurm_accounting").plan
        longer = plan(wanted(qos=[{"name": "high", "priority": 100, "max_time_s": 90_000}]), TABLES)
        assert longer[0][-2] == "maxwall=1-01:00:00"
        lifted = plan(wanted(qos=[{"name": "high", "priority": 100, "max_time_s": None}]), TABLES)
        assert lifted[0][-2] == "maxwall=-1"

    def test_accounting_plan_keeps_other_allowed_qos(self) -> None:
        rows = [["root", "", "normal,theirs"]]
        (command,) = load_module("slurm_accounting").plan_allowed_qos("demo", wanted()["qos"], rows)
        assert command[-1] == "qos=high,normal,theirs"


class TestServiceCurrent:
    def test_unit_is_stale_if_a_file_changed_after_its_start(self, tmp_path: Path) -> None:
        is_stale = load_module("service_current").is_stale
        config = tmp_path / "slurm.conf"
        config.write_text("KillWait=5\n")
        changed = config.stat().st_ctime
        now = changed + 1000
        monotonic = 5000.0

        def started(seconds_after_change: float) -> dict[str, str]:
            moment = (monotonic - 1000 + seconds_after_change) * 1e6
            return {"InactiveExitTimestampMonotonic": str(int(moment))}

        assert is_stale(started(-1), [str(config)], now=now, monotonic=monotonic)
        assert not is_stale(started(+1), [str(config)], now=now, monotonic=monotonic)
        assert not is_stale(started(-1), [], now=now, monotonic=monotonic)
        executed = started(+1)["InactiveExitTimestampMonotonic"]  # itself anew, as slurmctld
        anew = {**started(-1), "ExecMainStartTimestampMonotonic": executed}
        assert not is_stale(anew, [str(config)], now=now, monotonic=monotonic)

    def test_changed_mode_counts_as_a_change(self, tmp_path: Path) -> None:
        """A daemon that could not read its file must be restarted once it can."""
        config = tmp_path / "munge.key"
        config.write_bytes(b"key")
        os.utime(config, (0, 0))
        started = {"InactiveExitTimestampMonotonic": str(int((time.monotonic() - 3600) * 1e6))}
        now = time.time()
        monotonic = time.monotonic()
        assert load_module("service_current").is_stale(
            started, [str(config)], now=now, monotonic=monotonic
        )

    @pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
    def test_listening_port_is_found_without_a_connection(self, family: int) -> None:
        listens = load_module("service_current").listens
        with socket.socket(family) as server:
            server.bind(("127.0.0.1" if family == socket.AF_INET else "::1", 0))
            port = server.getsockname()[1]
            assert not listens(port)
            server.listen()
            assert listens(port)
        assert not listens(port)

    def test_masks_until_the_next_boot_are_removed_too(self) -> None:
        module = Mock()
        load_module("service_current").unmask(module, "slurmd")
        removed = [call.args[0] for call in module.run_command.call_args_list]
        assert removed == [
            ["systemctl", "unmask", "slurmd"],
            ["systemctl", "unmask", "--runtime", "slurmd"],
        ]

    def test_cause_of_a_failed_daemon_is_read_from_its_log(self, tmp_path: Path) -> None:
        """slurmctld writes the reason for its end to its log, not to the journal."""
        errors_since = load_module("service_current").errors_since
        log = tmp_path / "slurmctld.log"
        log.write_text("[2026-11-20T08:20:00.100] fatal: an old story\n")
        start = log.stat().st_size
        again = (
            "[2026-11-20T08:25:3{0}.154] Not running as root\n"
            "[2026-11-20T08:25:3{0}.154] error: cannot find sched plugin for sched/nonsense\n"
            "[2026-11-20T08:25:3{0}.154] fatal: Failed to initialize sched plugin\n"
        )
        with log.open("a") as file:
            file.writelines(again.format(second) for second in (1, 2))
        assert errors_since(str(log), start) == [
            "error: cannot find sched plugin for sched/nonsense",
            "fatal: Failed to initialize sched plugin",
        ]
        assert errors_since(str(log), log.stat().st_size) == []
        assert errors_since(str(tmp_path / "none.log"), 0) == []
