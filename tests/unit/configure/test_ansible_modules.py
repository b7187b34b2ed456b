"""The decisions of clusterctl's Ansible modules."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from ruamel.yaml import YAML

from clusterctl.util.assets import data_folder
from tests.support.plays import load_module

MODULE = load_module("slurm_accounting")


def association(account: str, user: str = "", **limits: str) -> list[str]:
    """A row of `sacctmgr show associations`."""
    return [account, user, "high,normal", *(limits.get(name, "") for name in MODULE.OF_ASSOCIATION)]


def quality(name: str, priority: int, **limits: str) -> list[str]:
    """A row of `sacctmgr show qos` for a QOS that clusterctl has made."""
    return [name, str(priority), "DenyOnLimit", *(limits.get(each, "") for each in MODULE.OF_QOS)]


# As `sacctmgr show` printed them once everything below was entered.
TABLES = {
    "associations": [
        association("root"),
        association("root", "root"),
        association("clusterctl"),
        association("clusterctl", "ada"),
        association("default", GrpTRES="cpu=4,mem=100G", GrpWall="01:40:00"),
        association("default", "ada", MaxJobs="2"),
    ],
    "user": [["ada", "default"]],
    "qos": [quality("normal", 0), quality("high", 100, MaxWall="1-00:02:00", MaxJobsPerUser="4")],
}
FRESH: dict[str, list[list[str]]] = {
    "associations": [],
    "user": [["root", "root"]],
    "qos": [["normal", "0", "", *[""] * len(MODULE.OF_QOS)]],
}


def wanted(**more: Any) -> dict[str, Any]:
    return {
        "cluster": "demo",
        "accounts": [
            {"name": "clusterctl", "limits": {}},
            {"name": "default", "limits": {"GrpTRES": "mem=102400,cpu=4", "GrpWall": "100"}},
        ],
        "users": [
            {
                "name": "ada",
                "accounts": ["default", "clusterctl"],
                "limits": {"default": {"MaxJobs": "2"}},
            }
        ],
        "qos": [{"name": "high", "priority": 100, "limits": {"MaxJobs": "4", "MaxWall": "1-0:2"}}],
        **more,
    }


def planned(tables: dict[str, list[list[str]]] = TABLES, **more: Any) -> list[str]:
    return [" ".join(words) for words in MODULE.plan(wanted(**more), tables)]


class TestAccounting:
    def test_accounting_plan_fills_an_empty_database_in_order(self) -> None:
        assert planned(FRESH) == [
            "add cluster demo",
            "modify qos where name=normal set priority=0 flags=DenyOnLimit",
            "add qos high priority=100 flags=DenyOnLimit MaxJobsPerUser=4 MaxWall=1-0:2",
            "modify account where name=root cluster=demo set qos=high,normal",
            "add account clusterctl,default cluster=demo",
            "add user ada account=default,clusterctl cluster=demo",
            "modify account where name=default cluster=demo set GrpTRES=mem=102400,cpu=4 GrpWall=100",
            "modify user where name=ada account=default cluster=demo set MaxJobs=2",
        ]

    def test_accounting_plan_of_a_complete_database_is_empty(self) -> None:
        assert planned() == []

    def test_accounting_plan_adds_an_account_and_changes_the_default(self) -> None:
        users = [
            {
                "name": "ada",
                "accounts": ["physics", "default"],
                "limits": {"physics": {"MaxJobs": "2"}, "default": {"MaxJobs": "2"}},
            }
        ]
        assert planned(accounts=[{"name": "physics", "limits": {}}], users=users) == [
            "add account physics cluster=demo",
            "add user ada account=physics cluster=demo",
            "modify user where name=ada set defaultaccount=physics",
            "modify user where name=ada account=physics cluster=demo set MaxJobs=2",
        ]

    @pytest.mark.parametrize(
        ("limits", "words"),
        [
            ({"GrpTRES": "cpu=4,mem=100G", "GrpWall": "1:40:00"}, ""),
            ({"GrpTRES": "cpu=8", "GrpWall": "100"}, "GrpTRES=cpu=8,mem=-1"),
            ({}, "GrpTRES=cpu=-1,mem=-1 GrpWall=-1"),
            ({"GrpTRES": "cpu=4,mem=100G", "GrpWall": "100", "GrpSubmit": "9"}, "GrpSubmitJobs=9"),
            ({"GrpTRES": "cpu=4,mem=100G", "GrpWall": "100", "GrpOdd": "9"}, "GrpOdd=9"),
        ],
    )
    def test_accounting_plan_changes_and_lifts_limits(
        self, limits: dict[str, str], words: str
    ) -> None:
        accounts = [{"name": "default", "limits": limits}]
        head = "modify account where name=default cluster=demo set"
        assert planned(accounts=accounts) == ([f"{head} {words}"] if words else [])

    @pytest.mark.parametrize(
        ("name", "field"),
        [
            ("MaxJobs", "MaxJobsPerUser"),
            ("MaxSubmit", "MaxSubmitJobsPerUser"),
            ("MaxTRESPU", "MaxTRESPerUser"),
            ("MaxTRESPerJob", "MaxTRES"),
            ("MaxWallDurationPerJob", "MaxWall"),
            ("MaxTRESMinsPerJob", "MaxTRESMins"),
        ],
    )
    def test_limit_of_a_qos_has_the_name_by_which_it_is_compared(
        self, name: str, field: str
    ) -> None:
        assert [*MODULE.wanted_limits({name: 3}, MODULE.OF_QOS)] == [field]
        assert field in MODULE.OF_QOS

    def test_drift_is_looked_for_in_each_limit(self) -> None:
        """`doctor` finds a limit that somebody has changed."""
        path = data_folder("ansible") / "roles" / "slurmctld" / "meta" / "touches.yml"
        drift = YAML(typ="safe").load(path)["slurmctld_touches"]["drift"]
        ((associations, _, qos),) = (each["accounting"] for each in drift if "accounting" in each)
        assert associations[-1] == f"format=account,user,qos,{','.join(MODULE.OF_ASSOCIATION)}"
        assert qos[-1] == f"format=name,priority,flags,{','.join(MODULE.OF_QOS)}"

    def test_accounting_plan_keeps_other_allowed_qos(self) -> None:
        rows = [["root", "", "normal,theirs"]]
        (command,) = MODULE.plan_allowed_qos("demo", wanted()["qos"], rows)
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
