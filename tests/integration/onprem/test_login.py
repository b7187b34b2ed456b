"""Logins to on-prem hosts: the local machine, and jump hosts."""

from __future__ import annotations

import getpass
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from clusterctl.configure.ansible import PlaybookRun, run_playbook
from clusterctl.configure.inventory_file import write_inventory
from clusterctl.errors import ClusterctlError
from clusterctl.hosts.roles import own_paths
from clusterctl.providers.onprem import login
from clusterctl.providers.onprem.access import JumpHost
from clusterctl.providers.onprem.login import Login, check_this_machine
from clusterctl.spec.hosts import OnpremHost
from clusterctl.state.workspace import Workspace
from clusterctl.transport.master import end_all_connections
from clusterctl.transport.openssh import write_ssh_files
from clusterctl.transport.ssh import Connections
from clusterctl.util.process import call_on_hosts
from clusterctl.util.progress import SILENT, report_steps
from tests.integration.onprem.conftest import one_machine
from tests.integration.transport.conftest import running_sshd
from tests.support.messages import condition
from tests.support.processes import ROOT


def test_this_machine_is_reached_by_an_sshd_of_its_own(tmp_path: Path) -> None:
    """It serves one connection of its owner, who need not be root, and opens no port."""
    workspace = Workspace(tmp_path / "a folder")
    workspace.create()
    login = Login({"desk": OnpremHost(address="localhost")}, workspace)
    assert login.run("desk", ("sh", "-c", "id -un; cat"), b"data") == f"{getpass.getuser()}\ndata"
    end_all_connections(workspace.access_config)


@pytest.mark.parametrize(
    ("machine", "jump"),
    [
        (OnpremHost(address="localhost"), None),
        (
            OnpremHost(address="10.0.0.5", port=2222, user="rocky"),
            JumpHost("gate.example.org", "me", None),
        ),
    ],
    ids=["this machine", "behind a jump host"],
)
def test_files_for_a_colleague_name_no_file_of_the_owner(
    tmp_path: Path, machine: OnpremHost, jump: JumpHost | None
) -> None:
    workspace = Workspace(tmp_path / "state")
    workspace.create()
    cluster = one_machine(machine, "ssh-ed25519 AAAA")
    (host,) = cluster.hosts
    jumps = {host.name: jump} if jump else {}
    proxy = Login({host.name: machine}, workspace, jumps=jumps).proxies()[host.name]
    write_ssh_files(replace(cluster, hosts=(replace(host, proxy_command=proxy),)), workspace)
    page = (ROOT / "docs/howto/colleagues.md").read_text()
    recipe = next(block for block in page.split("```") if ">~/bob.config" in block)
    commands = recipe.partition("\n")[2].replace(
        "~/.local/state/clusterctl/demo", str(workspace.root)
    )
    commands = commands.replace("demo-ctl", host.name).replace("~/bob.", f"{tmp_path}/bob.")
    subprocess.run(["bash", "-ec", commands], check=True)
    config = (tmp_path / "bob.config").read_text()
    assert str(workspace.root) not in config
    assert f"HostName {host.address}" in config
    assert "User bob" in config
    assert (tmp_path / "bob.known_hosts").read_text() == f"{host.name} ssh-ed25519 AAAA\n"


def test_installation_in_the_job_environment_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "prefix", "/opt/clusterctl/venv")
    refused = check_this_machine("desk")
    assert refused is not None
    assert refused.about == "own-place"


def test_machine_without_sshd_names_the_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert check_this_machine("desk") is None
    monkeypatch.setattr(login, "_PLACES", "/nowhere")
    refused = check_this_machine("desk")
    assert refused is not None
    assert condition(refused) == "tool-missing/sshd"
    assert "openssh-server" in refused.failures[0].fix


