"""Giving back a host on which a database server runs: ours goes, what others keep in it stays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.unit.host_ledger.conftest import Machine

GiveBack = Callable[..., tuple[dict[str, Any], list[str]]]
RUNS = "LoadState=loaded\nUnitFileState=enabled\nActiveState=active\n"


@pytest.fixture
def give_back(
    ledger: Callable[..., dict[str, Any]],
    machine: Machine,
    tmp_path: Path,
    util: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
) -> GiveBack:
    """Raise and give back a host with these databases by then; what is said, and whose accounts went."""
    host, folder, gone = util("ledger_host"), tmp_path / "mysql", list[str]()
    touches = {
        "units": ["mariadb.service", "slurmdbd.service"],
        "accounts": ["mysql"],
        "trees": [str(folder)],
        "databases": [{"name": "slurm_acct_db", "user": "slurm", "folder": str(folder)}],
    }

    def act(*names: str) -> tuple[dict[str, Any], list[str]]:
        monkeypatch.setattr(host.shutil, "which", lambda name: name)
        monkeypatch.setattr(host, "groups", lambda: ["root"])
        monkeypatch.setattr(host, "users", lambda: ["root"])
        monkeypatch.setattr(host, "remove_user", lambda _, name: gone.append(name) or "/nonexistent")
        ledger("recorded", **touches)
        for name in names:
            (folder / name).mkdir(parents=True, exist_ok=True)
        monkeypatch.setattr(host, "users", lambda: ["root", "mysql"])
        machine.answers["systemctl", "show"] = (0, RUNS, "")
        ledger("sealed", **touches)
        machine.ran.clear()
        return ledger("restored"), gone

    return act


def test_a_server_that_somebody_uses_by_now_runs_on(
    give_back: GiveBack, machine: Machine, tmp_path: Path
) -> None:
    said, gone = give_back("mysql", "slurm_acct_db", "payroll")
    assert any("payroll" in line for line in said["clusterctl_notes"])
    assert ["systemctl", "stop", "slurmdbd.service"] in machine.ran
    assert ["systemctl", "stop", "mariadb.service"] not in machine.ran
    assert any("DROP DATABASE" in argv[-1] for argv in machine.ran)
    assert gone == []
    assert (tmp_path / "mysql/payroll").is_dir()


def test_our_database_is_dropped_while_its_server_runs(
    give_back: GiveBack, machine: Machine, tmp_path: Path
) -> None:
    (tmp_path / "mysql").mkdir()  # installed before, and stopped
    give_back("mysql", "slurm_acct_db")
    (drop,) = (argv for argv in machine.ran if "DROP DATABASE" in argv[-1])
    order = [argv[-1] for argv in machine.ran if argv[:2] == ["systemctl", "stop"] or argv is drop]
    assert order == ["slurmdbd.service", drop[-1], "mariadb.service"]


def test_an_account_of_a_server_that_is_stopped_is_found_where_it_keeps_them(
    util: Callable[[str], ModuleType], machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(util("ledger_host").shutil, "which", lambda name: name)
    machine.answers["my_print_defaults",] = 0, f"--port=3306\n--datadir={tmp_path}\n", ""
    machine.answers["mariadb",] = 1, "", "Can't connect to local server"
    (tmp_path / "mysql").mkdir()
    (tmp_path / "mysql/global_priv.MAD").write_bytes(b"\x00localhost\x00slurm\x00{}")
    server = util("ledger_host").Databases(machine.run, "/var/lib/elsewhere")
    assert server.has_user("slurm")
    assert not server.has_user("anna")
    assert server.is_there
