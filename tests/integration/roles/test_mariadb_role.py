"""The role mariadb: the database and the account of slurmdbd, with a stand-in for MariaDB."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.plays import changes, program

UNIT = (
    r"LoadState=loaded\nActiveState=active\nUnitFileState=enabled\nNeedDaemonReload=no\n"
    r"InactiveExitTimestampMonotonic=1000000000000000\n"
)
# What `mariadb --batch --skip-column-names` of MariaDB 10.5 to 11.8 prints.
ACCOUNT = "GRANT USAGE ON *.* TO `slurm`@`localhost` IDENTIFIED VIA unix_socket\n"
RIGHTS = "GRANT ALL PRIVILEGES ON `slurm_acct_db`.* TO `slurm`@`localhost`\n"
WHOLE = {"database": "slurm_acct_db\n", "account": ACCOUNT, "rights": RIGHTS}
MARIADB = """\
sql=$(cat)
cd {folder}
case $sql in
*"SHOW GRANTS FOR slurm@localhost;"*)
    cat database 2>/dev/null
    [ -e account ] || { echo "ERROR 1141 (42000) at line 2: There is no such grant" >&2; exit 1; }
    cat account rights ;;
*) echo "$sql" >changed ;;
esac
"""


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A controller on which MariaDB runs; its folder."""
    program(tmp_path, "mariadb", MARIADB.replace("{folder}", str(tmp_path)))
    program(tmp_path, "systemctl", f"[ $1 = show ] || exit 0; printf '{UNIT}'")
    (tmp_path / "ours.cnf").touch()
    return tmp_path


def configure(host: Path, *, check: bool = False) -> int:
    """Run the role. Return the number of changes."""
    return changes(
        host, "mariadb", "configure", check=check, mariadb_config_file=str(host / "ours.cnf")
    )


def holds(host: Path, state: dict[str, str]) -> None:
    for name in WHOLE:
        (host / name).unlink(missing_ok=True)
        if name in state:
            (host / name).write_text(state[name])


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"database": WHOLE["database"]},
        {**WHOLE, "rights": ""},
        {**WHOLE, "rights": RIGHTS.replace("ALL PRIVILEGES", "SELECT")},
        {**WHOLE, "rights": f"{RIGHTS}GRANT SELECT ON `payroll`.* TO `slurm`@`localhost`\n"},
        {**WHOLE, "account": ACCOUNT.replace("VIA unix_socket", "BY PASSWORD '*0'")},
        {"account": ACCOUNT, "rights": RIGHTS},
    ],
)
def test_mariadb_role_creates_or_repairs_the_account_of_slurmdbd(
    host: Path, state: dict[str, str]
) -> None:
    holds(host, state)
    assert configure(host, check=True) == 1
    assert not (host / "changed").exists()
    assert configure(host) == 1
    assert (host / "changed").read_text().splitlines() == [
        "CREATE DATABASE IF NOT EXISTS slurm_acct_db COMMENT 'created by clusterctl';",
        "CREATE OR REPLACE USER slurm@localhost IDENTIFIED VIA unix_socket;",
        "GRANT ALL PRIVILEGES ON slurm_acct_db.* TO slurm@localhost;",
    ]


@pytest.mark.parametrize("quotation_mark", ["`", '"'])
def test_mariadb_role_leaves_a_working_account_as_it_is(host: Path, quotation_mark: str) -> None:
    """With ANSI_QUOTES among the server's modes, names are between quotation marks."""
    holds(host, {name: text.replace("`", quotation_mark) for name, text in WHOLE.items()})
    assert [configure(host), configure(host, check=True)] == [0, 0]
    assert not (host / "changed").exists()


def test_check_mode_asks_no_mariadb_that_would_be_started(host: Path) -> None:
    stopped = UNIT.replace("=active", "=inactive").replace("=enabled", "=disabled")
    program(host, "systemctl", f"[ $1 = show ] || exit 1; printf '{stopped}'")
    program(host, "mariadb", "exit 1")
    assert configure(host, check=True) == 1
