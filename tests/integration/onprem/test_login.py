"""Logins to on-prem hosts: the local machine, the admin account, and Ctrl-C without an answer."""

from __future__ import annotations

import getpass
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from clusterctl.errors import ClusterctlError, CommandError, TransportError, UnreachableError
from clusterctl.providers.onprem import login, remote_account
from clusterctl.providers.onprem.access import AccessError
from clusterctl.providers.onprem.login import (
    Claim,
    Login,
    check_this_machine,
    connect,
    create_account,
    is_installation,
)
from clusterctl.spec.hosts import OnpremHost
from clusterctl.state.workspace import Workspace
from clusterctl.util.process import call_on_hosts
from tests.integration.transport.conftest import running_sshd

CONFIG = """\
Host desk
    HostName localhost
    User clusterctl
    IdentityFile "/nowhere/key"
    UserKnownHostsFile "/nowhere/known_hosts"
"""


def test_owner_of_this_machine_needs_no_ssh(played: Path) -> None:
    machines = {
        "desk": OnpremHost(address="localhost", become="none"),
        "far": OnpremHost(become="none"),
    }
    (played / "far").write_text("free")
    access = Login(machines, Workspace(played))
    asked = ("sh", "-c", "echo ${PLAYED_HOST:-here}; cat")
    assert access.root("desk", asked, b"data") == "here\ndata"
    assert access.root("far", asked, b"data") == "far\ndata"


def test_installation_in_the_job_environment_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "prefix", "/opt/clusterctl/venv")
    refused = check_this_machine("desk")
    assert refused is not None
    assert refused.code == "own-place"


def test_machine_without_sshd_names_the_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert check_this_machine("desk") is None
    monkeypatch.setattr(login, "_PLACES", "/nowhere")
    refused = check_this_machine("desk")
    assert refused is not None
    assert refused.code == "no-sshd"
    assert "openssh-server" in refused.failures[0].fix
    monkeypatch.setattr(remote_account, "find_sshd", lambda: None)
    with pytest.raises(remote_account.RefusedError) as caught:
        remote_account.make_gate("/nowhere")
    assert caught.value.answer["code"] == "no-sshd"


def test_login_lists_are_read_from_sshd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sshd = tmp_path / "sshd"
    sshd.write_text("#!/bin/sh\nprintf 'port 22\\nallowusers %s\\ndenyusers eve\\n' \"${3%%,*}\"\n")
    sshd.chmod(0o755)
    monkeypatch.setattr(remote_account, "find_sshd", lambda: str(sshd))
    assert remote_account.allowed("ada") == ["allowusers user=ada", "denyusers eve"]
    monkeypatch.setattr(remote_account, "find_sshd", lambda: None)
    assert remote_account.allowed("ada") == []


def test_connect_without_the_private_sshd_is_an_error_but_not_unreachable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "ssh_config"
    config.write_text(CONFIG)
    monkeypatch.setattr(login, "GATE", tmp_path / "sshd")
    with pytest.raises(TransportError) as caught:
        connect("desk", config)
    assert not isinstance(caught.value, UnreachableError)
    (tmp_path / "sshd").touch()
    assert connect("desk", config).host == "desk"