def test_only_paths_that_a_cluster_makes_are_leftovers(tmp_path: Path) -> None:
    """An installation of clusterctl, and the owner's own files about it, are none."""
    patterns = own_paths()
    assert {"/opt/clusterctl", "/etc/clusterctl", "/var/lib/clusterctl-host.json*"} <= patterns
    theirs = [
        "/etc/cron.d/clusterctl-doctor",
        "/etc/slurm/slurm.conf.after-clusterctl",
        "/opt/pipx/venvs/clusterctl",
        "/usr/local/bin/clusterctl",
    ]
    names = ["etc/clusterctl", "var/lib/clusterctl-host.json.new"]
    for name in (*names, *(path[1:] for path in theirs)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    script = Path(login.__file__).with_name("data") / "look.sh"
    done = subprocess.run(
        ["sh", script, *(f"{tmp_path}{pattern}" for pattern in sorted(patterns))],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [f"{tmp_path}/{name}" for name in names]
    assert done.stderr == ""


@pytest.mark.parametrize("more", ["", " 0 0"])
def test_mount_of_an_earlier_cluster_is_named(tmp_path: Path, more: str) -> None:
    fstab = tmp_path / "fstab"
    fstab.write_text(f"n1:/shared /shared nfs4 hard,x-clusterctl{more}\n")
    script = (Path(login.__file__).with_name("data") / "look.sh").read_text()
    done = subprocess.run(
        ["sh", "-c", script.replace("/etc/fstab", str(fstab))],
        capture_output=True,
        text=True,
        check=True,
    )
    assert str(fstab) in done.stdout


@pytest.mark.parametrize(
    ("line", "is_ours"),
    [
        ("head:/shared /shared nfs hard,x-clusterctl 0 0", True),
        ("head:/shared /shared nfs hard,x-clusterctl", True),
        ("head:/shared /shared nfs hard,x-clusterctl-of-mine 0 0", False),
        ("nas:/x /x nfs hard 0 0 # x-clusterctl", False),
    ],
)
def test_mount_line_of_the_cluster_is_a_leftover(
    tmp_path: Path, line: str, *, is_ours: bool
) -> None:
    fstab = tmp_path / "fstab"
    fstab.write_text(f"{line}\n")
    script = (Path(login.__file__).with_name("data") / "look.sh").read_text()
    done = subprocess.run(
        ["sh", "-c", script.replace("/etc/fstab", str(fstab))],
        capture_output=True,
        text=True,
        check=True,
    )
    assert [str(fstab) in found for found in done.stdout.splitlines()] == [True] * is_ours


@pytest.mark.parametrize(
    ("programs", "expected"),
    [
        (
            {
                "systemctl": "exit 0",
                "squeue": "echo 'job 7 (train) of ada is RUNNING'",
                "ps": "echo 'slurmstepd: [7.batch]'",
            },
            ["slurmctld runs", "slurmd runs", "job 7 (train) of ada is RUNNING"],
        ),
        (
            {
                "systemctl": '[ "$3" = slurmd ]',
                "squeue": "exit 1",
                "ps": r"printf 'slurmstepd: [%s]\n' 7.batch 7.0 7.extern",
            },
            ["slurmd runs", "job 7 has processes"],
        ),
        (
            {
                "systemctl": "exit 3",
                "squeue": "exit 127",
                "ps": "[ $3 = args= ] || echo 'ada   python -IS /s/payload/node/job.py run --files=/s'",
            },
            ["a job of ada has processes"],
        ),
        ({"systemctl": "exit 4", "squeue": "exit 127", "ps": "echo 'root  /sbin/init'"}, []),
    ],
    ids=["controller", "node", "no-scheduler", "free"],
)
def test_running_lists_daemons_and_jobs_of_a_machine(
    tmp_path: Path, programs: dict[str, str], expected: list[str]
) -> None:
    for name, script in programs.items():
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    script = Path(login.__file__).with_name("data") / "running.sh"
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", script], capture_output=True, text=True, check=True, env={"PATH": path}
    )
    assert done.stdout.splitlines() == expected
    assert done.stderr == ""


def names_by_login(
    machines: Mapping[str, OnpremHost], workspace: Workspace, jump: JumpHost, own: Path
) -> tuple[Mapping[str, str], Mapping[str, ClusterctlError]]:
    """Have each machine print its name. own: the owner's ssh configuration. sshd waits for the end
    of the connections.
    """
    login = Login(machines, workspace, jumps=dict.fromkeys(machines, jump))
    config = workspace.access_config
    # ssh finds ~ without $HOME.
    config.write_text(config.read_text().replace("~/.ssh/config", str(own)))
    try:
        return call_on_hosts(machines, lambda host: login.run(host, ("echo", host)))
    finally:
        end_all_connections(workspace.access_config)


def test_machines_behind_a_jump_host_share_its_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sshd closes connections above MaxStartups whose users are not logged in yet. With the default,
    10:30:100, several of twenty machines were unreachable.
    """
    monkeypatch.setattr("clusterctl.spec.hosts.is_this_machine", lambda _: False)
    user = getpass.getuser()
    workspace = Workspace(tmp_path / "a folder")
    workspace.create()
    with (
        running_sshd(tmp_path / "gate", "MaxStartups 1") as gate,
        running_sshd(tmp_path / "node", "MaxStartups 100") as node,
    ):
        own = tmp_path / "own"
        own.write_text(
            f"Host gate\n    HostName 127.0.0.1\n    IdentityFile {gate.folder / 'id'}\n"
            f"    UserKnownHostsFile {tmp_path / 'known'}\n"
        )
        (tmp_path / "known").write_text(f"[127.0.0.1]:{gate.port} {gate.host_key}\n")
        key = str(node.folder / "id")
        common = {"address": "127.0.0.1", "port": node.port, "user": user, "key": key}
        machines = {f"n{number}": OnpremHost(**common) for number in range(8)}
        workspace.trusted_hosts.write_text("".join(f"{n} {node.host_key}\n" for n in machines))
        jump = JumpHost("gate", user, str(gate.port))
        answers, failed = names_by_login(machines, workspace, jump, own)
        assert [exc.why for exc in failed.values()] == []
        assert {host: text.strip() for host, text in answers.items()} == {n: n for n in machines}


def test_jump_host_with_an_unknown_key_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a shared connection, ssh to the machine would say only that it was closed."""
    monkeypatch.setattr("clusterctl.spec.hosts.is_this_machine", lambda _: False)
    workspace = Workspace(tmp_path / "a folder")
    workspace.create()
    with running_sshd(tmp_path / "gate") as gate:
        jump = JumpHost("127.0.0.1", getpass.getuser(), str(gate.port))
        machine = OnpremHost(address="10.0.0.5", user="rocky")
        login = Login({"node": machine}, workspace, jumps={"node": jump})
        (failure,) = login.trust(["node"])["node"].failures
    assert (failure.code, failure.host) == ("host-key", "node")
    assert "jump host 127.0.0.1" in failure.cause


def test_a_command_logs_in_once_to_each_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection of the first look serves the later phases and Ansible, so that a key that wants
    a touch is asked once. Later logins are refused here.
    """
    monkeypatch.setattr("clusterctl.spec.hosts.is_this_machine", lambda _: False)
    workspace = Workspace(tmp_path / "a folder")
    workspace.create()
    playbook = tmp_path / "site.yml"
    playbook.write_text("- hosts: all\n  tasks: [{command: id}]\n")
    with running_sshd(tmp_path / "sshd") as node:
        key = str(node.folder / "id")
        machine = OnpremHost(address="127.0.0.1", port=node.port, user=getpass.getuser(), key=key)
        workspace.trusted_hosts.write_text(f"node {node.host_key}\n")
        login = Login({"node": machine}, workspace)
        cluster = one_machine(machine, node.host_key)
        write_ssh_files(cluster, workspace)
        write_inventory(cluster, workspace, {})
        try:
            login.run("node", ("true",))
            (node.folder / "authorized_keys").write_text("")
            with Connections(workspace.ssh_config) as connections:
                connections.to("node").run(["true"])
                log = tmp_path / "ansible.log"
                run = PlaybookRun(str(playbook), workspace.ansible_inventory, ["all"], log)
                recap = report_steps(run_playbook(run), SILENT)
        finally:
            end_all_connections(workspace.ssh_config)
    assert recap.changed == 1
