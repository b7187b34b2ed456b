"""The role selinux labels what differs, with stand-ins for the tools of SELinux.

tests/e2e/test_onprem_selinux.py has the tools themselves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.plays import changes, program, role_data

ROOT = "/opt/clusterctl"
HOMES = "/srv/home"
THEIRS = "fcontext -a -f a -t etc_t -r 's0' '/srv/theirs(/.*)?'"
# Lines of `semanage export` of policycoreutils 3.4 and 3.8.
LABELS = [
    f"fcontext -a -f a -t bin_t -r 's0' '{ROOT}{path}'"
    for path in role_data("selinux")["selinux_programs"]
]
EQUAL = f"fcontext -a -e /home {HOMES}"
ON = "use_nfs_home_dirs              (on   ,   on)  Allow use to nfs home dirs"


class Policy:
    """A policy with these labels and this boolean, and the changes to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # These are what the role asks for, and gives to `semanage import`.
        (folder / "kernel").touch()
        program(
            folder,
            "semanage",
            f"cd {folder}\n"
            "case $1,$2 in export,) cat labels ;; boolean,--list) cat boolean ;; "
            'import,*) cat >>changed; echo >>changed ;; *) echo "$*" >>changed ;; esac',
        )
        program(folder, "restorecon", "")
        self.holds([], "off  ,  off")

    def holds(self, labels: list[str], boolean: str) -> None:
        (self.folder / "labels").write_text("".join(f"{line}\n" for line in labels))
        (self.folder / "boolean").write_text(ON.replace("on   ,   on", boolean) + "\n")

    def configure(self, *, check: bool = False, **variables: Any) -> tuple[int, list[str]]:
        """Run the role. Return the number of changes, and the lines of the tools' input."""
        changed = self.folder / "changed"
        changed.unlink(missing_ok=True)
        known = {
            "selinux_kernel": str(self.folder / "kernel"),
            "selinux_homes": HOMES,
            "selinux_homes_are": "exported",
            **variables,
        }
        number = changes(self.folder, "selinux", "configure", check=check, leads=True, **known)
        lines = changed.read_text().splitlines() if changed.exists() else []
        return number, sorted(filter(None, lines))


@pytest.fixture
def policy(tmp_path: Path) -> Policy:
    return Policy(tmp_path)


ALL = [*(line.replace(" -r 's0'", "") for line in LABELS), EQUAL]
SWITCHED = "boolean --modify --on use_nfs_home_dirs"


def test_selinux_role_labels_programs_and_homes_at_once(policy: Policy) -> None:
    policy.holds([THEIRS], "off  ,  off")
    assert policy.configure(check=True) == (2, [])
    assert policy.configure() == (2, sorted([*ALL, SWITCHED]))


@pytest.mark.parametrize("levels", [True, False], ids=["with levels", "without levels"])
def test_selinux_role_changes_nothing_that_is_right(policy: Policy, levels: bool) -> None:
    policy.holds([THEIRS, *(LABELS if levels else ALL[:-1]), EQUAL], "on   ,   on")
    assert policy.configure(check=True) == policy.configure() == (0, [])


@pytest.mark.parametrize(
    ("labels", "boolean", "repair"),
    [
        ([*LABELS[1:], EQUAL], "on   ,   on", [ALL[0]]),
        (
            [LABELS[0].replace("bin_t", "etc_t"), *LABELS[1:], EQUAL],
            "on   ,   on",
            [ALL[0].replace(" -a ", " -m ")],
        ),
        (
            [*LABELS, EQUAL.replace("/home ", "/root ")],
            "on   ,   on",
            [EQUAL.replace(" -a ", " -m ")],
        ),
        # Until the next boot, or from then on.
        ([*LABELS, EQUAL], "off  ,   on", [SWITCHED]),
        ([*LABELS, EQUAL], "on   ,  off", [SWITCHED]),
    ],
)
def test_selinux_role_repairs_what_differs(
    policy: Policy, labels: list[str], boolean: str, repair: list[str]
) -> None:
    policy.holds(labels, boolean)
    assert policy.configure(check=True) == (1, [])
    assert policy.configure() == (1, repair)


def test_homes_elsewhere_keep_their_labels(policy: Policy) -> None:
    assert policy.configure(selinux_homes_are="mounted") == (2, sorted([*ALL[:-1], SWITCHED]))
    assert policy.configure(selinux_homes_are="node-local") == (1, sorted(ALL))


def test_check_mode_works_before_the_tools_are_installed(policy: Policy) -> None:
    program(policy.folder, "semanage", "exit 127")
    assert policy.configure(check=True) == (2, [])