def test_installation_of_clusterctl_is_no_leftover(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", "/opt/pipx/venvs/clusterctl")
    package = Path(login.__file__).parents[2]
    own = ["/opt/pipx/venvs/clusterctl", str(package), f"{package}-1.0.dist-info"]
    assert [path for path in own if not is_installation(path)] == []
    left = [
        "/opt/clusterctl",
        "/var/lib/clusterctl-host.json",
        "/etc/hosts: lines from clusterctl",
        "the account clusterctl",
    ]
    assert [path for path in left if is_installation(path)] == []


class FailingLogin:
    """A login to a host that fails with an error."""

    def __init__(self, error: ClusterctlError) -> None:
        self._error = error

    def run(self, *_: object, **__: object) -> None:
        raise self._error

    def close(self) -> None:
        """Close nothing, because no connection is open."""


@dataclass
class Root:
    """Root on a host that answers each request for the account. is_new: the host joins only now."""

    is_new: bool = True
    asked: list[str] = field(default_factory=list)

    def __call__(self, _host: str, argv: Sequence[str], _stdin: bytes = b"") -> str:
        self.asked.append(json.loads(argv[-1])["do"])
        return json.dumps({"ok": True, "is_new": self.is_new, "allowed": ["allowusers rocky"]})


def refusal(error: ClusterctlError, root: Root | None = None) -> AccessError:
    def enter(_: str) -> Any:
        return FailingLogin(error)

    with pytest.raises(AccessError) as caught:
        create_account("gpu1", root or Root(), Claim("abc", "own", "ssh-ed25519 AAAA"), enter)
    return caught.value


@pytest.mark.parametrize(
    "error",
    [
        TransportError("it does not accept our key", host="gpu1"),
        CommandError("`sudo -n true` failed", rc=1, stderr="", where="gpu1", host="gpu1"),
    ],
)
@pytest.mark.parametrize("is_new", [True, False])
def test_create_account_removes_a_new_account_that_the_host_refuses(
    error: ClusterctlError, is_new: bool
) -> None:
    """`down` logs in as the account, too. The account of a configured host is needed for `down`."""
    root = Root(is_new)
    refusal(error, root)
    assert root.asked == (["join", "leave"] if is_new else ["join"])


def test_create_account_tells_sshd_errors_from_sudo_errors() -> None:
    refused = refusal(TransportError("it does not accept our key", host="gpu1"))
    assert refused.code == "login-refused"
    assert "allowusers rocky" in refused.why
    said = "sudo: account validation failure"
    refused = refusal(
        CommandError("`sudo -n true` failed", rc=1, stderr=said, where="gpu1", host="gpu1")
    )
    assert refused.code == "no-sudo"
    assert said in refused.why
    assert "sshd" not in refused.why


ASKS = """
import sys
from pathlib import Path
from clusterctl.providers.onprem.login import Login
from clusterctl.spec.hosts import OnpremHost
from clusterctl.state.workspace import Workspace
from clusterctl.util.process import call_on_hosts
hosts = ["a", "b"]
login = Login({host: OnpremHost(user="rocky") for host in hosts}, Workspace(Path(sys.argv[1])))
call_on_hosts(hosts, lambda host: login.run(host, ["true"]))
"""
SSH = '#!/bin/sh\necho $$ >> "$STARTED"\nexec sleep 600\n'


def test_interrupted_login_ends_ssh_at_once(tmp_path: Path) -> None:
    started = tmp_path / "started"
    ssh = tmp_path / "ssh"
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    asking = subprocess.Popen(
        ["/usr/bin/env", "--default-signal=INT", sys.executable, "-c", ASKS, tmp_path],
        env={**os.environ, "PATH": path, "STARTED": str(started)},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while not started.exists() or len(started.read_text().split()) < len("ab"):
            assert asking.poll() is None
            time.sleep(0.05)
        asking.send_signal(signal.SIGINT)  # to it alone, as `kill` does; a terminal tells ssh, too
        _, said = asking.communicate(timeout=60)  # the played ssh takes ten minutes
    finally:
        asking.kill()
    assert "KeyboardInterrupt" in said
    for pid in started.read_text().split():
        while Path("/proc", pid).exists():
            time.sleep(0.05)


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
    machines: Mapping[str, OnpremHost], workspace: Workspace
) -> tuple[Mapping[str, str], Mapping[str, ClusterctlError]]:
    """Have each machine print its name. The connection to the jump host, for whose end sshd waits,
    ends with the login.
    """
    login = Login(machines, workspace)
    return call_on_hosts(machines, lambda host: login.run(host, ("echo", host)))


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
        keys = gate.folder / "authorized_keys"
        keys.write_text(keys.read_text() + (node.folder / "authorized_keys").read_text())
        jump = f"127.0.0.1:{gate.port}"
        key = str(node.folder / "id")
        common = {"address": "127.0.0.1", "port": node.port, "user": user, "key": key}
        machines = {
            f"n{number}": OnpremHost(**common, jump=(f"{user}@{jump}",)) for number in range(8)
        }
        known = {
            f"[127.0.0.1]:{gate.port}": gate.host_key,
            **dict.fromkeys(machines, node.host_key),
        }
        workspace.trusted_hosts.write_text(
            "".join(f"{name} {host_key}\n" for name, host_key in known.items())
        )
        answers, failed = names_by_login(machines, workspace)
        assert [exc.why for exc in failed.values()] == []
        assert {host: text.strip() for host, text in answers.items()} == {n: n for n in machines}
