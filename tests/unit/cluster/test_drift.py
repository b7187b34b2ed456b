"""What drifted is told by name; what is as it was noted, or not ours, is not."""

from __future__ import annotations

import pytest

from clusterctl.cluster.converge import drifted, hosts_with_drift, repairs_of, touches_slurm
from clusterctl.cluster.session import Drift

NOTED = {
    "file /etc/munge/munge.key": "a1 400 1:1",
    "file /etc/slurm/slurm.conf": "b2 644 0:0",
    "unit munge": "running",
    "unit slurmd": "running",
    "user ada": "2001:2001 ada /shared/home/ada /bin/bash",
    "accounting all": "c3",
}


def test_a_host_as_it_was_noted_has_not_drifted() -> None:
    assert drifted(NOTED, NOTED) == ()
    assert hosts_with_drift({"d-ctl": NOTED}, {"d-ctl": NOTED}) == ()


def test_a_host_that_nothing_was_noted_of_has_drifted() -> None:
    assert hosts_with_drift({}, {"d-ctl": NOTED}) == ("d-ctl",)


@pytest.mark.parametrize(
    ("key", "mark", "told"),
    [
        ("file /etc/munge/munge.key", "missing", "/etc/munge/munge.key was missing: put back"),
        ("file /etc/slurm/slurm.conf", "b3 644 0:0", "/etc/slurm/slurm.conf was changed: put back"),
        ("unit slurmd", "stopped", "slurmd was stopped: started"),
        ("unit slurmd", "failed", "slurmd had failed: started"),
        ("unit slurmd", "stopped disabled", "slurmd was stopped and disabled: enabled and started"),
        ("unit slurmd", "running disabled", "slurmd was disabled: enabled"),
        ("unit slurmd", "masked", "slurmd was masked: unmasked and started"),
        ("unit munge", "running outdated", "munge had not read its configuration: restarted"),
        ("user ada", "missing", "the account ada was missing: put back"),
        ("accounting all", "c4", "accounts or users in the accounting were changed: put back"),
    ],
)
def test_what_drifted_and_was_put_back_is_named(key: str, mark: str, told: str) -> None:
    before = {**NOTED, key: mark}
    assert drifted(NOTED, before) == (key,)
    assert [str(one) for one in repairs_of("d-ctl", NOTED, before, NOTED)] == [f"d-ctl: {told}"]


def test_a_bad_state_is_drift_even_if_it_was_noted() -> None:
    stopped = {**NOTED, "unit slurmd": "stopped"}
    assert drifted(stopped, stopped) == ("unit slurmd",)


def test_what_configuring_left_as_it_is_was_not_ours_to_mend() -> None:
    before = {**NOTED, "accounting all": "theirs"}
    assert repairs_of("d-ctl", NOTED, before, before) == []


def test_a_new_user_has_not_drifted() -> None:
    before = {**NOTED, "user bob": "missing"}
    after = {**NOTED, "user bob": "2002:2002 bob /shared/home/bob /bin/bash"}
    assert drifted(NOTED, before) == ("user bob",)
    assert repairs_of("d-ctl", NOTED, before, after) == []


def test_a_restart_is_told_of_only_where_no_file_is() -> None:
    before = {**NOTED, "file /etc/munge/munge.key": "a2 400 1:1", "unit munge": "running outdated"}
    told = repairs_of("d-ctl", NOTED, before, NOTED)
    assert told == [Drift("d-ctl", "/etc/munge/munge.key was changed", "put back")]


def test_a_user_who_is_gone_has_a_home_that_is_not_theirs() -> None:
    noted = {**NOTED, "home ada": "fit"}
    before = {**noted, "user ada": "missing", "home ada": "missing"}
    assert [one.what for one in repairs_of("d-ctl", noted, before, noted)] == ["the account ada was missing"]


def test_what_could_not_be_asked_has_drifted_but_is_not_said_to_be_changed() -> None:
    before = {**NOTED, "accounting all": "no answer"}
    assert drifted(NOTED, before) == ("accounting all",)
    assert repairs_of("d-ctl", NOTED, before, NOTED) == []


def test_slurms_own_files_concern_all_nodes() -> None:
    assert touches_slurm(["file /etc/slurm/slurm.conf"])
    assert not touches_slurm(["file /etc/munge/munge.key", "unit slurmctld"])
