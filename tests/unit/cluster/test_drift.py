"""Drift: differences between the recorded and the present state of a host, and their repairs."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.cluster import up
from clusterctl.cluster.context import ClusterContext
from clusterctl.cluster.drift import (
    drift_of_host,
    drifted,
    hosts_with_drift,
    people_marks,
    repairs_of,
    touches_slurm,
    wanted_marks,
)
from clusterctl.cluster.phases import Drift
from clusterctl.errors import ConfigureError
from clusterctl.state.workspace import Workspace
from tests.support.inventories import inventory_of
from tests.support.messages import refused
from tests.support.providers import BareProvider
from tests.support.scripted import ScriptedTransport, Step, use_hosts
from tests.unit.cluster.specs import spec_of
from tests.unit.hosts.answers import answer

CONF = "file /etc/slurm/slurm.conf"
NOTED = {
    "file /etc/munge/munge.key": "a1 400 1:1",
    CONF: "b2 644 0:0",
    "block /etc/hosts": "e5",
    "unit munge": "running",
    "unit slurmd": "running",
    "user ada": "2001",
    "accounting all": "c3",
    "package munge": "installed",
    "package slurmd": "installed",
    "package slurmctld": "installed",
    "absent /etc/slurm.conf": "absent",
    "alone /etc/d/ours.conf": "none",
    "rivals /etc/ours.conf": "none",
    "readable /opt/env": "there",
}


def test_host_drifts_unless_its_marks_are_recorded() -> None:
    assert drifted(NOTED, NOTED) == ()
    assert hosts_with_drift({"d-ctl": NOTED}, {"d-ctl": NOTED}) == ()
    assert hosts_with_drift({}, {"d-ctl": NOTED}) == ("d-ctl",)


@pytest.mark.parametrize(
    ("key", "mark", "repair"),
    [
        ("file /etc/munge/munge.key", "missing", "/etc/munge/munge.key was missing: restored"),
        ("file /etc/slurm/slurm.conf", "b3 644 0:0", "/etc/slurm/slurm.conf was changed: restored"),
        ("block /etc/hosts", "missing", "clusterctl's part of /etc/hosts was missing: restored"),
        ("unit slurmd", "stopped", "slurmd was stopped: started"),
        ("unit slurmd", "stopped disabled", "slurmd was stopped and disabled: started"),
        ("unit munge", "running outdated", "munge was outdated: repaired"),
        ("user ada", "missing", "the account ada was missing: restored"),
        ("absent /etc/slurm.conf", "there", "/etc/slurm.conf existed and took precedence: removed"),
        (
            "alone /etc/d/ours.conf",
            "/etc/d/a.conf",
            "/etc/d/a.conf contradicted /etc/d/ours.conf: moved away",
        ),
        ("rivals /etc/ours.conf", "/x.conf", "/x.conf contradicted /etc/ours.conf: moved away"),
        ("readable /opt/env", "unreadable 750", "users could not read /opt/env: restored"),
        ("readable /opt/env", "missing", "/opt/env was missing: restored"),
        ("package munge", "not installed", "the package munge was missing: restored"),
        ("accounting all", "c4", "the accounting was changed: restored"),
    ],
)
def test_repairs_name_what_was_restored(key: str, mark: str, repair: str) -> None:
    before = {**NOTED, key: mark}
    assert drifted(NOTED, before) == (key,)
    assert [str(repair) for repair in repairs_of("d-ctl", NOTED, before, NOTED)] == [
        f"d-ctl: {repair}"
    ]


def test_wanted_marks_are_of_what_was_written_and_of_the_spec() -> None:
    """What was found never counts as wanted."""
    spec = spec_of(users=[{"name": "ada", "uid": 2001}])
    key = "file /etc/munge/munge.key"
    found = {
        **NOTED,
        key: "an edit",
        "user ada": "2009",
        "package munge": "not installed",
        "unit slurmd": "stopped",
        "absent /etc/slurm.conf": "there",
        "keys ada": "an edit",
    }
    wanted = wanted_marks({key: NOTED[key]}, people_marks(spec), found)
    differing = {
        key,
        "user ada",
        "package munge",
        "unit slurmd",
        "absent /etc/slurm.conf",
        "keys ada",
    }
    assert {*drifted(wanted, found)} == differing


def test_stopped_unit_is_drift_even_if_recorded() -> None:
    stopped = {**NOTED, "unit slurmd": "stopped"}
    assert drifted(stopped, stopped) == ("unit slurmd",)


def test_repairs_omit_what_configuring_left() -> None:
    before = {**NOTED, "accounting all": "theirs"}
    assert repairs_of("d-ctl", NOTED, before, before) == []


def test_new_user_has_not_drifted() -> None:
    before = {**NOTED, "user bob": "missing"}
    after = {**NOTED, "user bob": "2002"}
    assert drifted(NOTED, before) == ("user bob",)
    assert repairs_of("d-ctl", NOTED, before, after) == []


def test_repairs_name_a_restart_only_without_a_changed_file() -> None:
    before = {**NOTED, "file /etc/munge/munge.key": "a2 400 1:1", "unit munge": "running outdated"}
    repairs = repairs_of("d-ctl", NOTED, before, NOTED)
    assert repairs == [Drift("d-ctl", "/etc/munge/munge.key was changed", "restored")]


def test_repairs_of_a_missing_user_name_the_account() -> None:
    noted = {**NOTED, "home ada": "fit"}
    before = {**noted, "user ada": "missing", "home ada": "missing"}
    assert [
        "account ada" in repair.what for repair in repairs_of("d-ctl", noted, before, noted)
    ] == [True]


def test_missing_home_implies_the_keys_in_it() -> None:
    noted = {**NOTED, "home ada": "fit", "key ada": "there", "keys ada": "d4"}
    now = {**noted, "home ada": "missing", "key ada": "missing", "keys ada": "d5"}
    assert [drift.what for drift in drift_of_host("d-ctl", noted, now)] == [
        "the home of user ada was missing"
    ]
    now["home ada"] = "fit"
    assert len(list(drift_of_host("d-ctl", noted, now))) == 2


def test_mark_without_answer_is_drift_but_not_reported() -> None:
    before = {**NOTED, "accounting all": "no answer"}
    assert drifted(NOTED, before) == ("accounting all",)
    assert repairs_of("d-ctl", NOTED, before, NOTED) == []


def test_touches_slurm_is_true_for_files_of_slurm() -> None:
    assert touches_slurm(["file /etc/slurm/slurm.conf"])
    assert not touches_slurm(["file /etc/munge/munge.key", "unit slurmctld"])


@pytest.mark.parametrize("baked", [True, False])
def test_removed_package_is_reinstalled_or_its_node_recreated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, baked: bool
) -> None:
    """With a repository, Ansible installs it again. Hosts that no `up` has configured don't count."""
    munge = {"package munge": "not installed"}
    slurmd = {"package slurmd": "not installed"}
    workspace = Workspace(tmp_path)
    workspace.create()
    workspace.create_secrets()
    now = {"d-1": {}, "d-2": munge | slurmd, "d-3": munge}
    ctl, *nodes = ("d-ctl", *now)
    repair = Step(("...",))
    wanted = {host: {} if host == "d-3" else {"marks": {CONF: NOTED[CONF]}} for host in (ctl, *now)}
    hosts = {
        host: ScriptedTransport(
            [Step(("...",), answer(checksums=NOTED | marks, wanted=wanted[host])), repair]
        )
        for host, marks in {ctl: {}, **now}.items()
    }
    use_hosts(monkeypatch, hosts.__getitem__)
    session = ClusterContext.of(spec_of(), workspace=workspace, provider=BareProvider())
    inventory = inventory_of(*nodes, baked=baked)
    if not baked:
        up.probe(session, inventory)
        assert [
            (name, host.calls[1].argv[-1]) for name, host in hosts.items() if not host.left
        ] == [("d-2", "rm -f /opt/clusterctl/installed-*")]
        return
    with refused("host-unfit/packages", ConfigureError, "d-2") as raised:
        up.probe(session, inventory)
    (failure,) = raised.value.failures
    assert failure.host == "d-2"
    assert failure.cause.endswith(": munge, slurmd")
    assert "node replace" in raised.value.fix
